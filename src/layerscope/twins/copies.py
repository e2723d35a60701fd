"""Floors of a program whose modules cannot be moved: its weights are, and its inputs, as far as it holds them.

    floors = measure_copies(program, (x,), {}, run)

TorchScript, exported programs and ONNX files compute in one closed graph: no rounding and no other dtype can be put
between its operations. What rounding does to sums is put into the weights instead: each is moved by what a sum of its
length may be off. That says what the program's own arithmetic costs. Coarser ones round in between and have no floors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from layerscope.checks import Numbers
from layerscope.errors import LayerscopeError
from layerscope.points import Point
from layerscope.progress import Progress, no_progress
from layerscope.runtimes import find
from layerscope.runtimes.values import replaced
from layerscope.store import Run
from layerscope.store.floors import Floors
from layerscope.twins.begun import Begun, copied
from layerscope.twins.measuring import Measuring, Replay, typical
from layerscope.twins.twin import EPSILON, moved

__all__ = ["measure_copies"]

Weight: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]

_NEARLY = 1e-6  # a replay in the same runtime has nothing to round otherwise
_TWINS = 3
_LEFT_OUT = (
    "coarser arithmetics, which round between the operations of a closed graph: floors of its eager source have them",
    "check rows: which weights are which module's is not known after compiling",
)


def measure_copies(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], opened: Run, progress: Progress | None = None
) -> Floors:
    """Measure the floors of a run of TorchScript, an exported program or an ONNX file."""
    moment = next(iter(opened.moments), None)
    if moment is None:
        return Floors(left_out=("the run has no records",), started=opened.manifest.started)
    return _Copies(model, args, kwargs, opened, moment, progress or no_progress).floors()


class _Copies(Measuring):
    """What is known while copies of one program run."""

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
        twins: dict[str, dict[str, Numbers]] = {}
        for seed in range(_TWINS + 1):
            name = f"moved {seed}" if seed else "replay"
            self.progress(f"twin in {arithmetic}: {name}", seed, _TWINS + 1)
            found = Replay(self)
            why = self._run(found, seed, arithmetic)
            if not seed and (why or found.unlike or not typical(found.numbers.values()) <= _NEARLY):
                why = why or found.unlike or f"off by {typical(found.numbers.values()):.3g}"
                said = (
                    f"a replay of the first step is not what was recorded ({why}): the inputs are others, or has state"
                )
                return self._made(arithmetic, {}, {}, (), said)
            if why:
                self.left_out.append(f"the twin {name}: {why}")
            elif seed:
                twins[name] = found.numbers
        self.progress("done", _TWINS + 1, _TWINS + 1)
        numbers = {arithmetic: twins} if twins else {}
        self._drop_outlying(numbers)
        return self._made(arithmetic, numbers, {}, (), "")

    def _run(self, sink: Replay, seed: int, arithmetic: str) -> str:
        sides: dict[str, set[Any]] = {}
        for text in self.points:
            point = Point.parse(text)
            sides.setdefault(point.name, set()).add(point.side)
        by = EPSILON[arithmetic]

        def move(leaf: object, tensor: torch.Tensor) -> torch.Tensor:
            return moved(tensor, by, f"input {leaf} {seed}") if seed else tensor

        def weight(name: str, tensor: torch.Tensor) -> torch.Tensor:
            terms = min(tensor.numel() // max(1, len(tensor)), len(tensor)) if tensor.ndim > 1 else 1
            return moved(tensor, max(by, math.sqrt(terms) / 4 * EPSILON["float32"]), f"{name} {seed}")

        args, kwargs = (replaced(copied(given), move) for given in (self.begun.args, self.begun.kwargs))
        try:
            with (
                torch.no_grad(),
                _with_weights(self.runtime.NAME, self.model, weight if seed else None) as model,
                self.runtime.watch(model, sides, sink) as call,
            ):
                (call if callable(call) else model)(*args, **kwargs)
        except LayerscopeError:
            raise
        except Exception as error:  # whatever a runtime raises
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return "" if sink.numbers else "it passed none of the points of the run"


@contextmanager
def _with_weights(
    runtime: str, model: Any, weight: Callable[[str, torch.Tensor], torch.Tensor] | None
) -> Iterator[Any]:
    """Hand out a program that has other weights, until the block ends; the program itself, where they are to stay."""
    if weight is None:
        yield model
    elif runtime == "torchscript":
        other = copy.deepcopy(model)
        for name, parameter in other.named_parameters():
            parameter.copy_(weight(name, parameter.detach()))
        yield other
    elif runtime == "export":
        held = dict(model.state_dict)
        try:
            for name, tensor in model.named_parameters():
                model.state_dict[name] = torch.nn.Parameter(weight(name, tensor.detach()), requires_grad=False)
            yield model
        finally:
            model.state_dict.update(held)
    else:
        yield _onnx_with(model, weight)


def _onnx_with(model: Any, weight: Weight) -> Any:
    from layerscope.runtimes.onnx.session import library

    onnx, numpy_helper = library("onnx"), library("onnx.numpy_helper")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    library("onnx.external_data_helper").load_external_data_for_model(proto, str(model.path.resolve().parent))
    for held in proto.graph.initializer:
        if held.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE):
            other = weight(held.name, torch.from_numpy(numpy_helper.to_array(held).copy()))
            held.CopyFrom(numpy_helper.from_array(other.numpy(), held.name))
    return type(model)(model.path, proto)
