"""How each torch dtype lies in a segment, without importing torch.

    stored("bfloat16")                              # Stored(code='BF16', itemsize=2, trailing=1)
    stored("complex128").header_shape((4, 3))       # (4, 3, 2): safetensors has no C128, so F64 pairs

The bytes are torch's own in every case; only what the header says of them differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layerscope.errors import Unsupported


class StoredDtype(NamedTuple):
    """One dtype on disk: the safetensors code, bytes per torch element, and how shapes are told.

    `trailing` is how many stored numbers make one torch element. complex128 and complex32 are told as
    pairs of F64 and F16 with a last axis of 2, because safetensors has no code for them; two F4 values
    share a byte, so a `float4_e2m1fn_x2` tensor is told with a last axis twice as long.
    """

    code: str
    itemsize: int
    trailing: int = 1

    def header_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape a safetensors header must state for a torch tensor of `shape`."""
        if self.trailing == 1:
            return tuple(shape)
        if self.code == "F4" and shape:
            return (*shape[:-1], shape[-1] * self.trailing)
        return (*shape, self.trailing)


STORED: dict[str, StoredDtype] = {
    "float64": StoredDtype("F64", 8),
    "float32": StoredDtype("F32", 4),
    "float16": StoredDtype("F16", 2),
    "bfloat16": StoredDtype("BF16", 2),
    "float8_e4m3fn": StoredDtype("F8_E4M3", 1),
    "float8_e4m3fnuz": StoredDtype("F8_E4M3FNUZ", 1),
    "float8_e5m2": StoredDtype("F8_E5M2", 1),
    "float8_e5m2fnuz": StoredDtype("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": StoredDtype("F8_E8M0", 1),
    "float4_e2m1fn_x2": StoredDtype("F4", 1, trailing=2),
    "complex128": StoredDtype("F64", 16, trailing=2),
    "complex64": StoredDtype("C64", 8),
    "complex32": StoredDtype("F16", 4, trailing=2),
    "int64": StoredDtype("I64", 8),
    "int32": StoredDtype("I32", 4),
    "int16": StoredDtype("I16", 2),
    "int8": StoredDtype("I8", 1),
    "uint64": StoredDtype("U64", 8),
    "uint32": StoredDtype("U32", 4),
    "uint16": StoredDtype("U16", 2),
    "uint8": StoredDtype("U8", 1),
    "bool": StoredDtype("BOOL", 1),
}


def stored(dtype: str) -> StoredDtype:
    """Return how `dtype` (torch's name without the prefix) is stored.

    Raises Unsupported for the others: the bytes of a quantised or bit-packed tensor mean nothing without
    the scale or the packing that torch keeps beside them.
    """
    try:
        return STORED[dtype]
    except KeyError:
        raise Unsupported(
            f"a run cannot hold dtype {dtype!r}; it holds {', '.join(STORED)}. "
            "Keep `tensor.dequantize()` or `tensor.int_repr()` of a quantised tensor, a view as uint8 of a packed one."
        ) from None


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return how many bytes a tensor takes; exact, because Python's integers do not overflow."""
    total = stored(dtype).itemsize
    for n in shape:
        total *= n
    return total
