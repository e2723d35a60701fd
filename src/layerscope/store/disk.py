"""A run in layerscope's own format, wherever it lies: sealed segments, and the ones that are still being written.

    Run(Disk(folder("runs/fp32")))

Opening reads footers and the columns that say where and when; tensors are left alone. Nothing that is still written is
ever mapped, and nothing is written into the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import numpy as np

from layerscope.errors import Damaged
from layerscope.points import Moment
from layerscope.store import journal
from layerscope.store.address import (
    JOURNAL,
    PARTIAL,
    SEALED,
    Folder,
    LocalFolder,
    RemoteFolder,
    SegmentName,
    others_may_cut,
    rank_folder,
    rank_of,
    segment_of,
)
from layerscope.store.checksum import Bytes, crc32c
from layerscope.store.columns import COUNTS, MOMENTS, SKETCH, Array, Columns, Has
from layerscope.store.dtypes import STORED, nbytes, stored
from layerscope.store.manifest import NAME, Completeness, Manifest
from layerscope.store.records import WHEN, Records
from layerscope.store.recovery import NOTHING_ELSE, Damage
from layerscope.store.segment import ROOM, Sealed
from layerscope.store.source import NOTHING, Kept, Source
from layerscope.store.table import StoredStatistics

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

T = TypeVar("T")
U = TypeVar("U")

# A manifest of a hundred thousand modules takes about 10 MB.
_LARGEST_MANIFEST = 256 << 20
# Smaller tensors are read: a mapping each is many mappings, and the system gives a process some 65,000.
_MAPPED_FROM = 1 << 20
# How many requests are under way at a time.
_AT_ONCE = 32
# By so many bytes at its end a journal is known again: a frame's checksum and more.
_REMEMBERED = 64
_OPEN = ("record", "point", "has", *WHEN)
_TENSOR = ("has", "bytes_of", "dtype", "shape", "offset", "length", "crc32c")
_KEPT = ("dtype", "shape", "length")
_STORED = (*COUNTS, *MOMENTS, "first", "first_count", "fingerprint", "summary_dtype", "summary_shape", *SKETCH)


@final
class Unsealed(Columns):
    """A segment that is still written, or that a kill left: its journal, and the partial beside it."""

    def __init__(self, files: Folder, stem: str) -> None:
        self.name = f"{stem}{JOURNAL}"
        self._files = files
        self._begin()
        self.refresh()

    def _begin(self) -> None:
        self._hold(Columns.of([], []))
        self.damage: list[tuple[str, int | None]] = []
        self.torn = self.end = 0
        self._run = self._last = b""

    def _hold(self, columns: Columns) -> None:
        super().__init__(columns.rows, columns.arrays, columns.points, columns.dtypes, columns.shapes)

    def refresh(self) -> None:
        """Read on behind the last whole frame, or all of it where that is not there any more."""
        for _ in range(2):  # a read beside a write may have its pages from before and after it: damage is seen twice
            data = self._files.read(self.name, offset=self.end - len(self._last))
            if not data.startswith(self._last):
                self._begin()
                data = self._files.read(self.name)
            data = data[len(self._last) :]
            found = journal.read(data, run=self._run)
            if not found.damage:
                break
        more = Columns.of(found.rows, found.checks)
        self._hold(Columns.joined([self, more], [0, 0]) if self.rows else more)
        self.damage += [(f"byte {self.end + at}: {why}", None) for at, why in found.damage]
        self._last = bytes(data[: found.end][-_REMEMBERED:]) or self._last
        self.torn, self.end, self._run = found.torn, self.end + found.end, found.run
        if not self.end:
            with contextlib.suppress(FileNotFoundError):
                if self._files.size(self.name.removesuffix(JOURNAL) + PARTIAL) > ROOM:
                    self.damage = [(f"nothing of it reads, {NOTHING_ELSE}", None)]

    def look_through(self) -> None:
        """Do nothing: each frame was checked when it was read."""


class _Segment(NamedTuple):
    folder: int
    name: SegmentName
    table: Sealed | Unsealed

    @property
    def stem(self) -> str:
        return f"{rank_folder(self.folder)}/{self.name.stem}"

    @property
    def merged(self) -> Sequence[str]:
        """The segments that this one was merged of, and stands for."""
        return self.table.merged if isinstance(self.table, Sealed) and not self.table.damage else ()


class _Place(NamedTuple):
    """Where a tensor's bytes are, and as what they are read."""

    segment: _Segment
    row: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    crc32c: int


