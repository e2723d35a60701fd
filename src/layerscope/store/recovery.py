"""Seal what a kill left behind.

    recovery = recover("runs/fp32")       # Recovery(sealed=1, records=37, lost=[])

The journal says what each `.partial` holds; every checksum is verified before the header is written, and those of
the segments that were sealed already are verified too. Running it again, or after it was itself killed, changes
nothing that was right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from layerscope.errors import Damaged, LayerscopeError, NotARun, Unsupported
from layerscope.store.address import (
    PARTIAL,
    SEALED,
    Address,
    LocalFolder,
    folder,
    is_journal,
    journal_order,
    rank_folder,
    rank_of,
    segment,
    segment_of,
)
from layerscope.store.appender import JOURNAL
from layerscope.store.checksum import crc32c
from layerscope.store.dtypes import nbytes
from layerscope.store.journal import Journal, Record, walk
from layerscope.store.manifest import NAME, Completeness, Manifest
from layerscope.store.segment import ROOM, entry, gap, seal

__all__ = ["Damage", "Leftovers", "Progress", "Recovery", "recover", "seal_leftovers"]

Progress = Callable[[str, int, int], None]

_PIECE = 4 << 20


class Damage(NamedTuple):
    """Something that was written and cannot be read: in which file, what, and of which record if that is known.

    A kill in the middle of a line loses what was never `acknowledged`; everything else should not have happened.
    """

    file: str
    reason: str
    point: str = ""
    moment: str = ""
    acknowledged: bool = True


class Recovery(NamedTuple):
    """What `recover` did: segments sealed, records in them, and what is lost or damaged anywhere in the run.

    `verified` counts the tensors whose bytes are what was written, in the segments that were sealed before as well.
    """

    sealed: int
    records: int
    lost: list[Damage]
    verified: int = 0


class Leftovers(NamedTuple):
    """What a rank's folder holds after its partial segments were sealed, and where a writer goes on."""

    sealed: int
    verified: int
    lost: list[Damage]
    lines: int
    next_record: int
    next_segment: int
    next_step: int
    verified_before: int = 0


def recover(address: Address, *, progress: Progress | None = None) -> Recovery:
    """Seal every partial segment of a run whose writer is gone, and verify every record's bytes.

    Raises RunBusy when the writer is not gone, OSError when it cannot be done. A record that is damaged in a sealed
    segment is named in `lost`, and the segment is left as it is.
    `progress` is called with a segment's name, records verified and records to verify.
    """
    files = folder(address)
    if not isinstance(files, LocalFolder):
        raise Unsupported(
            f"{files.address} has nothing to recover: a run that is not on this machine's disk is put there in sealed "
            "pieces. What a killed writer had not yet put is in its spool, a layerscope-spool-* folder among the "
            "temporary files of its machine."
        )
    ranks = [rank for name in files.names() if (rank := rank_of(name)) is not None]
    if not ranks:
        raise NotARun(f"{files.address} is not a run: {files.found()}; a run has folders rank-00000, rank-00001, ...")
    manifest = _manifest(files, NAME)
    told = progress or (lambda name, done, total: None)
    sealed = verified = whole = 0
    lost: list[Damage] = []
    trouble: list[OSError] = []
    for rank in ranks:
        path = files.path / rank_folder(rank)
        if not (path / JOURNAL).exists():
            good, bad = _verify_parts(files, rank, told)
            whole += good
            lost += bad
            continue
        journal = Journal(path / JOURNAL)
        try:
            left = seal_leftovers(journal, rank=rank, verify=True, progress=told)
            name = NAME if rank == 0 else f"{rank_folder(rank)}/{NAME}"
            own = manifest if rank == 0 else _manifest(files, name)
            lost += _vanished(own, f"{rank_folder(rank)}/{JOURNAL}", left)
            _settle(files, name, own, lines=left.lines)
        except OSError as error:  # one rank's trouble, a full disk for one, must not keep the others from being sealed
            trouble.append(error)
            continue
        finally:
            journal.close()
        sealed += left.sealed
        verified += left.verified
        whole += left.verified + left.verified_before
        lost += left.lost
    if trouble:
        raise trouble[0]
    return Recovery(sealed, verified, lost, whole)


