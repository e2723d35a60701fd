"""A record as a row, rows as bytes, and rows as columns.

    packed = pack(row)                       # what a journal's frame holds; crc32c of it is the row's check
    columns = Columns.of(rows)               # what a sealed segment holds: an array per field
    columns.row(3) == rows[3]

One record has one canonical form in bytes. A segment keeps its crc32c beside the columns, so that damage in a column
costs the rows it hit and no others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from layerscope.errors import BadText, Damaged
from layerscope.points import Moment, Point
from layerscope.store import strictjson
from layerscope.store.checksum import crc32c

if TYPE_CHECKING:
    from layerscope.stats import Summary

Array = npt.NDArray[Any]


class Has:
    """What a record has; a bit for each thing that may be absent, so that no value need stand for its absence."""

    EPOCH = 1
    TENSOR = 2
    SUMMARY = 4
    SKETCH = 8
    FINGERPRINT = 16
    PLACED = 32
    NOTE = 64
    CHANNELS = 128
    ONE_SHAPE = 256  # the summary is of tensors that share a shape


class TableRow(NamedTuple):
    """One record: where and when, where its bytes are, its statistics, what the recorder noted.

    `dtype`, `shape`, `bytes_of`, `offset`, `length` and `crc32c` mean something where `has_tensor`; `bytes_of` is the
    record whose bytes these are, which is this one unless the same bytes were stored already. `note` is strict JSON.
    """

    record: int
    point: str
    epoch: int | None
    step: int
    batch: int
    call: int
    rank: int
    has_tensor: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes_of: int = 0
    offset: int = 0
    length: int = 0
    crc32c: int = 0
    summary: Summary | None = None
    note: bytes = b""

    @property
    def moment(self) -> Moment:
        """When it was recorded."""
        return Moment(self.epoch, self.step, self.batch, self.call, self.rank)

    @property
    def has(self) -> int:
        """Return the bits of what it has."""
        bits = (self.epoch is not None) * Has.EPOCH | self.has_tensor * Has.TENSOR | bool(self.note) * Has.NOTE
        return bits if self.summary is None else bits | bits_of(self.summary)


def bits_of(s: Summary) -> int:
    """Return the bits of what a summary has."""
    bits = Has.SUMMARY | (s.sketch is not None) * Has.SKETCH | (s.fingerprint is not None) * Has.FINGERPRINT
    bits |= (s.placed is not None) * Has.PLACED | (s.channels is not None) * Has.CHANNELS
    return bits | (s.shape is not None) * Has.ONE_SHAPE


# A row as bytes ---------------------------------------------------------------------------------

_WHERE = struct.Struct("<HQqqqqqQQQI")
_STATISTICS = struct.Struct("<6Q5d2Q")
_SIZE = struct.Struct("<I")


def pack(row: TableRow) -> bytes:
    """Return the one form in bytes that a row has; raises ValueError for numbers that 64 bits do not hold."""
    s, has = row.summary, row.has
    where = (has, row.record, row.epoch or 0, row.step, row.batch, row.call, row.rank)
    try:
        parts = [_WHERE.pack(*where, row.bytes_of, row.offset, row.length, row.crc32c), _sized(encoded(row.point))]
        if row.has_tensor:
            parts += [_sized(row.dtype.encode("ascii")), _shape(row.shape)]
        if s is not None:
            prints = (s.fingerprint or 0, s.placed or 0)
            counts = (s.tensors, s.count, s.nan, s.posinf, s.neginf, s.zeros)
            parts += [_STATISTICS.pack(*counts, s.mean, s.std, s.min, s.max, s.l1, *prints)]
            parts += [_sized(s.dtype.encode("ascii")), _shape(s.shape or ())]
            parts += [_sized(struct.pack(f"<{len(s.first)}d", *s.first))]
            if s.sketch is not None:
                parts += [_sized(s.sketch.keys.astype("<i4").tobytes()), s.sketch.counts.astype("<i8").tobytes()]
            if s.channels is not None:
                parts += [_sized(s.channels.packed())]
    except struct.error as error:
        raise ValueError(f"{row.point} at {row.moment} holds a number that 64 bits do not ({error})") from error
    if row.note:
        parts += [_sized(row.note)]
    return b"".join(parts)


def unpack(data: bytes | memoryview) -> TableRow:
    """Read `pack` back, to the last bit; raises Damaged for what it never gave."""
    take = _Taking(memoryview(data))
    try:
        has, record, epoch, step, batch, call, rank, bytes_of, offset, length, crc = take.struct(_WHERE)
        point = decoded(take.sized())
        check_point(point)
        if has >= 2 * Has.ONE_SHAPE:
            raise ValueError(f"{has:#x} says that it has what this version does not know")
        tensor = bool(has & Has.TENSOR)
        dtype, shape = (str(take.sized(), "ascii"), take.shape()) if tensor else ("", ())
        summary = _summary(take, has) if has & Has.SUMMARY else None
        note = bytes(take.sized()) if has & Has.NOTE else b""
        if take.at != len(take.data):
            raise ValueError(f"{len(take.data) - take.at} bytes too many")
    except (struct.error, ValueError, UnicodeError, BadText) as error:
        raise Damaged(f"a row that does not say what a record must ({error})") from None
    when = (epoch if has & Has.EPOCH else None, step, batch, call, rank)
    return TableRow(record, point, *when, tensor, dtype, shape, bytes_of, offset, length, crc, summary, note)


def _summary(take: _Taking, has: int) -> Summary:
    from layerscope.stats import Channels, Sketch, Summary

    *numbers, free, placed = take.struct(_STATISTICS)
    dtype, shape = str(take.sized(), "ascii"), take.shape()
    first = np.frombuffer(take.sized(), "<f8").tolist()
    if len(first) > FIRST:
        raise ValueError(f"{len(first)} first values")
    sketch = None
    if has & Has.SKETCH:
        keys = np.frombuffer(take.sized(), "<i4").astype(np.int32)
        sketch = Sketch(keys, np.frombuffer(take.bytes(8 * keys.size), "<i8").astype(np.int64))
    channels = Channels.unpacked(bytes(take.sized())) if has & Has.CHANNELS else None
    return Summary(
        **dict(zip((*COUNTS, *MOMENTS), numbers, strict=True)),
        first=tuple(first),
        dtype=dtype,
        shape=shape if has & Has.ONE_SHAPE else None,
        sketch=sketch,
        fingerprint=free if has & Has.FINGERPRINT else None,
        placed=placed if has & Has.PLACED else None,
        channels=channels,
    )


@lru_cache(maxsize=1 << 14)
def check_point(text: str) -> None:
    """Raise BadText for a text that names no point."""
    Point.parse(text)


class _Taking:
    """Bytes that are read from front to back."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def bytes(self, size: int) -> memoryview:
        if self.at + size > len(self.data):
            raise ValueError("it ends too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def struct(self, kind: struct.Struct) -> tuple[Any, ...]:
        return kind.unpack(self.bytes(kind.size))

    def sized(self) -> memoryview:
        return self.bytes(self.struct(_SIZE)[0])

    def shape(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.sized(), "<u8").tolist())


