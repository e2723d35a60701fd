"""A tensor's memory as plain numbers: its items in order, their bits, what they are worth.

    bits = read(tensor)                        # nothing is copied yet
    for items in bits.pieces(): ...            # contiguous, in row-major order, whatever the strides
    bits.words(items), bits.values(items)      # the stored bits; the numbers they stand for

No torch operation runs on the tensor: nothing for autograd, a dispatch mode or a second thread to notice.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from layerscope.errors import Unsupported
from layerscope.stats.fingerprints import mixed

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[Any]

# How one item of each dtype is held: numpy's own type where it has one, else unsigned bits. float16 is held as int16
# and bfloat16 as uint16, because the kernels tell the two by that.
ITEMS: dict[str, np.dtype[Any]] = {
    name: np.dtype(item)
    for name, item in {
        "float64": "f8", "float32": "f4", "float16": "i2", "bfloat16": "u2",
        "float8_e4m3fn": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2": "u1", "float8_e5m2fnuz": "u1",
        "float8_e8m0fnu": "u1", "float4_e2m1fn_x2": "u1",
        "complex128": "c16", "complex64": "c8", "complex32": "u4",
        "int64": "i8", "int32": "i4", "int16": "i2", "int8": "u1",
        "uint64": "u8", "uint32": "u4", "uint16": "u2", "uint8": "u1", "bool": "u1",
    }.items()
}  # fmt: skip

FIRST = 10  # values of a tensor that are kept as they are

_KERNEL_READY = frozenset(("float32", "bfloat16", "float16", "float64"))
_COPY = 1 << 17  # items copied at a time when they do not lie in order: stays in the second-level cache
_CHUNK = 1 << 30  # items handed to a kernel at a time when they do: its bucket counters are 32 bits wide


def is_wide(dtype: str) -> bool:
    """Whether the values of a dtype need float64; float32 holds the others exactly."""
    return dtype not in ("float32", "bfloat16", "float16", "int16", "uint16")


@dataclass(frozen=True, slots=True)
class Bits:
    """Where a tensor's items lie, and what they are.

    `items` has the tensor's own shape and strides. `flip_real` and `flip_imaginary` are the signs that a
    lazily negated or conjugated tensor has not written down yet.
    """

    dtype: str
    shape: tuple[int, ...]
    items: Array
    owner: object  # keeps the memory alive
    flip_real: bool = False
    flip_imaginary: bool = False

    @property
    def count(self) -> int:
        """How many values there are: two per item for packed float4."""
        return self.items.size * (2 if self.dtype == "float4_e2m1fn_x2" else 1)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """The shape in values: packed float4 has twice as many along the last axis."""
        packs = self.dtype == "float4_e2m1fn_x2" and self.shape
        return (*self.shape[:-1], 2 * self.shape[-1]) if packs else self.shape

    @property
    def kernel_ready(self) -> bool:
        """Whether the kernels read these items as they are."""
        return self.dtype in _KERNEL_READY

    @property
    def wide(self) -> bool:
        """Whether the values need float64; float32 holds the others exactly."""
        return is_wide(self.dtype)

    @property
    def byte_wide(self) -> bool:
        """Whether 256 counters say everything."""
        return self.items.itemsize == 1

    def whole(self) -> Array | None:
        """Return all items as the kernels take them, where they lie so already: the usual case, and the quick one."""
        items = self.items
        if self.kernel_ready and items.flags.carray and items.size <= _CHUNK and not self.flip_real:
            return items.reshape(-1)
        return None

    def pieces(self, *, ordered: bool = True) -> Iterator[Array]:
        """Yield the items as contiguous one-dimensional arrays; copies are small and temporary.

        With `ordered=False` they may come in the order of memory, which saves the copy of a permuted tensor.
        """
        items = self.items
        if not (self.flip_real or self.flip_imaginary):
            if not (items.flags.c_contiguous or ordered):
                items = items.transpose(np.argsort([-stride for stride in items.strides], kind="stable"))
            if items.flags.carray:  # contiguous, aligned and writable: anything else is another type to numba
                flat = items.reshape(-1)
                step = _CHUNK if self.kernel_ready or self.byte_wide else _COPY
                for start in range(0, flat.size, step):
                    yield flat[start : start + step]
                return
        for piece in _split(items, limit=_COPY):
            flat = np.array(piece, order="C").reshape(-1)
            self._flip(flat)
            yield flat

    def head(self, number: int) -> Array:
        """Return the first `number` items in row-major order, as a contiguous copy."""
        flat = np.array(self.items.flat[:number])
        self._flip(flat)
        return flat

    def _flip(self, flat: Array) -> None:
        columns = 2 if self.dtype.startswith("complex") else 1
        part = flat.itemsize // columns
        for column, flip in enumerate((self.flip_real, self.flip_imaginary)[:columns]):
            if flip:
                flat.view(f"u{part}")[column::columns] ^= np.array(1 << 8 * part - 1, f"u{part}")

    def words(self, items: Array) -> Array:
        """Return the stored bits of contiguous items as unsigned integers, for fingerprints.

        The real part is the low half on every machine, so that fingerprints do not depend on byte order; the 128 bits
        of complex128 are folded to 64 such that a change in either half, or a swap of the two, shows.
        """
        if self.dtype == "complex128":
            halves = items.view(np.uint64).reshape(-1, 2)
            return mixed(halves[:, 0]) + halves[:, 1]
        words = items.view(f"u{items.itemsize}")
        if sys.byteorder == "big" and self.dtype.startswith("complex"):
            half = 4 * items.itemsize
            words = words << words.dtype.type(half) | words >> words.dtype.type(half)
        return words

    def floats(self, items: Array) -> Array:
        """Return contiguous items as the kernels take them: as they are, where they can be."""
        return items if self.kernel_ready else self.values(items)

    def values(self, items: Array) -> Array:
        """Return what contiguous items are worth: float32 where that is exact, else float64; |z| of complex z.

        Integers beyond 2**53 are rounded to float64.
        """
        match self.dtype:
            case "float32" | "float64":
                return items
            case "float16":
                return _widened(items.view(np.float16), np.float32)
            case "bfloat16":
                return (items.astype(np.uint32) << np.uint32(16)).view(np.float32)
            case "int16" | "uint16":
                return items.astype(np.float32)
            case "complex32" | "complex64" | "complex128":
                parts = _widened(items.view(f"f{items.itemsize // 2}"), np.float64)
                return _modulus(parts[0::2], parts[1::2])
            case "float4_e2m1fn_x2":
                return byte_values(self.dtype)[items].reshape(-1)
            case _ if self.byte_wide:
                return byte_values(self.dtype)[items]
            case _:
                return items.astype(np.float64)


def read(tensor: torch.Tensor | Array) -> Bits:
    """Find the memory of a CPU tensor or a numpy array; refuse, with the reason, what has none."""
    if isinstance(tensor, np.ndarray | np.generic):
        return _read_numpy(np.asarray(tensor))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _read_torch(tensor, torch)
    raise Unsupported(
        f"statistics were asked of a {type(tensor).__name__}; they exist for torch.Tensor and numpy.ndarray. "
        "Make one of it first, with torch.as_tensor."
    )


def lying(tensor: Any) -> tuple[str, int, int] | None:
    """Return dtype, address and number of items of a tensor that kernels can read as it lies; None of any other.

    Says no quickly rather than why: `read` is for everything else, and has the reasons. Whatever is asked of torch's
    own modules is asked once for each kind of tensor, because their dictionaries are seldom in the cache.
    """
    kind = type(tensor), getattr(tensor, "dtype", None), getattr(tensor, "layout", None)
    known = _KINDS.get(kind) or _kind(*kind)
    if known is None or not tensor.is_cpu or tensor.is_nested or tensor.is_neg() or not tensor.is_contiguous():
        return None
    dtype, itemsize = known
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except RuntimeError:
        return None
    size = tensor.nbytes
    if not address or address % itemsize or not 0 < size <= _CHUNK or tensor.storage_offset() * itemsize + size > held:
        return None
    return dtype, address, size // itemsize


_KINDS: dict[tuple[Any, Any, Any], tuple[str, int]] = {}


def _kind(kind: Any, dtype: Any, layout: Any) -> tuple[str, int] | None:
    """Return dtype and size of an item where kernels read this kind of tensor, and remember it."""
    torch = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor or layout is not torch.strided or _name(dtype) not in _KERNEL_READY:
        return None
    known = _KINDS[kind, dtype, layout] = _name(dtype), ITEMS[_name(dtype)].itemsize
    return known


def _read_torch(tensor: torch.Tensor, torch: ModuleType) -> Bits:
    kind = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsupported(
            f"a {kind.__name__} keeps its values elsewhere; pass the plain tensor it stands for "
            "(to_local(), wait() or dequantize(), say)."
        )
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        what = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)[6:]
        way = {"nested": "unbind()", "quantised": "dequantize() or int_repr()"}.get(what, "to_dense()")
        raise Unsupported(f"a {what} tensor has no plain array of values; pass what its {way} gives.")
    if not tensor.is_cpu:
        raise Unsupported(
            f"a tensor on {tensor.device} has no memory this process can read; "
            + ("a meta tensor has no values at all." if tensor.is_meta else "pass tensor.cpu().")
        )
    dtype = _name(tensor.dtype)
    item = item_of(dtype)
    shape, contiguous = tuple(tensor.shape), tensor.is_contiguous()
    conjugated, negated = tensor.is_conj(), tensor.is_neg()
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise Unsupported(f"a tensor inside a transform (vmap, grad) has no memory to read: {error}") from None
    strides = () if contiguous else tensor.stride()
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if strides else tensor.numel()
    if (tensor.storage_offset() + span) * item.itemsize > held and 0 not in shape:
        raise Unsupported(
            f"the memory of this tensor was given back ({held} bytes are left), as FSDP does with parameters between "
            "uses; summarise it while it is whole."
        )
    if contiguous:
        items = _memory(address, shape, item, None)
    else:
        items = _memory(address, shape, item, [item.itemsize * stride for stride in strides])
    return Bits(dtype, shape, items, tensor, negated, negated != conjugated)


def _read_numpy(array: Array) -> Bits:
    dtype = array.dtype.name
    item = item_of(dtype)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    items = array.view(item)
    if array.flags.c_contiguous and array.flags.aligned and array.size:
        # Through the address, because a read-only array is another type to numba.
        items = _memory(array.ctypes.data, array.shape, item, None)
    return Bits(dtype, array.shape, items, array)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def item_of(dtype: str) -> np.dtype[Any]:
    """Return how one item of a dtype is held; refuse a dtype whose values are not defined."""
    if dtype not in ITEMS:
        raise Unsupported(f"statistics of dtype {dtype} are not defined; they are of {', '.join(ITEMS)}.")
    return ITEMS[dtype]


_MEMORY = ctypes.c_char * (1 << 62)


def _memory(address: int, shape: tuple[int, ...], item: np.dtype[Any], strides: Sequence[int] | None) -> Array:
    if 0 in shape:
        return np.empty(shape, item)
    buffer: Any = _MEMORY.from_address(address)
    return np.ndarray(shape, item, buffer, 0, strides)


def _split(items: Array, *, limit: int) -> Iterator[Array]:
    """Cut along the outer axes into parts of at most `limit` items, in row-major order."""
    if items.size <= limit:
        yield items
    elif rows := limit // (items.size // len(items)):
        for start in range(0, len(items), rows):
            yield items[start : start + rows]
    else:
        for row in items:
            yield from _split(row, limit=limit)


def _widened(values: Array, kind: type[np.floating[Any]]) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN turns quiet, which is no news
        return values.astype(kind)


def _modulus(real: Array, imaginary: Array) -> Array:
    """|z| without overflow; NaN when either part is NaN, else infinite when either is."""
    with np.errstate(all="ignore"):
        modulus: Array = np.hypot(real, imaginary)
    modulus[np.isnan(real) | np.isnan(imaginary)] = np.nan  # hypot says infinite when the other part is
    return modulus


# What a byte is worth ---------------------------------------------------------------------------

# exponent bits, fraction bits, bias, first exponent that is not finite (IEEE), codes of NaN
_SMALL_FLOATS: dict[str, tuple[int, int, int, bool, tuple[int, ...]]] = {
    "float8_e4m3fn": (4, 3, 7, False, (0x7F, 0xFF)),
    "float8_e4m3fnuz": (4, 3, 8, False, (0x80,)),
    "float8_e5m2": (5, 2, 15, True, ()),
    "float8_e5m2fnuz": (5, 2, 16, False, (0x80,)),
    "float4_e2m1fn_x2": (2, 1, 1, False, ()),
}


@cache
def byte_values(dtype: str) -> Array:
    """Return what each of the 256 bytes is worth; for packed float4 a pair, the low half first."""
    codes: Array = np.arange(256)
    if dtype == "bool":
        return np.where(codes != 0, 1.0, 0.0)
    if dtype == "uint8":
        return codes.astype(np.float64)
    if dtype == "int8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float64)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes - 127))
    exponent_bits, fraction_bits, bias, ieee, nan = _SMALL_FLOATS[dtype]
    width = 1 + exponent_bits + fraction_bits
    codes = codes[: 1 << width]
    exponent = codes >> fraction_bits & (1 << exponent_bits) - 1
    fraction = (codes & (1 << fraction_bits) - 1) / (1 << fraction_bits)
    values = np.where(exponent > 0, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))
    if ieee:
        top = exponent == (1 << exponent_bits) - 1
        values = np.where(top, np.where(fraction > 0, np.nan, np.inf), values)
    values = np.where(codes >> width - 1, -values, values)
    values[list(nan)] = np.nan
    if width == 4:
        byte = np.arange(256)
        return np.stack([values[byte & 15], values[byte >> 4]], axis=1)
    return values
