"""Floors of a program whose modules cannot be moved: its operations are, one by one, as the dispatcher sees them.

    floors = measure_program(program, (x,), {}, run)

An exported program or TorchScript computes in one closed graph. What every operation gives is moved by its rounding, by
that of a sum of its length where it is one; or every operation computes in a finer dtype and is rounded once. Coarser
arithmetics are not known: which values a cast model would round is lost. ONNX Runtime shows no operation while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from layerscope.checks import ErrorNumbers
from layerscope.errors import LayerscopeError
from layerscope.points import Point
from layerscope.progress import Progress, no_progress
from layerscope.runtimes import find
from layerscope.runtimes.sink import Step
from layerscope.store import Run
from layerscope.store.floors import Floors
from layerscope.twins.begun import Begun
from layerscope.twins.measuring import Measuring, Replay, typical
from layerscope.twins.twin import EPSILON, Twin, moved, twins_of

_NEARLY = 1e-6  # a replay in the same runtime has nothing to round otherwise
_LEFT_OUT = (
    "coarser arithmetics: which values a cast model would round is not known of a program; its eager source has them",
    "check rows: which weights are which module's is not known after compiling",
)


def measure_program(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], opened: Run, progress: Progress | None = None
) -> Floors:
    """Measure the floors of a run of an exported program or TorchScript."""
    moment = next(iter(opened.moments), None)
    why = "the run has no records" if moment is None else ""
    if find(model).NAME not in ("export", "torchscript"):
        why = "ONNX Runtime shows no operation while it runs; its exported program or its eager source has floors"
    if why or moment is None:
        return Floors(left_out=(why,), started=opened.manifest.started)
    return _Program(model, args, kwargs, opened, moment, progress or no_progress).floors()


class _Program(Measuring):
    """What is known while twins of one program run."""

    def __init__(self, model: Any, args: Any, kwargs: Any, opened: Run, moment: Any, progress: Progress) -> None:
        self.model, self.runtime = model, find(model)
        self.sizes = [tensor.shape for tensor in self.runtime.parameters(model)]
        begun = Begun(torch.nn.Module())
        begun.take(args, dict(kwargs))
        super().__init__(begun, opened, moment, weights=False, progress=progress)

    def _axis(self, text: str) -> int:
        shape = next(e.shape or () for (name, _), e in self.entries.items() if name == text)
        return 1 if len(shape) >= 4 and shape[1] in {w for s in self.sizes if len(s) >= 4 for w in s[:2]} else -1

    def _arithmetic(self) -> str:
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in self.runtime.parameters(self.model)}
        known = [name for name in EPSILON if name in dtypes]
        return known[-1] if known else "float32"

    def floors(self) -> Floors:
        """Run them all."""
        arithmetic = self._arithmetic()
        self.left_out += _LEFT_OUT
        if not self.points:
            return self._made(arithmetic, {}, {}, (), "the first step has no tensors, only statistics")
        found: dict[str, dict[str, ErrorNumbers]] = {}
        twins = [Twin("replay", arithmetic), *(twin for twin in twins_of(arithmetic) if twin.arithmetic == arithmetic)]
        for done, twin in enumerate(twins):
            self.progress(f"twin in {arithmetic}: {twin.name}", done, len(twins))
            sink = _Undisturbed(self)
            why = self._run(sink, twin)
            if not done and (why or sink.unlike or not typical(sink.numbers.values()) <= _NEARLY):
                why = why or sink.unlike or f"off by {typical(sink.numbers.values()):.3g}"
                said = f"a replay of the first step is not what was recorded ({why}): it has state, or other inputs"
                return self._made(arithmetic, {}, {}, (), said)
            if why:
                self.left_out.append(f"the twin {twin.name}: {why}")
            elif done:
                found[twin.name] = sink.numbers
        self.progress("done", len(twins), len(twins))
        numbers = {arithmetic: found} if found else {}
        self._drop_outlying(numbers)
        return self._made(arithmetic, numbers, {}, (), "")

    def _run(self, sink: Replay, twin: Twin) -> str:
        sides: dict[str, set[Any]] = {}
        for text in self.points:
            point = Point.parse(text)
            sides.setdefault(point.name, set()).add(point.side)
        args, kwargs = self.begun.inputs()
        try:
            with torch.no_grad(), self.runtime.watch(self.model, sides, sink) as call, _Operations(twin):
                call(*args, **kwargs)
        except LayerscopeError:
            raise
        except Exception as error:  # whatever a runtime raises
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return "" if sink.numbers else "it passed none of the points of the run"


class _Undisturbed(Replay):
    """A sink whose own arithmetic stays as it is."""

    def seen(self, step: Step, point: Point, tensor: torch.Tensor, *, call: int, note: object = None) -> None:
        """Measure a value as it is."""
        with _disable_current_modes():
            super().seen(step, point, tensor, call=call, note=note)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves what every operation gives by its rounding, or has it computed in a finer dtype; a replay does neither."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.twin, self.count = twin, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable or any(each.alias_info is not None for each in schema.returns):
            return func(*args, **kwargs)  # it computes nothing new
        own = next((t.dtype for t in tree_leaves((args, kwargs)) if _floating(t)), None)
        if self.twin.dtype is not None and own is not None and own.itemsize < self.twin.dtype.itemsize:
            finer = tree_map(lambda t: t.to(self.twin.dtype) if _floating(t) and t.dtype == own else t, (args, kwargs))
            with suppress(RuntimeError, TypeError, NotImplementedError):  # not every operation has a finer kernel
                made = func(*finer[0], **finer[1])
                return tree_map(lambda t: t.to(own) if _floating(t) and t.dtype == self.twin.dtype else t, made)
        made = func(*args, **kwargs)
        if self.twin.seed is None:
            return made
        self.count += 1
        by = max(EPSILON[self.twin.arithmetic], math.sqrt(_terms(func, args)) / 4 * EPSILON["float32"])
        at = f"{self.count} {self.twin.seed}"
        return tree_map(lambda t: moved(t, by, at) if isinstance(t, torch.Tensor) else t, made)


def _floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _terms(func: Any, args: Sequence[Any]) -> int:
    """Return how long the sums are that an operation's values come from."""
    name = str(func).split(".")[1]
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return tensors[-1].shape[-2]
    return tensors[1][0].numel() if "convolution" in name and len(tensors) > 1 else 1
