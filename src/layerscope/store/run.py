"""Open a run and read it: lazily, without a copy where that is possible, and never bytes that were not written.

    run = open_run("runs/fp32")
    run.tensor("model.layers.3", step=0)

Readers take no lock and write nothing into the run. A run that is being written shows what was acknowledged when it
was opened, or last refreshed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from layerscope.errors import Damaged, NotARun
from layerscope.store.address import (
    PARTIAL,
    SEALED,
    Address,
    Folder,
    LocalFolder,
    folder,
    is_journal,
    rank_folder,
    rank_of,
    segment,
)
from layerscope.store.checksum import Bytes, bytes_of, crc32c
from layerscope.store.dtypes import STORED, nbytes, stored
from layerscope.store.index import Index, Row, cached
from layerscope.store.journal import lines, rest_of
from layerscope.store.layouts import LAYOUTS, Place, recognised
from layerscope.store.manifest import NAME, Completeness, Manifest
from layerscope.store.reader import Reader, T
from layerscope.store.recovery import Damage
from layerscope.store.segment import ROOM, Placed

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

__all__ = ["Run", "open_run"]

# A manifest of a hundred thousand modules takes about 10 MB.
_LARGEST_MANIFEST = 256 << 20


def open_run(address: Address, *, mode: str | None = None) -> Reader:
    """Open a run, or a dump in another layout, by path, `file://` or any fsspec address.

    An address may end in `:MODE` where that is not part of its name: `layer_outputs:2-1`. Raises NotARun with what was
    found there instead, or with the modes there are; Ambiguous when there are several and none was asked for.
    """
    place = _place(address, mode)
    reader: Reader | None = native(place.files) if place.file is None else None
    if reader is None:
        reader = recognised(place)
    if reader is None:
        raise NotARun(
            f"{place.address} is not a run: {place.found()}. A run is a folder with {NAME} and rank-00000/journal in "
            f"it, or a dump in a layout of {', '.join(name.replace('_', '-') for name in LAYOUTS)}"
        )
    if place.mode not in (None, reader.manifest.mode):
        known = reader.manifest.mode
        there = f"that is mode {known}" if known is not None else f"a {reader.layout} run that names no mode"
        raise NotARun(f"{place.address} has no mode {place.mode!r}: {there}")
    return reader


def _place(address: Address, mode: str | None) -> Place:
    """Tell a mode behind a colon from a name that has one: what exists under its whole name is meant so."""
    files = folder(address)
    before, colon, asked = os.fspath(address).rpartition(":")
    if colon and before and asked and "/" not in asked and not _exists(files) and _exists(folder(before)):
        if mode not in (None, asked):
            raise NotARun(f"{address} asks for mode {asked!r}, and mode={mode!r} for another; ask for one of them")
        files, mode = folder(before), asked
    if isinstance(files, LocalFolder):
        if files.path.is_file():
            return Place(LocalFolder(files.path.parent), files.path.name, mode)
    elif files.names() == [files.address.rpartition("/")[2]]:  # fsspec lists a file as itself
        above, _, name = files.address.rpartition("/")
        return Place(folder(above), name, mode)
    return Place(files, None, mode)


def _exists(files: Folder) -> bool:
    return files.path.exists() if isinstance(files, LocalFolder) else bool(files.names())


def native(files: Folder) -> Run | None:
    """Recognise a run in layerscope's own layout."""
    names = files.names()
    ranks = [rank for name in names if (rank := rank_of(name)) is not None]
    has_journal = any(is_journal(name) for rank in ranks for name in files.names(rank_folder(rank)))
    try:
        manifest = _read_manifest(files, NAME)
    except Damaged:
        return Run(files) if has_journal else None
    return Run(files) if manifest is not None or has_journal else None