def seal_leftovers(
    journal: Journal, *, rank: int, verify: bool = False, progress: Progress = lambda name, done, total: None
) -> Leftovers:
    """Seal the partial segments beside a journal that the caller has locked, and cut off the journal's torn end.

    With `verify` the records of the other segments are checked too, which reads everything.
    """
    path = journal.path.parent
    files = LocalFolder(path)
    present = [found for name in files.names() if (found := segment_of(name)) is not None]
    partial = _numbers(present, PARTIAL) - _numbers(present, SEALED)
    wanted: dict[int, list[Record]] = {number: [] for number in partial}
    others: dict[int, list[Record]] = {}
    lost: list[Damage] = []
    where = f"{path.name}/{JOURNAL}"
    count, next_record, next_segment, next_step = 0, 0, max((number for number, _ in present), default=-1) + 1, 0
    torn = None
    size = journal.size
    for line in walk(files, JOURNAL, whole=True):
        if line.damage and journal.torn and line.at + line.size == size:
            torn = line
        elif line.damage:
            lost.append(Damage(where, f"byte {line.at}: {line.damage}"))
        if line.record is None:
            continue
        count += 1
        next_record = max(next_record, line.record.record + 1)
        next_step = max(next_step, line.record.step + 1)
        if line.record.placed is not None:
            next_segment = max(next_segment, line.record.placed.segment + 1)
            number = line.record.placed.segment
            if number in partial:
                wanted[number].append(line.record)
            elif verify:
                others.setdefault(number, []).append(line.record)
    damaged = bool(lost)
    if torn is not None:
        never = f"byte {torn.at}: {torn.size} bytes of a last line that was never finished"
        lost.append(Damage(where, never, acknowledged=False))
        journal.cut(torn.at)
    elif journal.torn:
        journal.complete()
    sealed = verified = 0
    for number in sorted(partial):
        records = wanted[number]
        file = path / (segment(number) + PARTIAL)
        done, good, bad = _seal(file, records, rank=rank, keep_tail=damaged, progress=progress)
        sealed += done
        verified += good
        lost += bad
    before, bad = _verify(path, others, progress)
    lost += bad
    return Leftovers(sealed, verified, lost, count, next_record, next_segment, next_step, before)