def _sized(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def _shape(shape: Sequence[int]) -> bytes:
    return _sized(struct.pack(f"<{len(shape)}Q", *shape))


def encoded(text: str) -> bytes:
    """Return a name as UTF-8; a lone surrogate, which a module's name may hold, is kept."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes | memoryview) -> str:
    """Read `encoded` back."""
    return str(data, "utf-8", "surrogatepass")


# Columns ----------------------------------------------------------------------------------------

COUNTS = ("tensors", "count", "nan", "posinf", "neginf", "zeros")
MOMENTS = ("mean", "std", "min", "max", "l1")
# Of different lengths from row to row: a column of values, and for each row where its own begin, and how many.
RAGGED = {"sketch_keys": "sketch", "sketch_counts": "sketch", "channels": "channels", "note": "note"}
SKETCH = ("sketch_keys", "sketch_counts", "sketch_start", "sketch_size")
LISTS = ("points", "dtypes", "shapes")
# Which list a column of codes counts in.
_CODED = ("point", "dtype", "summary_dtype", "shape", "summary_shape")
_COUNTED = {name: f"{name.removeprefix('summary_')}s" for name in _CODED}
FIRST = 10


@dataclass(eq=False)
class Columns:
    """Records as arrays, one for each field, and the lists that `point`, `dtype` and `shape` count in.

    A ragged field has its values in one array and two more, `NAME_start` and `NAME_size`, with a number per row. Rows
    that are `bad` are not what was written. Where they are `unique` no two have the same point and moment; `steps` are
    the first and the last, `ranks` those that the moments name.
    """

    rows: int
    arrays: dict[str, Array]
    points: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    bad: set[int] = field(default_factory=set)
    unique: bool = False
    steps: tuple[int, int] | None = None
    ranks: Sequence[int] = ()

    def array(self, name: str) -> Array:
        """Return one column, with a number for each row."""
        return self.arrays[name]

    def load(self, names: Sequence[str]) -> Columns:
        """Return these with some columns at hand: all of them are."""
        return self

    @classmethod
    def of(cls, rows: Sequence[TableRow], checks: Sequence[int] | None = None) -> Columns:
        """Put rows into columns, each as narrow as its values; `checks` are the crc32c of the rows as bytes."""
        points, dtypes, shapes = _Codes(), _Codes(), _Codes()
        summaries = [row.summary for row in rows]
        here = [s for s in summaries if s is not None]
        at = np.flatnonzero([s is not None for s in summaries])
        fields = list(zip(*(row[:14] for row in rows), strict=True)) or [()] * 14
        arrays: dict[str, Array] = {
            "record": _integers(fields[0]),
            "point": _integers(points.all(fields[1])),
            "epoch": _integers([epoch or 0 for epoch in fields[2]]),
            **{name: _integers(fields[3 + n]) for n, name in enumerate(("step", "batch", "call", "rank"))},
            "has": _integers([row.has for row in rows]),
            "dtype": _integers(dtypes.all(row.dtype if row.has_tensor else None for row in rows)),
            "shape": _integers(shapes.all(row.shape if row.has_tensor else None for row in rows)),
            **{name: _integers(fields[10 + n]) for n, name in enumerate(("bytes_of", "offset", "length", "crc32c"))},
            "check": np.array([crc32c(pack(row)) for row in rows] if checks is None else checks, np.uint32),
        }
        arrays |= {name: _integers(_spread(at, [getattr(s, name) for s in here], len(rows))) for name in COUNTS}
        arrays |= {name: _floats(_spread(at, [getattr(s, name) for s in here], len(rows), float)) for name in MOMENTS}
        first = np.zeros((len(rows), FIRST))
        for n, s in zip(at, here, strict=True):
            first[n, : len(s.first)] = s.first
        arrays["first"] = _floats(first)
        arrays["first_count"] = _integers(_spread(at, [len(s.first) for s in here], len(rows)))
        prints = np.zeros((len(rows), 2), np.uint64)
        if here:
            prints[at] = [(s.fingerprint or 0, s.placed or 0) for s in here]
        arrays["fingerprint"] = prints
        arrays["summary_dtype"] = _integers(_spread(at, dtypes.all(s.dtype for s in here), len(rows)))
        arrays["summary_shape"] = _integers(_spread(at, shapes.all(s.shape or () for s in here), len(rows)))
        sketches = [None if s is None else s.sketch for s in summaries]
        arrays |= _ragged("sketch", [0 if k is None else k.keys.size for k in sketches])
        arrays["sketch_keys"] = _integers(_joined([k.keys for k in sketches if k is not None], np.int32))
        arrays["sketch_counts"] = _integers(_joined([k.counts for k in sketches if k is not None], np.int64))
        packed = [b"" if s is None or s.channels is None else s.channels.packed() for s in summaries]
        for name, texts in (("channels", packed), ("note", [row.note for row in rows])):
            arrays |= _ragged(name, [len(text) for text in texts])
            arrays[name] = np.frombuffer(b"".join(texts), np.uint8)
        return cls(len(rows), arrays, points.values, dtypes.values, shapes.values)

    @classmethod
    def joined(cls, parts: Sequence[Columns], moved: Sequence[int]) -> Columns:
        """Put tables one behind the other; the bytes that a part speaks of have moved by so many."""
        lists: dict[str, _Codes] = {name: _Codes() for name in LISTS}
        renumbered = {
            name: [np.array([*codes.all(getattr(part, name)), 0], np.int64) for part in parts]
            for name, codes in lists.items()
        }
        arrays: dict[str, Array] = {}
        for name in parts[0].arrays:
            own = [part.arrays[name] for part in parts]
            if name in _COUNTED:
                tables = renumbered[_COUNTED[name]]
                own = [table[np.minimum(each, len(table) - 1)] for table, each in zip(tables, own, strict=True)]
            elif name == "offset":
                tensors = [(part.arrays["has"] & Has.TENSOR) != 0 for part in parts]
                own = [
                    np.where(t, each.astype(np.int64) + by, 0) for each, t, by in zip(own, tensors, moved, strict=True)
                ]
            elif name.endswith("_start"):
                values = {"sketch": "sketch_keys"}.get(name.removesuffix("_start"), name.removesuffix("_start"))
                before = np.cumsum([0, *(len(part.arrays[values]) for part in parts)])
                own = [each.astype(np.int64) + by for each, by in zip(own, before, strict=False)]
            if own[0].dtype.kind == "f":
                arrays[name] = _floats(np.concatenate([each.astype(np.float64) for each in own]))
            elif name in ("check", "fingerprint", "channels", "note"):
                arrays[name] = np.concatenate(own)
            else:
                wide = np.uint64 if any(each.dtype == np.uint64 for each in own) else np.int64
                arrays[name] = _integers(np.concatenate([each.astype(wide) for each in own]))
        points, dtypes, shapes = (codes.values for codes in lists.values())
        return cls(sum(part.rows for part in parts), arrays, points, dtypes, shapes)

    def row(self, at: int) -> TableRow:
        """Return one row; raises Damaged where the columns contradict each other."""
        a = self.arrays
        try:
            has = int(a["has"][at])
            tensor = bool(has & Has.TENSOR)
            record, epoch, step, batch, call, rank = (
                int(a[name][at]) for name in ("record", "epoch", "step", "batch", "call", "rank")
            )
            owner, offset, length, crc = (int(a[name][at]) for name in ("bytes_of", "offset", "length", "crc32c"))
            dtype = self.dtypes[int(a["dtype"][at])] if tensor else ""
            shape = self.shapes[int(a["shape"][at])] if tensor else ()
            point = self.points[int(a["point"][at])]
            summary = self.summary(at) if has & Has.SUMMARY else None
            note = bytes(self._of("note", "note", at)) if has & Has.NOTE else b""
        except (IndexError, KeyError, ValueError, BadText) as error:
            raise Damaged(f"the columns of row {at} do not fit together ({error})") from None
        when = (epoch if has & Has.EPOCH else None, step, batch, call, rank)
        return TableRow(record, point, *when, tensor, dtype, shape, owner, offset, length, crc, summary, note)

    def summary(self, at: int) -> Summary:
        """Return the statistics of one row, which has some."""
        from layerscope.stats import Channels, Sketch, Summary

        a, has = self.arrays, int(self.arrays["has"][at])
        numbers: dict[str, Any] = {name: int(a[name][at]) for name in COUNTS}
        numbers |= {name: float(a[name][at]) for name in MOMENTS}
        sketch = None
        if has & Has.SKETCH:
            keys = np.array(self._of("sketch_keys", "sketch", at), np.int32)
            sketch = Sketch(keys, np.array(self._of("sketch_counts", "sketch", at), np.int64))
        free, placed = map(int, a["fingerprint"][at])
        return Summary(
            **numbers,
            first=tuple(a["first"][at].astype(np.float64).tolist()[: int(a["first_count"][at])]),
            dtype=self.dtypes[int(a["summary_dtype"][at])],
            shape=self.shapes[int(a["summary_shape"][at])] if has & Has.ONE_SHAPE else None,
            sketch=sketch,
            fingerprint=free if has & Has.FINGERPRINT else None,
            placed=placed if has & Has.PLACED else None,
            channels=Channels.unpacked(bytes(self._of("channels", "channels", at))) if has & Has.CHANNELS else None,
        )

    def note(self, at: int) -> dict[str, Any]:
        """Return what the recorder noted beside one row."""
        text = bytes(self._of("note", "note", at))
        value = strictjson.loads(text) if text else {}
        if not isinstance(value, dict):
            raise Damaged("the note is not an object")
        return value

    def _of(self, name: str, ragged: str, at: int) -> Array:
        start, size = int(self.arrays[f"{ragged}_start"][at]), int(self.arrays[f"{ragged}_size"][at])
        if start + size > len(self.arrays[name]):
            raise ValueError(f"{ragged} of row {at} lies outside its column")
        return self.arrays[name][start : start + size]


class _Codes:
    """Numbers for values, in the order they are first met."""

    def __init__(self) -> None:
        self._codes: dict[Any, int] = {}

    @property
    def values(self) -> list[Any]:
        return list(self._codes)

    def all(self, values: Iterable[Any]) -> list[int]:
        """Return a number for each value; 0 for None, which no bit of `has` vouches for."""
        codes = self._codes
        return [0 if value is None else codes.setdefault(value, len(codes)) for value in values]


def _spread(at: Array, values: Sequence[Any], rows: int, kind: type = int) -> Array:
    """Put the values of some rows among zeros for the others."""
    if kind is float:
        spread = np.zeros(rows)
    else:
        spread = np.zeros(rows, np.uint64 if max(values, default=0) > np.iinfo(np.int64).max else np.int64)
    if len(at):
        spread[at] = values
    return spread


def _integers(values: Any) -> Array:
    """Return integers in as few bytes as the largest needs."""
    array = np.asarray(values)
    if not array.size:
        return array.astype(np.uint8)
    if array.dtype.kind not in "iu":  # numpy makes float64 of numbers of which some need the 64th bit
        whole = [int(value) for value in values]
        array = np.array(whole, np.uint64 if max(whole) > np.iinfo(np.int64).max else np.int64)
    low, high = int(array.min()), int(array.max())
    # Never uint64 where int64 will do: numpy joins the two as float64, which rounds.
    kinds = (np.uint8, np.uint16, np.uint32, np.int64) if low >= 0 else (np.int8, np.int16, np.int32, np.int64)
    return array.astype(
        next((kind for kind in kinds if low >= np.iinfo(kind).min and high <= np.iinfo(kind).max), np.uint64)
    )


def _floats(array: Array) -> Array:
    """Return numbers as float32 where that keeps every bit."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = array.astype(np.float32)
        same = np.array_equal(narrow.astype(np.float64).view(np.uint64), array.view(np.uint64))
    return narrow if same else array


def _ragged(name: str, sizes: Sequence[int]) -> dict[str, Array]:
    array = np.array(sizes, np.int64)
    return {f"{name}_start": _integers(np.cumsum(array) - array), f"{name}_size": _integers(array)}


def _joined(parts: Sequence[Array], kind: Any) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, kind)