@final
class Disk(Source):
    """The files of a run; `notes` says in sentences what was odd."""

    def __init__(self, files: Folder) -> None:
        self.address = self.path = files.address
        self._files = files
        self._segments: list[_Segment] = []
        self._table: Records | None = None
        self._verified: set[tuple[str, int]] = set()
        self._harmed: dict[tuple[int, int], Damage] = {}  # records that turned out damaged when they were read
        self._seen: list[Damage] = []
        self._looked = False
        self._look()

    def refresh(self) -> None:
        """See what has been written since."""
        self._files.forget()
        self._look()

    def _look(self) -> None:
        self.notes, self._seen, self._harmed, self._looked = [], [], {}, False
        self.manifest = self._read_manifests()
        known = {each.stem: each.table for each in self._segments}
        ranks = [rank for name in self._files.names() if (rank := rank_of(name)) is not None]
        self._segments, self._seen[len(self._seen) :] = opened(self._files, ranks, known)
        self._vanished()
        self._table = None
        for each in self._segments:
            if isinstance(each.table, Unsealed) and each.table.torn:
                self.notes.append(
                    f"{each.table.name} ends in {each.table.torn} bytes of a frame that is being written, or was torn"
                )
        if isinstance(self._files, RemoteFolder) and self._files.sends_whole:
            self.notes.append("the server sends whole files where stretches are asked for, which takes its time")

    # What there is ------------------------------------------------------------------------------

    def records(self) -> Records:
        """Return what there is."""
        if self._table is None:
            claims = [each.name.claim for each in self._segments]
            self._table = Records([each.table.load(_OPEN) for each in self._segments], claims)
        return self._table

    def kept(self, places: Array) -> Iterator[Kept]:
        """Yield what is kept of each record."""
        for number, rows, _ in self.records().by_part(places):
            table = self._segments[number].table.load(_TENSOR)
            has = (table.array("has")[rows] & Has.TENSOR).tolist()
            columns = [table.array(name)[rows].tolist() for name in _KEPT]
            for there, dtype, shape, length in zip(has, *columns, strict=True):
                yield (table.dtypes[dtype], table.shapes[shape], length) if there else NOTHING

    def summary(self, at: int) -> Summary | None:
        """Return the statistics that were stored with a record."""
        each, row = self._at(at)
        has = int(each.table.array("has")[row])
        if not has & Has.SUMMARY:
            return None
        channels = ("channels", "channels_start", "channels_size") if has & Has.CHANNELS else ()
        return self._read(at, "summary", each.table.load((*_STORED, *channels)).summary)

    def note(self, at: int) -> dict[str, Any]:
        """Return what the recorder noted beside a record."""
        each, row = self._at(at)
        if not int(each.table.array("has")[row]) & Has.NOTE:
            return {}
        return self._read(at, "note", each.table.load(("note", "note_start", "note_size")).note)

    def _read(self, at: int, what: str, read: Callable[[int], T]) -> T:
        each, row = self._at(at)
        self._check(each, row)
        try:
            return read(row)
        except (ValueError, LookupError, RecursionError) as error:
            raise self._damage(at, f"its {what} does not read back ({error})") from error

    def statistics(self, places: Array) -> StoredStatistics:
        """Return the stored statistics of records as columns."""
        groups = self.records().by_part(places)
        return StoredStatistics([(self._segments[n].table, rows, where) for n, rows, where in groups], len(places))

    def _at(self, at: int) -> tuple[_Segment, int]:
        number, row = self.records().part(at)
        return self._segments[number], row

    def _check(self, each: _Segment, row: int) -> None:
        """Refuse a row of which a column turned out damaged after the run was opened."""
        if row in each.table.bad:
            raise Damaged(f"record {row} of {each.table.name} in {self.address} is not what was written (checksum)")

    # Manifests ----------------------------------------------------------------------------------

    def _read_manifests(self) -> Manifest:
        root = self._or_note(NAME, _manifest_or_damage(self._files, NAME))
        ranks = [rank for name in self._files.names() if (rank := rank_of(name)) is not None]
        others = [rank for rank in ranks if rank != 0]
        names = [f"{rank_folder(rank)}/{NAME}" for rank in others]
        read = each_of(self._files, lambda name: _manifest_or_damage(self._files, name), names)
        found = zip(others, names, read, strict=True)
        own = {rank: self._or_note(name, manifest) for rank, name, manifest in found}
        if 0 in ranks or not ranks:
            own[0] = root
        self._own = own
        parts = [m.completeness if m is not None else Completeness(state="unknown") for m in own.values()]
        first = root or next((m for m in own.values() if m is not None), None) or Manifest(started="")
        return replace(first, completeness=Completeness.of_ranks(parts))

    def _or_note(self, name: str, manifest: Manifest | Damaged | None) -> Manifest | None:
        if isinstance(manifest, Damaged):
            self.notes.append(f"{name} cannot be read ({manifest}); the records are read from the segments")
            self._seen.append(Damage(name, str(manifest)))
            return None
        if manifest is None:
            self.notes.append(f"{name} is not there; the records are read from the segments")
        return manifest

    # Damage -------------------------------------------------------------------------------------

    @property
    def damaged(self) -> list[Damage]:
        """What was written and cannot be read, as far as that shows without reading every tensor."""
        if not self._looked:
            each_of(self._files, lambda each: each.table.look_through(), self._segments)
            self._looked = True
        tables = [
            Damage(each.table.name, reason if row is None else f"record {row}: {reason}")
            for each in self._segments
            for reason, row in each.table.damage
        ]
        return [*self._seen, *tables, *self._short(), *self._harmed.values()]

    def _vanished(self) -> None:
        """Notice what `run.json` speaks of and is not there: segments, and whole ranks of a run that has ended."""
        there = {(each.folder, stem) for each in self._segments for stem in (each.name.stem, *each.merged)}
        seen = {damage.file for damage in self._seen}
        for rank, manifest in self._own.items():
            for name, (records, *_) in ({} if manifest is None else manifest.segments).items():
                file = f"{rank_folder(rank)}/{name}{SEALED}"
                if (rank, name) not in there and file not in seen:
                    self._seen.append(Damage(file, f"it is not there, and held {records} records"))
        wanted = self.manifest.ranks or 1
        if self.manifest.completeness.state != "recording" and len(self._own) < wanted and wanted > 1:
            gone = sorted(set(range(wanted)) - set(self._own))
            named = ", ".join(map(rank_folder, gone[:8])) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
            self._seen.append(Damage(NAME, f"{wanted} ranks recorded, and {named} is not there"))
        self._count_records()
        for file in dict.fromkeys(damage.file for damage in self._seen if damage.file.endswith(SEALED)):
            self.notes.append(f"{file} is gone, or cannot be read")

    def _count_records(self) -> None:
        """Notice records that are gone without a trace: a journal that was removed, or cut between two frames."""
        for rank, manifest in self._own.items():
            if manifest is None or manifest.completeness.state == "recording":
                continue
            there = sum(each.table.rows for each in self._segments if each.folder == rank)
            said = manifest.completeness.records
            if there < said and not any(d.file.startswith(rank_folder(rank)) for d in self._seen):
                self._seen.append(Damage(rank_folder(rank), f"{NAME} speaks of {said} records, and {there} are there"))

    def _short(self) -> Iterator[Damage]:
        """Name the tensors of which the file is too short, or the dtype unknown."""
        for each in self._segments:
            columns = each.table.load(_TENSOR)
            has = each.table.array("has")
            tensors = (has & Has.TENSOR) != 0
            tensors[list(each.table.bad)] = False
            if not each.table.rows or not tensors.any():
                continue
            name, size = self._file(each)
            a = columns.arrays
            ends = a["offset"].astype(np.int64) + a["length"].astype(np.int64)
            for row in np.flatnonzero(tensors & (ends > size) & (a["length"] > 0)):
                end = int(ends[row])
                why = "it is not there" if size < 0 else f"it ends at byte {size}, before the record does ({end})"
                yield self._named(each, int(row), name, why)
            strange = [code for code, dtype in enumerate(columns.dtypes) if dtype not in STORED]
            for row in np.flatnonzero(tensors & np.isin(a["dtype"], strange)) if strange else ():
                yield self._named(
                    each, int(row), name, f"this version knows no dtype {columns.dtypes[int(a['dtype'][row])]!r}"
                )

    def _named(self, each: _Segment, row: int, file: str, reason: str) -> Damage:
        point, moment = each.table.points[int(each.table.array("point")[row])], _moment(each.table, row)
        return Damage(file, reason, point, str(moment))

    def _file(self, each: _Segment) -> tuple[str, int]:
        """Return the file that holds a segment's tensors and its size, -1 when there is none."""
        # The writer may seal between two attempts.
        for name in (each.stem + SEALED, each.stem + PARTIAL, each.stem + SEALED):
            with contextlib.suppress(FileNotFoundError):
                return name, self._files.size(name)
        return each.stem + SEALED, -1

    def _damage(self, at: int, reason: str) -> Damaged:
        """Return the error for a record that cannot be read, and remember it."""
        each, row = self._at(at)
        file, records = self._file(each)[0], self.records()
        self._harmed[each.folder, at] = self._named(each, row, file, reason)
        return Damaged(f"{records.text(at)} at {records.moment(at)} in {self.address}/{file}: {reason}")

    # Tensors ------------------------------------------------------------------------------------

    def _placed(self, at: int) -> _Place:
        each, row = self._at(at)
        table = each.table.load(_TENSOR)
        self._check(each, row)
        a = table.arrays
        dtype, shape = table.dtypes[int(a["dtype"][row])], table.shapes[int(a["shape"][row])]
        place = _Place(each, row, dtype, shape, *(int(a[name][row]) for name in ("offset", "length", "crc32c")))
        if nbytes(dtype, shape) != place.length:
            raise self._damage(at, f"{place.length} bytes are not a {dtype} tensor of shape {list(shape)}")
        return place

    def tensor(self, at: int, rows: range | None) -> torch.Tensor:
        """Return a record's tensor, or rows of it, checked against its checksum."""
        place = self._placed(at)
        if rows is None:
            return _as_tensor(self._bytes(at, place, 0, place.length, verify=True), place.dtype, place.shape)
        key = (place.segment.stem, place.offset)
        if key not in self._verified:
            self._bytes(at, place, 0, place.length, verify=True)
            self._verified.add(key)
        each = place.length // place.shape[0] if place.shape[0] else 0
        first, last = (rows.start, max(rows.start, rows.stop)) if len(rows) else (0, 0)
        flat = self._bytes(at, place, first * each, (last - first) * each, verify=False)
        return _as_tensor(flat, place.dtype, (last - first, *place.shape[1:]))[:: rows.step]

    def pieces(self, at: int, items: int) -> Iterator[torch.Tensor]:
        """Read stretch by stretch, into memory that is used again as soon as no piece of it is held.

        Not through a mapping, whose pages would count as this process's until the last one is read.
        """
        import torch

        place = self._placed(at)
        size, check = items * stored(place.dtype).itemsize, 0
        buffers = _Buffers(min(size, place.length))
        with self._filling(at, place) as fill:
            for start in range(0, place.length, size):
                data = buffers.free()[: place.length - start]
                fill(data, start)
                check = crc32c(data, check)
                piece = _as_tensor(torch.from_numpy(data), place.dtype, (data.size // stored(place.dtype).itemsize,))
                del data
                yield piece
                del piece
        if check != place.crc32c:
            raise self._damage(at, "its bytes are not what was written (checksum)")

    def _bytes(self, at: int, place: _Place, offset: int, length: int, *, verify: bool) -> torch.Tensor:
        """Return a stretch of a record as a torch tensor of bytes."""
        import torch

        begin = place.offset + offset
        storage: Any = self._mapped(at, place, begin + length) if length else None
        if storage is not None:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (length,), (1,))
        else:
            with self._filling(at, place) as fill:
                flat = torch.empty(length, dtype=torch.uint8)
                fill(flat.numpy(), offset)
        if verify and crc32c(flat.numpy()) != place.crc32c:
            raise self._damage(at, "its bytes are not what was written (checksum)")
        return flat

    def _mapped(self, at: int, place: _Place, end: int) -> Any:
        """Map a sealed local segment that holds a large record, up to `end`; None where it is read instead.

        Each tensor has a private mapping of its own: what the caller writes into it is seen nowhere else, and no
        file stays open however many are alive. A file that is still being written, or that others may cut, is
        never mapped: to cut it under a reader would be a SIGBUS.
        """
        import torch

        if place.length < _MAPPED_FROM or not isinstance(self._files, LocalFolder) or not _is_unicode(self.address):
            return None
        # RuntimeError: so many are alive that the system gives no other.
        with (
            contextlib.suppress(FileNotFoundError, RuntimeError),
            self._files.opened(place.segment.stem + SEALED) as fd,
        ):
            found = os.fstat(fd)
            self._check_end(at, place, found.st_size)
            if not others_may_cut(found):
                return torch.UntypedStorage.from_file(f"{self.address}/{place.segment.stem}{SEALED}", False, end)
        return None

    def _check_end(self, at: int, place: _Place, size: int) -> None:
        """Refuse an offset outside the file before anything is allocated for it."""
        if place.offset < ROOM or place.offset + place.length > size:
            where = f"bytes {place.offset} to {place.offset + place.length}"
            raise self._damage(at, f"{where} are not inside {place.segment.stem}, which has {size}")

    @contextlib.contextmanager
    def _filling(self, at: int, place: _Place) -> Iterator[Callable[[Bytes, int], None]]:
        """Open a record's segment once, and yield what fills a buffer from a place in the record."""
        with contextlib.ExitStack() as stack:
            # The writer may seal between two looks.
            for name in (place.segment.stem + SEALED, place.segment.stem + PARTIAL, place.segment.stem + SEALED):
                with contextlib.suppress(FileNotFoundError):
                    file = stack.enter_context(self._files.reading(name))
                    break
            else:
                raise self._damage(at, f"there is neither {name} nor {place.segment.stem}{PARTIAL}")
            self._check_end(at, place, file.size)

            def fill(buffer: Bytes, offset: int) -> None:
                if file.fill(buffer, place.offset + offset) != buffer.size:
                    raise self._damage(at, f"{name} ends before its bytes do")

            yield fill


def read_manifest(files: Folder, name: str) -> Manifest | None:
    """Read `run.json`; None where there is none."""
    try:
        if files.size(name) > _LARGEST_MANIFEST:
            raise Damaged(f"it has {files.size(name)} bytes")
        return Manifest.loads(files.read(name))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def opened(
    files: Folder, ranks: Sequence[int], known: Mapping[str, Sealed | Unsealed] | None = None
) -> tuple[list[_Segment], list[Damage]]:
    """Open the segments of some ranks, and name those that do not open; `known` are open already.

    What was listed may be gone: merged elsewhere, or an empty journal whose writer closed. Then it is listed again.
    """
    for _ in range(3):
        listed = [(rank, name) for rank in ranks for name in _segment_names(files, rank)]
        tables = each_of(files, lambda each: _open(files, _stem(*each), (known or {}).get(_stem(*each))), listed)
        lost = [table for table in tables if isinstance(table, Damage)]
        if not any(damage.file.endswith(JOURNAL) for damage in lost):
            break
        files.forget()
    found = [
        _Segment(*where, table) for where, table in zip(listed, tables, strict=True) if not isinstance(table, Damage)
    ]
    merged = {(each.folder, stem) for each in found for stem in each.merged}
    return [each for each in found if (each.folder, each.name.stem) not in merged], lost


def said_of(segments: Sequence[_Segment]) -> dict[str, list[int]]:
    """Return what a manifest says of sealed segments: their records and bytes."""
    sealed = [(each.name.stem, each.table) for each in segments if isinstance(each.table, Sealed)]
    return {stem: [table.rows, table.size] for stem, table in sealed}


def _segment_names(files: Folder, rank: int) -> list[SegmentName]:
    found = {each.stem: each for name in files.names(rank_folder(rank)) if (each := segment_of(name)) is not None}
    return sorted(found.values(), key=lambda each: (each.claim, each.number, each.last))


def _stem(rank: int, name: SegmentName) -> str:
    return f"{rank_folder(rank)}/{name.stem}"


def _open(files: Folder, stem: str, known: Sealed | Unsealed | None) -> Sealed | Unsealed | Damage:
    """Open a segment: sealed, or by its journal, which is read on where it was read before.

    The writer may seal it between two looks.
    """
    if isinstance(known, Sealed):
        return known
    for _ in range(3):
        sealed: Sealed | None = None
        problem: Damaged | None = None
        with contextlib.suppress(FileNotFoundError):
            try:
                sealed = Sealed(files, f"{stem}{SEALED}")
                sealed.load(_OPEN)
            except Damaged as error:
                problem = error
        if sealed is not None and problem is None and not sealed.damage:
            return sealed
        with contextlib.suppress(FileNotFoundError):
            try:
                if known is None:
                    return Unsealed(files, stem)
                known.refresh()
                return known
            except Damaged as error:
                return sealed or Damage(f"{stem}{JOURNAL}", str(error))
        if problem is not None:
            return Damage(f"{stem}{SEALED}", str(problem))
        if sealed is not None:
            return sealed
    return Damage(f"{stem}{JOURNAL}", f"it is not there, {NOTHING_ELSE}")


def each_of(files: Folder, function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Call a function for each item; elsewhere, where each is a request, many at a time."""
    if isinstance(files, LocalFolder) or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
        return list(pool.map(function, items))


def _manifest_or_damage(files: Folder, name: str) -> Manifest | Damaged | None:
    try:
        return read_manifest(files, name)
    except Damaged as error:
        return error


def _moment(table: Sealed | Unsealed, row: int) -> Moment:
    epoch, *others = (int(table.array(name)[row]) for name in WHEN)
    return Moment(epoch if int(table.array("has")[row]) & Has.EPOCH else None, *others)


def _is_unicode(path: str) -> bool:
    """Tell whether torch takes a path: in a C locale Python's has bytes in it that are no text."""
    return not any("\ud800" <= letter <= "\udfff" for letter in path)


class _Buffers:
    """Buffers of one size, given out again when the last array or tensor over one of them is gone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._all: list[Bytes] = [np.empty(size, np.uint8)]
        self._unused = self._references(0)

    def free(self) -> Bytes:
        for number in range(len(self._all)):
            if self._references(number) == self._unused:
                return self._all[number]
        self._all.append(np.empty(self._size, np.uint8))
        return self._all[-1]

    def _references(self, number: int) -> int:
        return sys.getrefcount(self._all[number])


def _as_tensor(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View bytes as a tensor; where they begin at an odd address for the dtype, copy them to a good one first."""
    import torch

    if flat.data_ptr() % stored(dtype).itemsize or flat.storage_offset() % stored(dtype).itemsize:
        flat = flat.clone()
    if dtype != "complex32":
        return flat.view(getattr(torch, dtype)).view(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        return flat.view(torch.complex32).view(shape)
