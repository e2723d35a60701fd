"""How to watch each kind of model: find the runtime that fits a live object, or a file.

model = opened("model.pt2")
runtime = find(model)
runtime.points(model)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from layerscope.errors import Unsupported
from layerscope.runtimes.model_files import is_file, opened
from layerscope.runtimes.runtime import Runtime

__all__ = ["find", "is_file", "opened"]

_WHY = {
    "AOTICompiledModel": ", which is machine code: compile the model again with layerscope.compile(..., "
    "record_layer_outputs=True)",
    "InferenceSession": ", whose graph is closed: record the path of its .onnx file",
    "ONNXProgram": ": save it, and record the path of its .onnx file",
}


def find(model: Any, *, measure: bool = True, precise: bool = False) -> Runtime:
    """Return the runtime that can watch `model`, or say why none can.

    Only libraries that are imported already are asked: what they have not made cannot be theirs. A path is opened
    first; a model that `layerscope.compile` made brings its own runtime. `measure` and `precise` are for those that
    compile: whether to measure what the taps change, and whether to round where the source does.
    """
    model = opened(model)
    runtime = _found(model, measure=measure, precise=precise)
    if precise and runtime.NAME != "torch.compile":
        raise Unsupported(
            f"precision_faithful=True is for models that torch.compile runs, and this one runs in {runtime.NAME}: it "
            "is not compiled for the recording; leave it out, or give it to layerscope.compile(...)."
        )
    return runtime


def _found(model: Any, *, measure: bool, precise: bool) -> Runtime:
    own: Callable[..., Runtime] | None = getattr(model, "layerscope_runtime", None)
    if own is not None:
        return own(measure=measure)
    if "torch" not in sys.modules:
        raise Unsupported(
            f"cannot record a {type(model).__name__}: it is not a torch.nn.Module, and torch is not even imported."
        )
    import torch

    if isinstance(model, torch.jit.ScriptModule):
        from layerscope.runtimes import torchscript

        return torchscript
    if isinstance(model, torch.nn.Module):
        from layerscope.runtimes import eager

        if eager.is_compiled(model):
            from layerscope.runtimes.torch_compile import TorchCompile

            return TorchCompile(measure=measure, precise=precise)
        return eager
    if "torch.export" in sys.modules and isinstance(model, torch.export.ExportedProgram):
        from layerscope.runtimes import exported

        return exported
    from layerscope.runtimes import onnx

    if isinstance(model, onnx.OnnxModel):
        return onnx
    kind = type(model).__name__
    raise Unsupported(
        f"cannot record a {type(model).__module__}.{kind}{_WHY.get(kind, '')}; give record() a torch.nn.Module (for a "
        "wrapped one, the module inside it), a TorchScript module, an exported program, or the path of their file."
    )
