"""A compiled model: it returns what the model returns, and keeps what its taps took.

compiled(**inputs)
compiled.taps()["model.layers.3"]       # of this thread's last call
compiled.save("compiled/llama")
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerscope.compile_taps.backends import Backend, Mismatch, sized
from layerscope.compile_taps.hidden_states import remember
from layerscope.compile_taps.tap_table import TapEntry, TapTable
from layerscope.compile_taps.value_forms import FlatValue, rebuilt
from layerscope.errors import BadModel, Incomplete, Unsupported
from layerscope.runtimes.model_files import TAPS
from layerscope.runtimes.observer_effect import Observer, ObserverEffect
from layerscope.store import Missing

if TYPE_CHECKING:
    from layerscope.compile_taps.watch_taps import Watching

Weights = tuple[tuple[int | None, str], ...]
PRECISE = "it rounds where the source does (precision_faithful=True)"


_CHANGED = ObserverEffect(reason="not measured: the model's weights changed between its compilation and its first call")


@dataclass(frozen=True, slots=True)
class SourceModel:
    """What a compiled model was made from, where it was made here: the model, and how to compile it untapped.

    `weights` are those it was compiled with; where they are others by then, the untapped one would be another model.
    """

    model: torch.nn.Module
    untapped: Callable[[], Any]
    weights: Weights | None = None

    def run_untapped(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the model untapped, and run that."""
        return self.untapped()(*args, **kwargs)

    @property
    def changed(self) -> bool:
        """Whether the model holds other weights than those it was compiled with."""
        return self.weights is not None and self.weights != weights_of(self.model)


def weights_of(model: torch.nn.Module) -> Weights:
    """Tell the parameters and buffers of a model from what they are once they were changed, by version and by sum."""
    return tuple(
        (None if tensor.is_inference() else tensor._version, _sum(tensor.detach()))
        for tensor in [*model.parameters(), *model.buffers()]
    )


def _sum(tensor: torch.Tensor) -> str:
    try:
        return str(tensor.sum(dtype=torch.complex128 if tensor.is_complex() else torch.float64).item())
    except Exception:  # tensors of other kinds, and those without values
        return ""


class Compiled:
    """What `compile` and `load_compiled` return."""

    def __init__(
        self,
        backend: Backend,
        artefact: Any,
        table: TapTable,
        *,
        classes: Mapping[str, type] | None = None,
        source: SourceModel | None = None,
        observer_effect: ObserverEffect | None = None,
    ) -> None:
        self.table = table
        self.source = source
        self._backend = backend
        self._artefact = artefact
        self._classes = classes or {}
        self._observer = Observer(observer_effect)
        self._local = threading.local()
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
        return self._observer.effect

    def layerscope_runtime(self, *, measure: bool = True) -> Watching:
        """Return how `record` watches this object; `measure` lets its first call run untapped as well."""
        from layerscope.compile_taps.watch_taps import Watching

        return Watching(f"{self.backend}, taps compiled in", measure=measure)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph; the value is the model's own, type included."""
        return (self._redirected or self.run)(*args, **kwargs)

    def taps(self) -> dict[str, torch.Tensor]:
        """Return what the taps took in this thread's last call, by name; `logits` are the logits, or a module's own."""
        named = {tap.key: tensor for tap, tensor in self.taken()}
        logits = getattr(self._local, "logits", None)
        return named if logits is None else {**named, "logits": named.get("logits", logits)}

    def taken(self) -> list[tuple[TapEntry, torch.Tensor]]:
        """Return what the taps took in this thread's last call, in the order they ran; nothing before the first."""
        taps: list[torch.Tensor] | None = getattr(self._local, "taps", None)
        return [] if taps is None else list(zip(self.table.taps, taps, strict=True))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, without any recording of the object; the first time, the untapped one before it."""
        if self.source is None:  # what was loaded says its effect from the start
            return self.run_unmeasured(*args, **kwargs)
        self._forget()
        if self._observer.effect is None and self.source.changed:
            self._observer.effect = _CHANGED
        return self._kept(
            *self._observer.run(self._compute, self.source.run_untapped, args, kwargs, model=self.source.model)
        )

    def run_unmeasured(self, *args: Any, **kwargs: Any) -> Any:
        """Run the tapped graph alone."""
        self._forget()
        return self._kept(*self._compute(args, kwargs))

    def _forget(self) -> None:
        """Have nothing of the last call taken for this one's, should it fail."""
        self._local.taps = self._local.logits = None
        remember(None)

    def _kept(self, value: Any, taps: list[torch.Tensor]) -> Any:
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
        from layerscope.compile_taps.compiled_folder import save

        effect = self.table.observer_effect or str(self.observer_effect or "")
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
        tensors, count = self.table.arguments.tensors(args, kwargs), self.table.outputs
        try:
            made = list(self._backend.call(self._artefact, tensors))
        except Mismatch as error:
            raise self._mismatch(error, tensors) from error.__cause__
        if self.source is None and len(made) != count + len(self.table.taps):
            raise BadModel(
                f"the graph gives {len(made)} tensors, and its {TAPS} tells of {count + len(self.table.taps)}: they "
                "were not saved together; save the model again."
            )
        return rebuilt(self.table.output, made[:count], self._classes), made[count:]

    def _mismatch(self, error: Mismatch, tensors: list[torch.Tensor]) -> Unsupported:
        names = self.table.arguments.names()
        takes = ", ".join(f"{name} {each}" for name, each in zip(names, error.takes, strict=False))
        given = ", ".join(f"{name} {sized(tensor)}" for name, tensor in zip(names, tensors, strict=True))
        why = re.sub(r"tensors_(\d+)", lambda found: names[int(found[1])], str(error))
        return Unsupported(
            f"{self.backend} compiled this for {takes}; it was given {given} ({why}). Compile it for such inputs."
        )

    def _logits(self, value: Any, taps: list[torch.Tensor]) -> torch.Tensor | None:
        if self.table.logits is None:
            return None
        place, at = self.table.logits
        return taps[at] if place == "tap" else FlatValue.of(value).tensors[at]
