"""How kernels read the items of each dtype, on the host and in a kernel.

READ[torch.bfloat16]                  # on the host: as which numbers, from which items
_values(raw, worth, kind="bfloat16")  # in a kernel: float32 where that is exact, else float64
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from layerscope.stats.bits import byte_values
from layerscope.stats.launching import jit, tl

__all__ = ["READ", "THREADS", "Read", "values", "vector", "worth"]

THREADS = 128  # of one program


class Read(NamedTuple):
    """How one dtype is read: as which numbers, from items of which type, and whether float32 holds them exactly."""

    kind: Literal["float32", "bfloat16", "float16", "float64", "byte", "short", "integer"]
    item: torch.dtype
    narrow: bool


READ = {
    torch.float32: Read("float32", torch.int32, True),
    torch.bfloat16: Read("bfloat16", torch.int16, True),
    torch.float16: Read("float16", torch.int16, True),
    torch.float64: Read("float64", torch.int64, False),
    **{t: Read("short", t, True) for t in (torch.int16, torch.uint16)},
    **{t: Read("integer", t, False) for t in (torch.int32, torch.uint32, torch.int64, torch.uint64)},
    **{
        getattr(torch, name): Read("byte", torch.uint8, True)
        for name in (
            "bool", "int8", "uint8",
            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    },
}  # fmt: skip


def vector(*dtypes: torch.dtype) -> int:
    """How many elements a thread takes at a time: 16 bytes of the widest, and not more than eight."""
    return min(16 // max(dtype.itemsize for dtype in dtypes), 8)


@cache
def worth(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What each byte of a dtype is worth, in the memory of a device; of wider ones, nothing."""
    known = byte_values(str(dtype)[6:]) if READ[dtype].kind == "byte" else [0.0, 0.0]
    return torch.tensor(known, dtype=torch.float32).to(device)


@jit
def values(raw: tl.tensor, worth: tl.tensor, kind: tl.constexpr) -> Any:
    """What items are worth: in float32 where that holds them exactly, else in float64."""
    if kind == "bfloat16":
        return (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif kind == "float16":  # noqa: RET505  a branch that is not taken must not be compiled
        return raw.to(tl.float16, bitcast=True).to(tl.float32)
    elif kind == "byte":
        return tl.load(worth + raw.to(tl.int32))
    elif kind == "short":
        return raw.to(tl.float32)
    elif kind == "integer":
        return raw.to(tl.float64)
    elif kind == "float32":
        return raw.to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float64, bitcast=True)
