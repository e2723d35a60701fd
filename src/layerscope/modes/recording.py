"""Record many modes of one model: one run for each, all of them on the same inputs.

    for one in record_modes(model, choose(["essential"], model).modes, batches, "model.layers.*", to="runs"):
        one.address                     # runs/fp32, runs/bf16, ...

Variants are made one after the other and let go, so that two models are in memory at most. Each batch is a step of the
run. The fingerprint of the inputs is taken anew for every mode and stands in the `settings` of each run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from layerscope.errors import RunExists, Unsupported
from layerscope.models import Inputs
from layerscope.modes.feeding import fingerprint_of, fitted
from layerscope.modes.registry import Mode, Setting, variant
from layerscope.modes.stopping import Enough, ending
from layerscope.patterns import select, split
from layerscope.points import Moment, Point
from layerscope.progress import Progress, no_progress
from layerscope.recorder import RecordOptions, record
from layerscope.runtimes.eager import points
from layerscope.store import Run
from layerscope.store.address import folder
from layerscope.store.manifest import NAME

__all__ = ["Forward", "Recorded", "place_of", "plain_forward", "record_modes"]

Forward: TypeAlias = Callable[[nn.Module, Inputs], object]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of one mode: its run, or the error that kept it from being made or finished."""

    mode: Mode
    address: str | None
    run: Run | None = None
    error: Exception | None = None


def record_modes(
    model: nn.Module,
    modes: Sequence[Mode],
    batches: Sequence[Inputs],
    taps: str | Sequence[str],
    *,
    to: str | os.PathLike[str] | None,
    setting: Setting | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    keep: Any = None,
    statistics: str = "full",
    when: str | None = None,
    append: bool = False,
    seed: int = 0,
    forward: Forward | None = None,
    stop_after: str | None = None,
    floors: bool = True,
    progress: Progress | None = None,
) -> Iterator[Recorded]:
    """Record each mode of `model` on all of `batches`, into `to`/MODE (None: in memory), and yield it when it is done.

    A mode that fails is yielded with its error, and the next one is tried. `settings` (plain values) go into every run,
    beside the fingerprint of the inputs. `forward` is how a batch is run, without gradients where it is left out.
    The first mode is the reference of the others; its run carries floors, unless `floors` is false.
    `stop_after` names a module after whose first call a forward ends, where nothing later is recorded.
    """
    asked = [taps] if isinstance(taps, str) else list(taps)
    addresses = [None if to is None else place_of(to, mode) for mode in modes]
    if not append:
        _refuse_existing([address for address in addresses if address is not None])
    given = fingerprint_of(batches)
    stopped = {} if stop_after is None else {"stop_after": stop_after}
    count = _Count(progress or no_progress, _expected(model, asked), len(batches), len(modes))

    def recorded(mode: Mode, address: str | None) -> Run:
        own = variant(model, mode, setting)
        grid = {"quantised": f"mode {mode.name}"} if mode.quantised else {}
        recording = record(
            own,
            asked,
            to=address,
            keep=keep,
            statistics=statistics,
            when=when,
            append=append,
            floors=floors and mode is modes[0] and len(modes) > 1 and stop_after is None and not append,
            options=RecordOptions(
                name=name,
                mode=mode.name,
                settings={"inputs": given, **grid, **stopped, **(settings or {})},
                listener=count,
                progress=count.measuring,
            ),
        )
        torch.manual_seed(seed)
        with recording, ending(own, stop_after):
            for batch in batches:
                with suppress(Enough):
                    (forward or plain_forward)(own, fitted(batch, own))
                count.did_one()
        return recording.run

    for at, (mode, address) in enumerate(zip(modes, addresses, strict=True)):
        run = error = None
        try:
            count.starts(mode, at)
            run = recorded(mode, address)
            if fingerprint_of(batches) != given:
                raise Unsupported(f"mode {mode.name!r} changed the inputs, which every mode is to be given alike")
        except Exception as raised:
            error = _explained(raised, mode, model)
        yield Recorded(mode, address, run, error)


def place_of(to: str | os.PathLike[str], mode: Mode) -> str:
    """Return where the run of a mode is written."""
    return f"{os.fspath(to).rstrip('/')}/{mode.name}"


def plain_forward(model: nn.Module, batch: Inputs) -> object:
    """Run the model on one batch, without gradients."""
    with torch.no_grad():
        return model(*batch.args, **batch.kwargs)


def _explained(error: Exception, mode: Mode, model: nn.Module) -> Exception:
    """Say what is behind an operation that torchao's tensors lack: a Linear that is not called but looked into."""
    if "unimplemented operator" not in str(error):
        return error
    return Unsupported(
        f"mode {mode.name!r} does not fit {type(model).__name__}: its own code uses the weight of a Linear layer as a "
        "bare tensor, which a quantised weight cannot be"
    )


def _refuse_existing(addresses: Sequence[str]) -> None:
    """Refuse before the first mode is made: to find out at the last one would waste all that came before."""
    there = [address for address in addresses if NAME in folder(address).names()]
    if there:
        raise RunExists(
            f"{', '.join(there)} {'holds a run' if len(there) == 1 else 'hold runs'} already; "
            "give another folder, or append=True or --append to add steps."
        )


def _expected(model: nn.Module, taps: Sequence[str]) -> int:
    """Return how many records a forward makes; operations are known once they run and count for nothing."""
    modules = split(taps).modules
    return max(1, len(select(modules, points(model)))) if modules else 1


class _Count:
    """Counts records as they are made, over modes x batches x points."""

    def __init__(self, progress: Progress, expected: int, batches: int, modes: int) -> None:
        self._tell = progress
        self._expected = expected
        self._batches = batches
        self._total = expected * batches * modes
        self._mode = ""
        self._forwards = 0
        self._seen = 0

    def starts(self, mode: Mode, at: int) -> None:
        self._mode, self._forwards, self._seen = mode.name, at * self._batches, 0
        self._say("being made")

    def did_one(self) -> None:
        self._forwards, self._seen = self._forwards + 1, 0

    def wants(self) -> bool:
        return True

    def seen(self, point: Point, moment: Moment, tensor: torch.Tensor, summary: object) -> None:
        self._seen = min(self._seen + 1, self._expected)  # a point with several leaves makes several records
        self._say(point.place)

    def measuring(self, what: str, done: int, total: int) -> None:
        """Say what is measured of the reference, which counts for no record."""
        self._say(what)

    def _say(self, what: str) -> None:
        self._tell(f"{self._mode}: {what}", self._forwards * self._expected + self._seen, self._total)
