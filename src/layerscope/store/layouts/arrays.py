"""Numpy's files, read without numpy's loader: headers first, values by the stretch, objects never.

    npy(files, "mode_fp32_layer_0.npy")         # an Extent: dtype and shape known, nothing read
    npz(files, "first_layer_io_all_modes.npz")  # {key: Member}, and `array(member)` is its Extent

What `.npy` cannot say is refused with the reason: pickled objects, and raw bytes that may once have been bfloat16.
Stored members of an `.npz` are read where they lie; compressed ones are decompressed as they are gone through.
"""

from __future__ import annotations

import ast
import math
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import Folder
from layerscope.store.layouts.archives import Member, is_zip, members
from layerscope.store.layouts.extents import Extent

__all__ = ["NUMPY", "array", "npy", "npz"]

MAGIC = b"\x93NUMPY"
# As numpy has it: longer text may crash the parser of Python literals.
_LONGEST = 10_000
# Torch's names of the dtypes that numpy has too.
NUMPY = (
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


class _Header(NamedTuple):
    begins: int  # where the values do
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    swapped: bool


def npy(files: Folder, name: str) -> Extent:
    """Read the header of a `.npy` file; raises Damaged when it is cut short, Unsupported for a dtype torch lacks."""
    place, size = f"{files.address}/{name}", files.size(name)
    head = _header(place, bytes(files.read(name, length=_LONGEST + 12)), size)
    return Extent(files, name, head.begins, head.dtype, head.shape, head.stride, head.swapped)


def npz(files: Folder, name: str) -> dict[str, Member]:
    """List the arrays of an `.npz` file by their keys, whatever characters these hold."""
    if not is_zip(files, name):
        raise Damaged(f"{files.address}/{name} is no .npz file: it does not begin as a zip archive does")
    return {member.name.removesuffix(".npy"): member for member in members(files, name)}


def array(member: Member) -> Extent:
    """Read the header of one array of an `.npz` file."""
    start = member.start(_LONGEST + 12)
    head = _header(member.place, start, member.size)
    facts = (head.dtype, head.shape, head.stride, head.swapped)
    if member.offset is None:
        return Extent(member.files, member.archive, head.begins, *facts, opened=member.opened)
    verify = _verifying(member, start[: head.begins])
    return Extent(member.files, member.archive, member.offset + head.begins, *facts, verify=verify)


def _verifying(member: Member, header: bytes) -> Callable[[Iterable[bytearray]], None]:
    def verify(parts: Iterable[bytearray]) -> None:
        size, crc32 = len(header), zlib.crc32(header)
        for part in parts:
            size, crc32 = size + len(part), zlib.crc32(part, crc32)
        if size == member.size and crc32 != member.crc32:
            raise Damaged(f"{member.place}: the bytes are not what was written (checksum)")

    return verify


def _header(place: str, start: bytes, size: int) -> _Header:
    """Read the header at the start of an array of `size` bytes, and check that the values it speaks of are there."""
    if start[:6] != MAGIC:
        raise Damaged(f"{place} is no .npy array: it does not begin as one")
    wide = start[6:7] != b"\x01"
    begins = 12 if wide else 10
    length = int.from_bytes(start[8:begins], "little")
    if len(start) < begins or begins + length > size:
        raise Damaged(f"{place} ends within its header: it is truncated")
    if start[6] not in (1, 2, 3) or length > _LONGEST:
        raise Damaged(f"{place}: no .npy header of version {start[6]} with {length} bytes is known")
    begins += length
    try:
        said = ast.literal_eval(start[begins - length : begins].decode("utf-8" if start[6] == 3 else "latin-1").strip())
        descr, fortran, shape = said["descr"], said["fortran_order"], said["shape"]
        right = isinstance(fortran, bool) and isinstance(shape, tuple) and all(type(n) is int for n in shape)
        if not right or any(not 0 <= n < 1 << 63 for n in shape) or len(shape) > 64:
            raise ValueError(f"shape {shape!r}"[:200])
        dtype = np.dtype(descr) if isinstance(descr, str) else None
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise Damaged(f"{place}: its header does not read ({str(error)[:200]})") from error
    _refuse(place, dtype, descr)
    assert dtype is not None
    needed = math.prod(shape) * dtype.itemsize
    if needed > size - begins:
        raise Damaged(
            f"{place} is truncated: {dtype.name} of shape {list(shape)} takes {needed} bytes, not {size - begins}"
        )
    stride = tuple(math.prod(shape[:axis]) for axis in range(len(shape))) if fortran and len(shape) > 1 else None
    other = ">" if sys.byteorder == "little" else "<"
    return _Header(begins, dtype.name, shape, stride, dtype.byteorder == other)


def _refuse(place: str, dtype: np.dtype[np.generic] | None, descr: object) -> None:
    """Raise for a dtype that is none of torch's, with what it is likely to be."""
    if dtype is not None and dtype.name in NUMPY:
        return
    if dtype is None:
        why = "a structured array; save each field on its own"
    elif dtype.hasobject:
        why = "an array of pickled Python objects, and nothing is ever unpickled; save plain numbers"
    elif dtype.kind == "V":
        why = (
            f"raw bytes, {dtype.itemsize} for each value, and what they mean was not saved: numpy writes bfloat16 and "
            "float8 so; save them as float32"
        )
    else:
        why = f"an array of {dtype.name} ({descr}), which torch has no dtype for; save it as float64 or int64"
    raise Unsupported(f"{place} is {why}")
