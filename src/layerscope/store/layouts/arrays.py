"""Numpy's files, read by numpy once their headers are sure: values by the stretch, objects never.

    npy(files, "mode_fp32_layer_0.npy")             # dtype and shape known, no value read
    npz(files, "first_layer_io_all_modes.npz")      # {key: member}, and `array(files, name, member)` reads one

What `.npy` cannot say is refused with the reason: pickled objects, and raw bytes that may once have been bfloat16.
Members of an `.npz` are gone through as a stream, which compares their checksum at the end.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from layerscope.errors import Damaged, LayerscopeError, Unsupported
from layerscope.store.address import Folder
from layerscope.store.layouts.archives import Member, archive, is_zip
from layerscope.store.layouts.copies import path_of
from layerscope.store.layouts.unread import Unread, flat_pieces, mapped

if TYPE_CHECKING:
    import torch

# Torch's names of the dtypes that numpy has too.
NUMPY = (
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_AT_A_TIME = 1 << 20  # bytes
# What is compressed so far and would be taken into memory whole is one value over and over, or a bomb.
_LARGEST, _TIMES = 256 << 20, 100


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: bool  # whether they lie in row-major order
    begins: int  # where the values do

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Open: TypeAlias = Callable[[], AbstractContextManager[tuple[IO[bytes], _Header]]]


def npy(files: Folder, name: str) -> Unread:
    """Read the header of a `.npy` file; raises Damaged when it is cut short, Unsupported for a dtype torch lacks."""
    place = f"{files.address}/{name}"

    @contextmanager
    def opened() -> Iterator[tuple[IO[bytes], _Header]]:
        path = path_of(files, name)
        with path.open("rb") as stream:
            yield stream, _header(stream, path.stat().st_size, place)

    def again() -> np.ndarray[Any, Any]:
        with opened():
            return np.load(path_of(files, name), mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]

    with opened() as (_, header):
        if header.rows:
            return _streamed(place, header, opened)
        return mapped(header.dtype.name, header.shape, place, again)


def npz(files: Folder, name: str) -> dict[str, Member]:
    """List the arrays of an `.npz` file by their keys, whatever characters these hold."""
    if not is_zip(files, name):
        raise Damaged(f"{files.address}/{name} is no .npz file: it does not begin as a zip archive does")
    with archive(files, name) as (_, members):
        return {member.filename.removesuffix(".npy"): member for member in members}


def array(files: Folder, name: str, member: Member) -> Unread:
    """Read the header of one array of an `.npz` file."""
    place = f"{files.address}/{name} ({member.filename})"

    @contextmanager
    def opened() -> Iterator[tuple[IO[bytes], _Header]]:
        with archive(files, name, member.filename) as (zipped, _), zipped.open(member.filename) as stream:
            yield stream, _header(stream, member.file_size, place)

    with opened() as (_, header):
        found = _streamed(place, header, opened)
    if header.nbytes <= max(_LARGEST, _TIMES * member.compress_size):
        return found

    def load() -> torch.Tensor:
        raise Unsupported(
            f"{place} has {header.nbytes} bytes in {member.compress_size}, compressed more than {_TIMES} times as a "
            "bomb is; where it is none, save it without compression"
        )

    return replace(found, load=load, pieces=found.pieces if header.rows else lambda items: flat_pieces(load(), items))


def _streamed(place: str, first: _Header, opened: _Open) -> Unread:
    """Return an array that is read from a stream, which is opened anew and must begin as it did `first`."""

    @contextmanager
    def reading() -> Iterator[IO[bytes]]:
        try:
            with opened() as (stream, header):
                if header != first:
                    raise Damaged(f"{place} is not what it was when it was opened")
                yield stream  # whose last byte has zipfile compare the checksum
        except (FileNotFoundError, KeyError) as error:
            raise Damaged(f"{place} is not there any more") from error
        except EOFError as error:
            raise Damaged(f"{place} is truncated: it was longer when it was opened") from error

    def load() -> torch.Tensor:
        with reading() as stream:
            flat = _filled(stream, first, math.prod(first.shape))
        back = range(len(first.shape))[::-1]
        return flat.reshape(first.shape) if first.rows else flat.reshape(first.shape[::-1]).permute(*back)

    def pieces(items: int) -> Iterator[torch.Tensor]:
        if not first.rows:
            yield from flat_pieces(load(), items)
            return
        count = math.prod(first.shape)
        with reading() as stream:
            for start in range(0, count, items):
                yield _filled(stream, first, min(items, count - start))

    return Unread(first.dtype.name, first.shape, load, pieces)


def _filled(stream: IO[bytes], header: _Header, count: int) -> torch.Tensor:
    """Read so many values from a stream; memory is touched as bytes arrive, whatever was stated."""
    import torch

    flat = np.empty(count, header.dtype.newbyteorder("="))
    view, done = memoryview(flat.view(np.uint8).data), 0
    while done < len(view):
        got = stream.readinto(view[done : done + _AT_A_TIME])  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        done += got
    if not header.dtype.isnative:
        flat.byteswap(inplace=True)
    return torch.from_numpy(flat) if count else torch.empty(0, dtype=getattr(torch, header.dtype.name))


def _header(stream: IO[bytes], size: int, place: str) -> _Header:
    """Read the header at the start of an array of `size` bytes, and check that the values it speaks of are there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            version = np.lib.format.read_magic(stream)
            if version > (3, 0):
                raise ValueError(f"version {version[0]} of the format is not known")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
    except LayerscopeError:
        raise
    except OSError:
        raise
    except Exception as error:  # numpy parses Python literals: their errors are many
        start = f"{place} is truncated or no .npy array"
        raise Damaged(f"{start} ({' '.join(str(error).split())[:200] or type(error).__name__})") from error
    if len(shape) > 64 or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise Damaged(f"{place}: its header does not read (shape {str(shape)[:200]})")
    _refuse(place, dtype)
    header = _Header(dtype, shape, not fortran or len(shape) < 2, stream.tell())
    if header.nbytes > size - header.begins:
        raise Damaged(
            f"{place} is truncated: {dtype.name} of shape {list(shape)} takes {header.nbytes} bytes, "
            f"not {size - header.begins}"
        )
    if math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 63:
        raise Unsupported(f"{place} has no values and a shape that no tensor can have: {list(shape)}")
    return header


def _refuse(place: str, dtype: np.dtype[Any]) -> None:
    """Raise for a dtype that is none of torch's, with what it is likely to be."""
    if dtype.name in NUMPY:
        return
    if dtype.hasobject:
        why = "an array of pickled Python objects, and nothing is ever unpickled; save plain numbers"
    elif dtype.names is not None or dtype.subdtype is not None:
        why = "a structured array; save each field on its own"
    elif dtype.kind == "V":
        why = (
            f"raw bytes, {dtype.itemsize} for each value, and what they mean was not saved: numpy writes bfloat16 and "
            "float8 so; save them as float32"
        )
    else:
        why = f"an array of {dtype.name} ({dtype.str}), which torch has no dtype for; save it as float64 or int64"
    raise Unsupported(f"{place} is {why}")
