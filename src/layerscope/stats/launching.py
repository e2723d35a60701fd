"""What our kernels need of Triton: its decorator, and launches without its look at every argument.

    @jit
    def _sweep(items, count): ...

    launch = launching(_sweep, device, torch.int16, ANY, num_warps=4)(stream)
    launch(tensor.data_ptr(), tensor.numel(), programs)

Triton may be missing; `why_not` says why there are no kernels then. With TRITON_INTERPRET=1 in the environment they run
on the host, operation by operation: slow, and how they are tested where there is no GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import takewhile
from typing import Any, TypeAlias

import torch

from layerscope.stats.driver import Launch, launcher, why_no_driver

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
Launching: TypeAlias = Callable[[int], Launch]  # of a stream
ANY = (1 << 40) + 1  # stands for a number that is 64 bits wide and, to Triton, a multiple of nothing


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
    return _absent or ("" if INTERPRETED else why_no_driver())


def launching(kernel: Any, device: torch.device, *signature: Any, **options: Any) -> Launching:
    """Compile a kernel now, or load it from Triton's cache; the call that is returned makes a stream's launches of it.

    The signature has a dtype for a pointer to it, `ANY` for a number, and then every compile-time constant as it is,
    which a launch is not given again. A launch is for one thread at a time, and skips what Triton does to find the
    right kernel for its arguments, which costs more than the launch itself.
    """
    arguments = tuple(takewhile(_is_given, signature))
    if INTERPRETED:
        return lambda stream: _interpreting(kernel, arguments, signature[len(arguments) :])
    with torch.cuda.device(device):
        compiled = kernel.warmup(*signature, grid=(1,), **FUSED, **options)
        assert compiled.run is not None  # asking for it loads the kernel
    about, function = compiled.metadata, compiled.function
    _refuse_scratch(about)
    threads, shared, index = 32 * about.num_warps, about.shared, device.index
    return lambda stream: launcher(function, index, stream, threads=threads, shared=shared, arguments=len(arguments))


def _refuse_scratch(about: Any) -> None:
    """Refuse a kernel that wants memory beside its arguments: a launch of ours gives it none.

    Triton's own launches look at these sizes each time. A version that does not say them is not one we know.
    """
    sizes = [getattr(about, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if sizes != [0, 0]:
        raise RuntimeError(f"the kernel {about.name} needs scratch memory {sizes} that this launch does not give it")


def _is_given(kind: Any) -> bool:
    """Whether a launch has this argument of the signature; the rest are constants."""
    return isinstance(kind, torch.dtype) or kind is ANY


def _interpreting(kernel: Any, kinds: tuple[Any, ...], constants: tuple[Any, ...]) -> Launch:
    def launch(*numbers: int) -> None:
        *arguments, programs = numbers
        given = zip(arguments, kinds, strict=True)
        kernel[(programs,)](*(_lying(a, k) if isinstance(k, torch.dtype) else a for a, k in given), *constants)

    return launch


def _lying(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what lies at an address of the host, as a tensor of one item that the interpreter takes for a pointer."""
    if not address:  # of a tensor without items
        return torch.empty(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(address), dtype=dtype)