@final
class Run(Reader):
    """What one execution left on disk.

    `notes` says in sentences what was odd when it was opened: a manifest that does not read, a torn last line, a
    segment that is gone. `damaged` lists what was written and cannot be read, `replaced` counts the records that gave
    way to a later one of the same point and moment.
    """

    def __init__(self, files: Folder) -> None:
        super().__init__()
        self.address = files.address
        self._files = files
        self._table: Index | None = None
        self._verified: set[tuple[int, int, int]] = set()
        self._unread: list[Damage] = []  # manifests
        self._harmed: dict[tuple[int, int], Damage] = {}  # records that turned out damaged when they were read
        self._journal_part = lru_cache(maxsize=8)(files.read)
        self.refresh()

    def __repr__(self) -> str:
        return f"Run({self.address!r}, {len(self)} records, {self.state})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_run, (self.address,)  # a run travels by its address

    @property
    def manifest(self) -> Manifest:
        """What the run says about itself; the completeness is that of all ranks together."""
        return self._manifest

    @property
    def replaced(self) -> int:
        """How many records gave way to a later one of the same point and moment."""
        return int(self._ask(lambda index: index.replaced))

    @property
    def state(self) -> str:
        """How the recording ended; `damaged` when it ended in order and something of it cannot be read."""
        ended = super().state
        return "damaged" if ended == "complete" and self.damaged else ended

    @property
    def damaged(self) -> list[Damage]:
        """What was written and cannot be read, as far as that shows without reading every tensor.

        Manifests and journal lines that do not read (each line may have been a record), records whose segment is
        gone or too short, and those whose checksum failed when they were read here. `recover` checks every byte.
        """
        lines = [Damage(name, f"byte {at}: {why}") for name, at, why in self._ask(lambda index: index.damage)]
        return [*self._unread, *lines, *self._vanished(len(lines)), *self._harm().values()]

    @property
    def complete(self) -> bool:
        """Whether the recording ended in order, holds everything that was asked for, and reads."""
        return super().complete and not self.damaged

    def refresh(self) -> None:
        """See what has been written since the run was opened."""
        self._mind_forks()
        with self._lock:
            self.notes, self._unread, self._harmed = [], [], {}
            self._manifest = self._read_manifests()
            if self._table is not None and not _caught_up(self._table, self._files):
                self._rebuilt()
            for name, end in self._index().consumed.items():
                left = self._files.size(name) - end
                if left > 0:
                    self.notes.append(f"{name} ends in {left} bytes of a line that is being written, or was torn")
            files = dict.fromkeys(damage.file for damage in self._harm().values())
            self.notes += [f"{name} is gone, too short, or cannot hold what its journal says" for name in files]

    def close(self) -> None:
        """Close the index; tensors that were read stay valid."""
        with self._lock:
            if self._table is not None:
                self._table.close()
                self._table = None

    # Manifests ----------------------------------------------------------------------------------

    def _read_manifests(self) -> Manifest:
        root = self._manifest_or_note(NAME)
        ranks = [rank for name in self._files.names() if (rank := rank_of(name)) is not None]
        own = {rank: self._manifest_or_note(f"{rank_folder(rank)}/{NAME}") for rank in ranks if rank != 0}
        if 0 in ranks or not ranks:
            own[0] = root
        parts = [m.completeness if m is not None else Completeness(state="unknown") for m in own.values()]
        first = root or next((m for m in own.values() if m is not None), None) or Manifest(started="")
        return replace(first, completeness=Completeness.of_ranks(parts))

    def _manifest_or_note(self, name: str) -> Manifest | None:
        try:
            manifest = _read_manifest(self._files, name)
        except Damaged as error:
            self.notes.append(f"{name} cannot be read ({error}); the records are read from the journals")
            self._unread.append(Damage(name, str(error)))
            return None
        if manifest is None:
            self.notes.append(f"{name} is not there; the records are read from the journals")
        return manifest

    # Damage -------------------------------------------------------------------------------------

    def _vanished(self, damaged_lines: int) -> list[Damage]:
        """Notice lines that are gone without a trace: a journal that was removed, or cut between two lines."""
        said = self._manifest.completeness.records
        there = self._ask(lambda index: index.written)
        if there + damaged_lines >= said:
            return []
        return [Damage("journal", f"{NAME} speaks of {said} records, and the journals hold {there}")]

    def _harm(self) -> dict[tuple[int, int], Damage]:
        """Return the damaged records by folder and number: what their files' sizes tell, and what reading them told."""
        segments, dtypes = self._ask(lambda index: (index.segments, index.dtypes))
        sizes = {(folder, number): self._segment(folder, number) for folder, number, _ in segments}
        short = {(folder, number) for folder, number, end in segments if sizes[folder, number][1] < end}
        strange = {dtype for dtype in dtypes if dtype not in STORED}
        found: dict[tuple[int, int], Damage] = {}
        for row in self._ask(lambda index: index.find()) if short or strange else ():
            facts, placed = row.facts, row.facts.placed
            if placed is None:
                continue
            name, size = sizes.get((row.folder, placed.segment), ("", -1))
            end = placed.offset + placed.length
            if (row.folder, placed.segment) in short and end > size:
                why = "it is not there" if size < 0 else f"it ends at byte {size}, before the record does ({end})"
            elif facts.dtype in strange:
                why = f"this version knows no dtype {facts.dtype!r}"
            else:
                continue
            found[row.folder, facts.record] = Damage(name, why, facts.point, str(facts.moment))
        return found | self._harmed

    def _segment(self, folder: int, number: int) -> tuple[str, int]:
        """Return the file of a segment and its size, -1 when there is none."""
        stem = f"{rank_folder(folder)}/{segment(number)}"
        # The writer may seal between two attempts.
        for name in (stem + SEALED, stem + PARTIAL, stem + SEALED):
            with contextlib.suppress(FileNotFoundError):
                return name, self._files.size(name)
        return stem + SEALED, -1

    def _damage(self, row: Row, reason: str, *, file: str | None = None) -> Damaged:
        """Return the error for a record that cannot be read, and remember it."""
        facts, placed = row.facts, row.facts.placed
        if file is None:
            file = row.journal if placed is None else self._segment(row.folder, placed.segment)[0]
        self._harmed[row.folder, facts.record] = Damage(file, reason, facts.point, str(facts.moment))
        return Damaged(f"{self._place(row)}: {reason}")

    # The index ----------------------------------------------------------------------------------

    def _index(self) -> Index:
        if self._table is None:
            path = cached(self._files)
            for attempt in (path, path, None) if path is not None else (None,):
                try:
                    self._table = Index(attempt)
                    break
                except sqlite3.Error:
                    _remove(path)
            assert self._table is not None
            if not _caught_up(self._table, self._files):
                self._rebuilt()
        return self._table

    def _forget_index(self) -> None:
        self._table = None

    def _rebuilt(self) -> Index:
        """Make the index anew, in memory: the file in the cache is damaged, locked or in the way."""
        if self._table is not None:
            _remove(self._table.path)
            self._table.close()
        self._table = Index()
        self._table.catch_up(self._files)
        return self._table

    def _ask(self, question: Callable[[Index], T]) -> T:
        self._mind_forks()
        with self._lock:
            try:
                return question(self._index())
            except sqlite3.Error:
                return question(self._rebuilt())

    # Records ------------------------------------------------------------------------------------

    def _line(self, row: Row) -> bytearray:
        """Return the journal line of a record, once it says what the index says."""
        if self._is_local:
            raw = self._files.read(row.journal, offset=row.at, length=row.size)
        else:
            raw = self._journal_part(row.journal)[row.at : row.at + row.size]
        found = next(lines(raw), None)
        if found is None or found.record != row.facts:
            reason = found.damage if found is not None and found.damage else "it is another line now"
            raise self._damage(row, f"its line in {row.journal} cannot be read: {reason}", file=row.journal)
        return raw

    def _nbytes(self, row: Row) -> int:
        return 0 if row.facts.placed is None else row.facts.placed.length

    def _rest(self, row: Row) -> tuple[Summary | None, dict[str, Any]]:
        value, note = rest_of(self._line(row))
        if value is None:
            return None, note
        from layerscope.stats import Summary

        try:
            return Summary.from_json(value), note
        except (KeyError, TypeError, ValueError) as error:
            raise self._damage(row, f"its summary does not read back ({error})", file=row.journal) from error

    def _placed(self, row: Row) -> tuple[Placed, str, tuple[int, ...]]:
        """Return where a tensor's bytes are, and as what they are read."""
        facts = row.facts
        placed, dtype, shape = facts.placed, facts.dtype, facts.shape
        if placed is None or dtype is None or shape is None:
            raise self._damage(row, "its line names no bytes", file=row.journal)
        if nbytes(dtype, shape) != placed.length:
            raise self._damage(
                row, f"{placed.length} bytes are not a {dtype} tensor of shape {list(shape)}", file=row.journal
            )
        return placed, dtype, shape

    def _pieces(self, row: Row, items: int) -> Iterator[torch.Tensor]:
        """Read stretch by stretch, into memory that is used again as soon as nobody holds a piece in it.

        Not through a mapping, whose pages would count as this process's until the last one is read.
        """
        import torch

        placed, dtype, _ = self._placed(row)
        size, check = items * stored(dtype).itemsize, 0
        buffers = _Buffers(min(size, placed.length))
        with self._opened(row, placed) as read:
            for start in range(0, placed.length, size):
                data = buffers.free()[: placed.length - start]
                if read(data, placed.offset + start) != data.size:
                    raise self._damage(row, f"{self._file(row)} ends before its bytes do")
                check = crc32c(data, check)
                piece = _as_tensor(torch.from_numpy(data), dtype, (data.size // stored(dtype).itemsize,))
                del data
                yield piece
                del piece
        if check != placed.crc32c:
            raise self._damage(row, f"the bytes in {self._file(row)} are not what was written (checksum)")

    def _tensor(self, row: Row, rows: range | None) -> torch.Tensor:
        placed, dtype, shape = self._placed(row)
        mapped = self._mapped_file(row, placed)
        if rows is None:
            flat = self._bytes(row, placed, mapped)
            return _as_tensor(flat, dtype, shape)
        key = (row.folder, placed.segment, placed.offset)
        if key not in self._verified:
            self._bytes(row, placed, mapped)
            self._verified.add(key)
        each = placed.length // shape[0] if shape[0] else 0
        first, last = (rows.start, max(rows.start, rows.stop)) if len(rows) else (0, 0)
        part = Placed(placed.segment, placed.offset + first * each, (last - first) * each, -1)
        flat = self._bytes(row, part, mapped, verify=False)
        return _as_tensor(flat, dtype, (last - first, *shape[1:]))[:: rows.step]

    def _bytes(self, row: Row, placed: Placed, mapped: str | None, *, verify: bool = True) -> torch.Tensor:
        """Return a stretch of a segment as a torch tensor of bytes, checked against its checksum."""
        import torch

        end = placed.offset + placed.length
        if not placed.length:
            flat = torch.empty(0, dtype=torch.uint8)
        elif mapped is not None:
            # A private mapping of its own for each tensor: what the caller writes into it nobody else sees, and no
            # file stays open however many are alive.
            storage: Any = torch.UntypedStorage.from_file(mapped, False, end)
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, placed.offset, (placed.length,), (1,))
        else:
            flat = torch.frombuffer(self._read(row, placed), dtype=torch.uint8)
        if verify and crc32c(flat.numpy()) != placed.crc32c:
            raise self._damage(row, f"the bytes in {self._file(row)} are not what was written (checksum)")
        return flat

    def _mapped_file(self, row: Row, placed: Placed) -> str | None:
        """Return the sealed local segment that holds a record; None when it must be read: not sealed, not local.

        A file that is still being written is never mapped: cutting it under a reader would be a SIGBUS.
        """
        if not isinstance(self._files, LocalFolder):
            return None
        path = f"{self.address}/{self._stem(row)}{SEALED}"
        try:
            size = os.stat(path).st_size  # noqa: PTH116  (five times a Path's price, and every read pays it)
        except FileNotFoundError:
            return None
        self._check_end(row, placed, size)
        return path

    def _read(self, row: Row, placed: Placed) -> bytearray:
        stem = self._stem(row)
        # The writer may seal between two attempts.
        for name in (stem + SEALED, stem + PARTIAL, stem + SEALED):
            with contextlib.suppress(FileNotFoundError):
                self._check_end(row, placed, self._files.size(name))
                data = self._files.read(name, offset=placed.offset, length=placed.length)
                if len(data) == placed.length:
                    return data
                raise self._damage(row, f"{name} ends before its bytes do")
        raise self._damage(row, f"there is neither {stem}{SEALED} nor {stem}{PARTIAL}")

    @contextlib.contextmanager
    def _opened(self, row: Row, placed: Placed) -> Iterator[Callable[[Bytes, int], int]]:
        """Open a record's segment once, and yield what fills a buffer from a place in it and says how far."""
        name, fd = self._source(row, placed)

        def fetch(buffer: Bytes, offset: int) -> int:
            data = self._files.read(name, offset=offset, length=buffer.size)
            buffer[: len(data)] = bytes_of(data)
            return len(data)

        def fill(buffer: Bytes, offset: int) -> int:
            done = 0
            while done < buffer.size and (got := os.preadv(fd, [buffer[done:].data], offset + done)):
                done += got
            return done

        try:
            yield fetch if fd < 0 else fill
        finally:
            if fd >= 0:
                os.close(fd)

    def _source(self, row: Row, placed: Placed) -> tuple[str, int]:
        """Return the segment that holds a record, sealed or not yet, and its open file (-1 where it is not local)."""
        stem = self._stem(row)
        # The writer may seal between two attempts.
        for name in (stem + SEALED, stem + PARTIAL, stem + SEALED):
            with contextlib.suppress(FileNotFoundError):
                self._check_end(row, placed, self._files.size(name))
                local = isinstance(self._files, LocalFolder)
                return name, os.open(f"{self.address}/{name}", os.O_RDONLY) if local else -1
        raise self._damage(row, f"there is neither {stem}{SEALED} nor {stem}{PARTIAL}")

    def _check_end(self, row: Row, placed: Placed, size: int) -> None:
        """Refuse an offset outside the file before anything is allocated for it."""
        if placed.offset < ROOM or placed.offset + placed.length > size:
            raise self._damage(
                row,
                f"bytes {placed.offset} to {placed.offset + placed.length} "
                f"are not inside {self._file(row)}, which has {size}",
            )

    @property
    def _is_local(self) -> bool:
        return isinstance(self._files, LocalFolder)

    def _stem(self, row: Row) -> str:
        number = -1 if row.facts.placed is None else row.facts.placed.segment
        return f"{rank_folder(row.folder)}/{segment(number)}"

    def _file(self, row: Row) -> str:
        return f"{self.address}/{self._stem(row)}"

    def _place(self, row: Row) -> str:
        return f"{row.facts.point} at {row.facts.moment} in {self.address}"


def _read_manifest(files: Folder, name: str) -> Manifest | None:
    try:
        if files.size(name) > _LARGEST_MANIFEST:
            raise Damaged(f"it has {files.size(name)} bytes")
        return Manifest.loads(files.read(name))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def _caught_up(index: Index, files: Folder) -> bool:
    try:
        index.catch_up(files)
    except sqlite3.Error:
        return False
    return True


def _remove(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


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
