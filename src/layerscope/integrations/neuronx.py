"""Application models of neuronx-distributed-inference: what their layers computed, call by call, in a folder per rank.

    app = NeuronMiniMaxM2ForCausalLM(model_path, config)    # config.neuron_config.record_layer_outputs is True
    ready(app, compiled_path)                               # compiles where nothing is compiled yet, then loads
    with application(app, to="runs/neuron") as recorded:
        app(**inputs)
    recorded.ranks[0].run                                   # `layerscope convert runs/neuron D --to neuron`

The taps are in the model's own code, compiled with it: `record_layer_outputs=True`, and `get_layer_hidden_states()` of
its `models.model_base` for the embedding and each decoder layer of the last call. Where that gives a list of tensors
for each of them, one per rank, each rank's go to its own folder.

It has not run on Neuron hardware nor with the library: it is tested against a fake with the library's interface.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerscope.compile_taps.hidden_states import remember
from layerscope.errors import MissingExtra, NothingRecorded, Unsupported
from layerscope.recorder import Recording, RecordOptions, record

_STATES = "neuronx_distributed_inference.models.model_base"
_COMPILED = "model.pt"


def ready(app: Any, path: str | os.PathLike[str], *, compile: bool | None = None) -> Any:
    """Compile the application into a folder, where it is not there yet or `compile` says so, load it and return it."""
    _check(app)
    # The library puts file names behind the path as it was given.
    place = f"{os.fspath(path).rstrip('/')}/"
    if compile or (compile is None and not (Path(place) / _COMPILED).is_file()):
        app.compile(place)
    app.load(place)
    return app


@contextmanager
def application(app: Any, *, to: str | os.PathLike[str] | None = None, **how: Any) -> Iterator[Application]:
    """Record each call of the application until the block ends: the embedding, every decoder layer, the logits.

    `how` is what `record` takes. Points are `embedding`, `layers.0` and so on, and `logits`. Raises NothingRecorded at
    the end where calls left no hidden states, with the reason.
    """
    _check(app)
    recorded = Application(app, to, how)
    with ExitStack() as stack:
        stack.callback(app.register_forward_pre_hook(recorded.begins).remove)
        stack.callback(app.register_forward_hook(recorded.ended).remove)
        stack.enter_context(recorded.closing())
        yield recorded
    recorded.refuse_silence()


class Application:
    """What is recorded of one application: `ranks` has a recording for each rank, once there was a call."""

    def __init__(self, app: Any, to: str | os.PathLike[str] | None, how: dict[str, Any]) -> None:
        self.ranks: list[Recording] = []
        self._app, self._to, self._how = app, to, how
        self._stack = ExitStack()
        self._replays: list[_RankReplay] = []
        self._before: object = None
        self._silent = ""
        self._states = _states()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Seal the runs when the block ends, as complete where it ends well."""
        with self._stack:
            yield

    def begins(self, app: object, args: object) -> None:
        """Note what the call before has left: it must not be taken for what this one computes."""
        self._before = self._states()

    def ended(self, app: object, args: object, output: Any) -> None:
        """Hand over what this call has left, to the recording of each rank."""
        states = self._states()
        if states is None or states is self._before:
            left = "nothing" if states is None else "what was there before it"
            self._silent = f"get_layer_hidden_states() had {left} after a call"
            return
        logits = getattr(output, "logits", None)
        by_rank = [_plain(each) for each in [*states, *([] if logits is None else [logits])]]
        ranks = max(map(len, by_rank))
        if any(len(each) not in (1, ranks) for each in by_rank):
            self._silent = f"layers have the tensors of {sorted({len(each) for each in by_rank})} ranks"
            return
        remember([each[0] for each in by_rank[: len(states)]])
        for rank in range(ranks):
            # What all ranks share, as the logits are once gathered, is the first rank's.
            own = [each[rank] if rank < len(each) else None for each in by_rank]
            hidden, last = own[: len(states)], None if logits is None else own[-1]
            self._replay(rank, len(hidden) - 1, last)(hidden, last)

    def refuse_silence(self) -> None:
        """Raise where calls were made and nothing was recorded."""
        if self._silent and not self.ranks:
            raise NothingRecorded(
                f"{self._silent}: the compiled model does not hand its layers out. Compile it with "
                "record_layer_outputs=True, by a version that returns the layers of each call and not those of tracing."
            )

    def _replay(self, rank: int, layers: int, logits: torch.Tensor | None) -> _RankReplay:
        if len(self._replays) == rank:
            replay = _RankReplay(layers)
            degree = getattr(self._app.config.neuron_config, "tp_degree", 1)
            given = self._how.get("options") or RecordOptions()
            options = replace(
                given,
                name=given.name or type(self._app).__name__,
                mode=given.mode or "neuron",
                weights=bool(given.weights),
                settings={"tp_degree": degree, **given.settings},
                rank=rank,
            )
            taps = ["embedding", "layers.*", *(["logits"] if logits is not None else [])]
            recording = record(replay, taps, to=self._to, **{**self._how, "options": options})
            self.ranks.append(self._stack.enter_context(recording))
            self._replays.append(replay)
        return self._replays[rank]


class _RankReplay(nn.Module):
    """Passes values by, under the names that they are recorded by."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Identity()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        self.logits = nn.Identity()

    def forward(self, states: Sequence[torch.Tensor | None], logits: torch.Tensor | None) -> None:
        """Pass each value to the recording; None is what this rank has not."""
        for place, value in zip([self.embedding, *self.layers, self.logits], [*states, logits], strict=True):
            if value is not None:
                place(value)


def _check(app: Any) -> None:
    """Refuse what is no application, and one whose layers are not compiled into it."""
    config = getattr(getattr(app, "config", None), "neuron_config", None)
    if config is None or not all(callable(getattr(app, verb, None)) for verb in ("compile", "load", "forward")):
        raise Unsupported(
            f"a {type(app).__name__} is no application model of neuronx-distributed-inference: those have compile, "
            "load and a config with a neuron_config."
        )
    if not getattr(config, "record_layer_outputs", False):
        raise Unsupported(
            f"{type(app).__name__} hands no layer out: its neuron_config has no record_layer_outputs=True, which is "
            "compiled into the model. Set it, and compile again."
        )


def _states() -> Any:
    """Return the library's function; one that this process has not got is named with where it comes from."""
    try:
        module = importlib.import_module(_STATES)
    except ImportError as error:
        raise MissingExtra(
            "neuronx-distributed-inference is not installed: it comes with the AWS Neuron SDK, see its setup guide."
        ) from error
    found = getattr(module, "get_layer_hidden_states", None)
    if found is None:
        raise Unsupported(
            f"{_STATES} has no get_layer_hidden_states: this version of the library has no record_layer_outputs; use "
            "its tensor capture, or layerscope.compile(..., backend='neuron')."
        )
    return found


def _plain(value: Any) -> list[torch.Tensor]:
    """Return one value's tensor for each rank, on the host."""
    return [each.detach().cpu() for each in (value if isinstance(value, (list, tuple)) else [value])]
