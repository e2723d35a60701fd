"""What every runtime can be asked: each is a module with these verbs, found by `layerscope.runtimes.find`.

runtime = find(model)
with runtime.watch(model, {"layers.3": {"output"}}, sink) as callable:
    callable(x)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.points import Side
from layerscope.runtimes.sink import RuntimeSink

if TYPE_CHECKING:
    import torch

Wanted = Mapping[str, Collection[Side]]  # the sides to watch, by module name
Weights = dict[str, list[tuple[str, "torch.Tensor"]]]  # each module's own parameters, then its buffers


class Runtime(Protocol):
    """The verbs of a runtime; `model` is what `find` was given, or what `opened` made of its path."""

    NAME: str
    """What `run.json` calls the runtime."""

    def points(self, model: Any, /) -> list[Place]:
        """List the places where tensors can be seen, in the order of the model."""

    def remark(self, model: Any, /) -> str:
        """Say what a reader of the points should know; empty where they are simply the model's modules."""

    def notes(self, model: Any, /) -> dict[str, Any]:
        """Return what the run is to say of this recording among its settings, once it is over."""

    def shared(self, model: Any, /) -> dict[str, str]:
        """Map the other names of shared modules to the name they are recorded under."""

    def check(self, model: Any, wanted: Wanted, /, *, ops: bool) -> None:
        """Refuse what this runtime cannot see, before anything is written; `ops` when operations are asked for."""

    def watch(
        self, model: Any, wanted: Wanted, sink: RuntimeSink, /, *, ops: Callable[[str], str | None] | None = None
    ) -> AbstractContextManager[Callable[..., Any]]:
        """Tell `sink` what passes the wanted places until the block ends; what the block is given is what to call."""

    def why_silent(self, model: Any, names: Iterable[str], /) -> dict[str, str]:
        """Say why each of these modules was never seen to run, as far as the model's structure tells."""

    def parameters(self, model: Any, /) -> list[torch.Tensor]:
        """Return the parameters, each once."""

    def weights(self, model: Any, /) -> Weights:
        """Return the tensors of each module under the names they have in the source; empty where those are lost."""


def no_notes(model: Any) -> dict[str, Any]:
    """Return nothing: recording changes nothing here."""
    return {}


def no_remark(model: Any) -> str:
    """Return nothing: the points are simply the modules."""
    return ""


def nothing_shared(model: Any) -> dict[str, str]:
    """Return nothing: a shared module is there under each name it was called by."""
    return {}


def refuse_gradients(wanted: Wanted, where: str, *, on: str = "the module it was made from") -> None:
    """Raise Unsupported for gradients, which are not seen `where`; they are recorded `on` something else."""
    if any(side.startswith("grad") for sides in wanted.values() for side in sides):
        raise Unsupported(f"gradients are not seen {where}; record them on {on}.")
