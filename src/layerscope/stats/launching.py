"""What our kernels need of Triton: its decorator, and launches without its look at every argument.

    @jit
    def _sweep(items, count): ...

    launch = launching(_sweep, device, torch.int16, ANY, num_warps=4)
    launch(programs, stream, tensor.data_ptr(), tensor.numel())

Triton may be missing; `why_not` says why there are no kernels then. With TRITON_INTERPRET=1 in the environment they run
on the host, operation by operation: slow, and how they are tested where there is no GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import torch

__all__ = ["ANY", "FUSED", "INTERPRETED", "Launch", "constant", "jit", "launching", "tl", "why_not"]

# Imported as Any, and only where it is installed: what Triton compiles is not Python to a type checker.
try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
    _absent = ""
except ImportError as missing:
    triton = tl = None
    _absent = f"Triton is not installed ({missing})"

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
FUSED = {"enable_fp_fusion": True}  # a product and a sum in one rounding, said because Triton's default is to change
ANY = (1 << 40) + 1  # stands for a number that is 64 bits wide and, to Triton, a multiple of nothing

Launch: TypeAlias = Callable[..., None]  # programs, stream, the kernel's arguments; a pointer is an address


def jit(function: Callable[..., Any]) -> Any:
    """Mark a kernel, or what kernels call."""
    return function if triton is None else triton.jit(function)


def constant(value: Any) -> Any:
    """Make a module's number known to kernels."""
    return value if tl is None else tl.constexpr(value)


@cache
def why_not() -> str:
    """Say why there are no kernels; empty when there are."""
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA's devices"
    return _absent


def launching(kernel: Any, device: torch.device, *signature: Any, **options: Any) -> Launch:
    """Compile a kernel now, or load it from Triton's cache, and return its launch.

    The signature has a dtype for a pointer to it, `ANY` for a number, and every compile-time constant as it is. The
    launch skips what Triton does to find the right kernel for its arguments, which costs more than the launch itself.
    """
    if INTERPRETED:
        return _interpreting(kernel, signature)
    with torch.cuda.device(device):
        compiled = kernel.warmup(*signature, grid=(1,), **FUSED, **options)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def _interpreting(kernel: Any, signature: tuple[Any, ...]) -> Launch:
    def launch(programs: int, stream: int, *arguments: Any) -> None:
        given = zip(arguments, signature, strict=True)
        kernel[(programs,)](*(_lying(a, s) if isinstance(s, torch.dtype) else a for a, s in given))

    return launch


def _lying(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what lies at an address of the host, as a tensor of one item that the interpreter takes for a pointer."""
    if not address:  # of a tensor without items
        return torch.empty(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(address), dtype=dtype)
