"""A compiled model: it returns what the model returns, and keeps what its taps took.

compiled(**inputs)
compiled.taps()["model.layers.3"]       # of this thread's last call
compiled.save("compiled/llama")
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerscope.compiled.backends import Backend
from layerscope.compiled.hidden_states import remember
from layerscope.compiled.keeping import kept
from layerscope.compiled.observing import ObserverEffect
from layerscope.compiled.structure import Taken, rebuilt
from layerscope.compiled.table import Table, TapEntry
from layerscope.errors import Incomplete
from layerscope.runtimes.values import replaced
from layerscope.store import Missing

if TYPE_CHECKING:
    from layerscope.compiled.watching import Watching

__all__ = ["Compiled", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """What a compiled model was made from, where it was made here: the model, and how to compile it untapped."""

    model: torch.nn.Module
    untapped: Callable[[], Any]


class Compiled:
    """What `compile` and `load_compiled` return."""

    def __init__(
        self,
        backend: Backend,
        artefact: Any,
        table: Table,
        *,
        classes: Mapping[str, type] | None = None,
        source: Source | None = None,
        observer_effect: ObserverEffect | None = None,
    ) -> None:
        self.table = table
        self.source = source
        self._backend = backend
        self._artefact = artefact
        self._classes = classes or {}
        self._effect = observer_effect
        self._local = threading.local()
        self._lock = threading.Lock()
        self._redirected: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        kind = type(self.source.model).__name__ if self.source else "loaded model"
        return f"<{kind} compiled by {self.backend}, {len(self.table.taps)} taps>"

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self._backend.NAME

    @property
    def missing(self) -> list[Missing]:
        """The points that were asked for and do not fire, with the reason."""
        return list(self.table.missing)

    @property
    def notes(self) -> list[str]:
        """What the compiler said, and what this object cannot return."""
        return list(self.table.notes)

    @property
    def observer_effect(self) -> ObserverEffect | None:
        """How the taps change the model's own output; None before the first call, which measures it."""
        return self._effect

    @property
    def layerscope_runtime(self) -> Watching:
        """How `record` watches this object."""
        from layerscope.compiled.watching import Watching

        return Watching(f"{self.backend}, taps compiled in")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph; the value is the model's own, type included."""
        return (self._redirected or self.run)(*args, **kwargs)

    def taps(self) -> dict[str, torch.Tensor]:
        """Return what the taps took in this thread's last call, by name; where there are logits, as `logits`."""
        named = {tap.key: tensor for tap, tensor in self.taken()}
        logits = getattr(self._local, "logits", None)
        return named if logits is None else {**named, "logits": logits}

    def taken(self) -> list[tuple[TapEntry, torch.Tensor]]:
        """Return what the taps took in this thread's last call, in the order they ran; nothing before the first."""
        taps: list[torch.Tensor] | None = getattr(self._local, "taps", None)
        return [] if taps is None else list(zip(self.table.taps, taps, strict=True))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, whoever records the object."""
        value, taps = self._measured(args, kwargs) if self._effect is None else self._compute(args, kwargs)
        if len(taps) != len(self.table.taps):
            raise Incomplete(
                f"{len(taps)} taps fired in this call and {len(self.table.taps)} were compiled in: the model took "
                "another way than with example_inputs; compile it for these inputs."
            )
        self._local.taps, self._local.logits = taps, self._logits(value, taps)
        remember([taps[at] for at in self.table.hidden] if taps else None)
        return value

    def save(self, path: str | Path) -> Path:
        """Write the compiled graph and the table of its taps into a folder; `load_compiled` reads it back."""
        from layerscope.compiled.saving import save

        effect = self.table.observer_effect or ("" if self._effect is None else str(self._effect))
        return save(self._backend, self._artefact, replace(self.table, observer_effect=effect), Path(path))

    def redirect(self, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Have calls of this object go elsewhere, or to the graph again with None; return where they went before."""
        before, self._redirected = self._redirected, call
        return before

    def _compute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """Return the model's value and what the taps took."""
        if self._backend.LIVE:
            value, taps = self._artefact(*args, **kwargs)
            return value, list(taps)
        made = list(self._backend.call(self._artefact, self.table.arguments.tensors(args, kwargs)))
        count = self.table.outputs
        return rebuilt(self.table.output, made[:count], self._classes), made[count:]

    def _measured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """Run the first call, and the untapped graph before it on copies of its inputs; leave no trace of that one."""
        with self._lock:
            if self._effect is not None:
                return self._compute(args, kwargs)
            untapped = self._untapped(args, kwargs)
            value, taps = self._compute(args, kwargs)
            failed = isinstance(untapped, ObserverEffect)
            self._effect = untapped if failed else ObserverEffect.between(untapped, value)
            return value, taps

    def _untapped(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the untapped graph gives; where it cannot be compiled or run, why nothing is measured."""
        assert self.source is not None  # what was loaded says its effect from the start
        args, kwargs = replaced((args, dict(kwargs)), lambda _, tensor: tensor.detach().clone())
        try:
            with torch.no_grad(), kept(self.source.model):
                return self.source.untapped()(*args, **kwargs)
        except Exception as error:
            return ObserverEffect(reason=f"not measured: the untapped model failed ({type(error).__name__}: {error})")

    def _logits(self, value: Any, taps: list[torch.Tensor]) -> torch.Tensor | None:
        if self.table.logits is None:
            return None
        place, at = self.table.logits
        return taps[at] if place == "tap" else Taken.of(value).tensors[at]
