"""Compile kernels for an H100 or H200 where there is none: what the interpreter lets pass, the compiler may not."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from layerscope.stats.launching import ANY, FUSED

POINTERS = {
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.uint16: "*u16", torch.uint32: "*u32", torch.uint64: "*u64",
    torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip


def compiled(kernel, device, *signature, **options):
    """Stand in for `launching`, and return what ptxas made of the kernel."""
    names = kernel.arg_names
    given = dict(zip(names, signature, strict=True))
    kinds = {name: _kind(value) for name, value in given.items()}
    constants = {(names.index(name),): given[name] for name, kind in kinds.items() if kind == "constexpr"}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in kinds.items() if kind[0] == "*"}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**FUSED, **options}).asm["cubin"]


def _kind(value):
    if isinstance(value, torch.dtype):
        return POINTERS[value]
    return "i64" if value is ANY else "constexpr"
