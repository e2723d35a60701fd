"""One compiler each, all with the same verbs (`backend.py`).

named("torchscript"); named(torch.jit.trace); named(lambda module, example_inputs: ...)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import torch

from layerscope.compile_taps.backends.backend import Backend, Made, Mismatch, sized
from layerscope.errors import Unsupported

__all__ = ["NAMES", "Backend", "Made", "Mismatch", "named", "sized"]

NAMES = ("torchscript", "inductor", "export", "aoti", "onnx", "neuron")


def named(backend: Any) -> Backend:
    """Return the backend of this name, or the one that a compiler of torch's stands for, or a caller's own."""
    if backend is torch.jit.trace:
        backend = "torchscript"
    if backend is torch.compile:
        backend = "inductor"
    if backend in NAMES:
        return cast(Backend, import_module(f"{__name__}.{backend}"))
    if callable(backend):
        from layerscope.compile_taps.backends.custom import Custom

        return Custom(backend)
    raise Unsupported(
        f"backend={backend!r} is not known; give one of {', '.join(NAMES)}, torch.jit.trace, torch.compile, "
        "or a function (module, example_inputs) -> compiled."
    )
