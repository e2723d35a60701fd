"""How to watch each kind of model: find the runtime that fits a live object.

runtime = find(model)
runtime.points(model)
"""

from __future__ import annotations

import sys
from types import ModuleType

from layerscope.errors import Unsupported

__all__ = ["find"]


def find(model: object) -> ModuleType:
    """Return the runtime that can watch `model`, or say why none can.

    A compiled or scripted model accepts hooks and never calls them, so it is refused here rather than
    recorded empty.
    """
    if "torch" not in sys.modules:
        raise Unsupported(
            f"cannot record a {type(model).__name__}: it is not a torch.nn.Module, and torch is not even imported."
        )
    import torch

    if not isinstance(model, torch.nn.Module):
        raise Unsupported(
            f"cannot record a {type(model).__module__}.{type(model).__name__}; "
            "give record() a torch.nn.Module (for a wrapped one, the module inside it)."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise Unsupported(
            f"{type(model).__name__} is TorchScript, where Python hooks are accepted and never called; "
            "record the module it was made from."
        )
    if type(model).__module__.startswith("torch._dynamo") or getattr(model, "_compiled_call_impl", None):
        raise Unsupported(
            f"{type(model).__name__} is compiled by torch.compile, where hooks added after the first call silently "
            "never fire; record the module it was made from (`model._orig_mod`, or the module before `.compile()`)."
        )
    from layerscope.runtimes import eager

    return eager