def _seal(
    partial: Path, records: list[Record], *, rank: int, keep_tail: bool, progress: Progress
) -> tuple[bool, int, list[Damage]]:
    """Seal one segment with the records whose bytes are what was written.

    Returns whether there was something to seal, how many records are in it, and what became of the others.
    """
    where = f"{partial.parent.name}/{partial.name}"
    lost: list[Damage] = []
    entries: list[str] = []
    taken: set[int] = set()
    end = ROOM
    fd = os.open(partial, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        for done, record in enumerate(sorted(records, key=lambda r: (r.placed or (0, 0))[1])):
            progress(f"{partial.parent.name}/{partial.stem}", done, len(records))
            reason = "its record number is given twice" if record.record in taken else _wrong(fd, size, end, record)
            if reason or record.placed is None or record.dtype is None or record.shape is None:
                lost.append(Damage(where, str(reason), record.point, str(record.moment)))
                continue
            placed = record.placed
            if placed.offset > end:
                entries.append(gap(end, placed.offset - end))
            entries.append(entry(record.record, record.dtype, record.shape, offset=placed.offset, length=placed.length))
            taken.add(record.record)
            end = placed.offset + placed.length
        progress(f"{partial.parent.name}/{partial.stem}", len(records), len(records))
        # Bytes behind the last record: nobody was told that they are there, unless the line that told was damaged.
        if size > end and (keep_tail or lost):
            entries.append(gap(end, size - end))
            end = size
        if not entries:
            partial.unlink()
            return False, 0, lost
        os.ftruncate(fd, end)
        seal(fd, partial, entries, rank=rank)
    except ValueError as error:  # only a journal that no writer of ours wrote
        return False, 0, [*lost, Damage(where, str(error))]
    finally:
        os.close(fd)
    return True, len(taken), lost


def _verify(path: Path, segments: Mapping[int, list[Record]], progress: Progress) -> tuple[int, list[Damage]]:
    """Return how many records of a rank's sealed segments are what was written, and what is wrong with the others."""
    bad = [
        damage
        for number, records in sorted(segments.items())
        for damage in _damage(path / (segment(number) + SEALED), records, progress)
    ]
    return sum(map(len, segments.values())) - len(bad), bad


def _verify_parts(files: LocalFolder, rank: int, progress: Progress) -> tuple[int, list[Damage]]:
    """Verify a rank that has no journal of its own: one that was put elsewhere in parts, or has lost it."""
    under = rank_folder(rank)
    names = files.names(under)
    parts = sorted(filter(is_journal, names), key=journal_order)
    if not parts:
        held = sum(segment_of(name) is not None for name in names)
        reason = f"it is not there, and nothing else says what the segments hold ({held} are there)"
        return 0, [Damage(f"{under}/{JOURNAL}", reason)]
    lost: list[Damage] = []
    segments: dict[int, list[Record]] = {}
    for name in parts:
        for line in walk(files, f"{under}/{name}", whole=True):
            if line.damage:
                lost.append(Damage(f"{under}/{name}", f"byte {line.at}: {line.damage}"))
            if line.record is not None and line.record.placed is not None:
                segments.setdefault(line.record.placed.segment, []).append(line.record)
    verified, bad = _verify(files.path / under, segments, progress)
    return verified, lost + bad


def _vanished(manifest: Manifest | None, name: str, left: Leftovers) -> list[Damage]:
    """Notice lines that are gone without a trace: a journal that was cut between two of them."""
    said = 0 if manifest is None else manifest.completeness.records
    there = left.lines + sum(not damage.point for damage in left.lost)
    return [Damage(name, f"{NAME} speaks of {said} records, and it holds {left.lines}")] if there < said else []


def _damage(sealed: Path, records: list[Record], progress: Progress) -> list[Damage]:
    """Return what is wrong with the records of a sealed segment, which is only read."""
    where = f"{sealed.parent.name}/{sealed.name}"
    lost: list[Damage] = []
    try:
        fd = os.open(sealed, os.O_RDONLY)
    except FileNotFoundError:
        return [Damage(where, "it is not there", record.point, str(record.moment)) for record in records]
    try:
        size = os.fstat(fd).st_size
        for done, record in enumerate(records):
            progress(f"{sealed.parent.name}/{sealed.stem}", done, len(records))
            reason = _wrong(fd, size, ROOM, record)
            if reason:
                lost.append(Damage(where, reason, record.point, str(record.moment)))
        progress(f"{sealed.parent.name}/{sealed.stem}", len(records), len(records))
    finally:
        os.close(fd)
    return lost


def _wrong(fd: int, size: int, end: int, record: Record) -> str | None:
    placed = record.placed
    if placed is None or record.dtype is None or record.shape is None:
        return "it has no bytes"
    try:
        if nbytes(record.dtype, record.shape) != placed.length:
            return f"its {placed.length} bytes are not a {record.dtype} tensor of shape {list(record.shape)}"
    except LayerscopeError as error:
        return str(error)
    if placed.offset < end:
        return "its bytes overlap those of the record before"
    if placed.offset + placed.length > size:
        return f"the file ends at byte {size}, before its bytes do ({placed.offset + placed.length})"
    value = 0
    for at in range(placed.offset, placed.offset + placed.length, _PIECE):
        piece = os.pread(fd, min(_PIECE, placed.offset + placed.length - at), at)
        value = crc32c(piece, value)
    return None if value == placed.crc32c else "its checksum differs: the bytes are not what was written"


def _manifest(files: LocalFolder, name: str) -> Manifest | None:
    """Read a manifest; None where there is none that reads. Raises NewerFormat for a later format."""
    with contextlib.suppress(FileNotFoundError, Damaged):
        return Manifest.loads(files.read(name))
    return None


def _settle(files: LocalFolder, name: str, manifest: Manifest | None, *, lines: int) -> None:
    """Say in `run.json` that the run was recovered, unless its writer had the time to say how it ended."""
    path = files.path / name
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
    if manifest is None:
        if path.exists():  # what a person may still read is kept
            path.replace(path.with_name(path.name + ".damaged"))
        manifest = Manifest(started="", completeness=Completeness(state="unknown"))
    if manifest.completeness.state in ("recovered", "interrupted", "complete") and path.exists():
        return
    completeness = replace(manifest.completeness, state="recovered", records=lines)
    files.put(name, replace(manifest, completeness=completeness).dumps().encode())


def _numbers(found: Iterable[tuple[int, str]], suffix: str) -> set[int]:
    return {number for number, kind in found if kind == suffix}
