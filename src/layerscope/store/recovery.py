"""Seal what a kill left behind.

    recovery = recover("runs/fp32")       # Recovery(sealed=1, records=37, lost=[])

A journal says what the partial beside it holds; both become a sealed segment, and every tensor's bytes are verified,
those of the segments that were sealed already as well. Running it again, or after it was itself killed, changes nothing
that was right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from layerscope.errors import Damaged, NotARun, Unsupported
from layerscope.progress import Progress, no_progress
from layerscope.store import journal
from layerscope.store.address import (
    JOURNAL,
    PARTIAL,
    READING,
    SEALED,
    Address,
    LocalFolder,
    folder,
    open_regular,
    rank_folder,
    rank_of,
    segment,
    segment_of,
)
from layerscope.store.checksum import crc32c
from layerscope.store.columns import TableRow
from layerscope.store.manifest import NAME, Completeness, Dropped, Manifest
from layerscope.store.rank_lock import RankLock
from layerscope.store.segment import ROOM, Sealed, Sealing, placed_wrongly, seal

_PIECE = 4 << 20
_DAMAGED = ".damaged"
NOTHING_ELSE = "and nothing else says what the partial holds"


class Damage(NamedTuple):
    """Something that was written and cannot be read: in which file, what, and of which record if that is known.

    A kill in the middle of a frame loses what was never `acknowledged`; everything else should not have happened.
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


@dataclass(slots=True)
class Leftovers:
    """What a rank's folder holds after its pairs were sealed, and where a writer goes on.

    `segments` has records and bytes of each, and `losses` what their writers had to drop: by recording, point, reason.
    """

    sealed: int = 0
    recovered: int = 0
    verified: int = 0
    records: int = 0
    next_record: int = 0
    next_segment: int = 0
    next_step: int = 0
    lost: list[Damage] = field(default_factory=list)
    segments: dict[str, list[int]] = field(default_factory=dict)
    losses: dict[tuple[str, str, str], Dropped] = field(default_factory=dict)


def recover(address: Address, *, to: Address | None = None, progress: Progress | None = None) -> Recovery:
    """Seal every segment of a run whose writer is gone, and verify every record's bytes.

    With `to` the run is the spool of one that was recorded elsewhere: what of it is not there is put there, and the
    spool removed, unless something in it is damaged.

    Raises RunBusy when the writer is not gone, OSError when it cannot be done. A record that is damaged in a sealed
    segment is named in `lost`, and the segment is left as it is. `progress` is called with a segment's name, records
    verified and records to verify.
    """
    files = folder(address)
    if not isinstance(files, LocalFolder):
        raise Unsupported(
            f"{files.address} has nothing to recover: a run that is not on this machine's disk is put there in sealed "
            "pieces. What a killed writer had not yet put is in its spool, a layerscope-spool-* folder among the "
            f"temporary files of its machine: `layerscope recover SPOOL --to {files.address}` puts it."
        )
    ranks = [rank for name in files.names() if (rank := rank_of(name)) is not None]
    if not ranks:
        raise NotARun(f"{files.address} is not a run: {files.found()}; a run has folders rank-00000, rank-00001, ...")
    told = progress or no_progress
    sealed = recovered = verified = 0
    lost: list[Damage] = []
    trouble: list[OSError] = []
    for rank in ranks:
        path = files.path / rank_folder(rank)
        try:
            if path.is_symlink():
                raise Damaged(f"{path} is a link; the files of a run lie in its own folders")
            name = NAME if rank == 0 else f"{rank_folder(rank)}/{NAME}"
            with RankLock(path):
                own = _manifest(files, name)
                left = seal_leftovers(path, rank=rank, known=own, verify=True, progress=told)
                _settle(files, name, own, left)
        except OSError as error:  # one rank's trouble, a full disk for one, must not keep the others from being sealed
            trouble.append(error)
            continue
        sealed, recovered, verified = sealed + left.sealed, recovered + left.recovered, verified + left.verified
        lost += left.lost
    if trouble:
        raise trouble[0]
    if to is not None:
        from layerscope.store.uploader import put_spool

        put_spool(files, to, ranks, keep=any(damage.acknowledged for damage in lost))
    return Recovery(sealed, recovered, lost, verified)


def seal_leftovers(
    path: Path,
    *,
    rank: int,
    known: Manifest | None = None,
    verify: bool = False,
    progress: Progress = no_progress,
) -> Leftovers:
    """Seal the pairs in a rank's folder, which the caller has locked; `known` is what `run.json` says of it.

    With `verify` the bytes of every record are checked too, which reads everything.
    """
    left = Leftovers()
    files = LocalFolder(path.parent)
    kinds: dict[int, set[str]] = {}
    names = [found for name in files.names(path.name) if (found := segment_of(name)) is not None]
    for found in names:
        if found.stem == segment(found.number):  # others were sealed elsewhere: merged there, or by a later claim
            kinds.setdefault(found.number, set()).add(found.kind)
    said = {} if known is None else known.segments
    there = [*names, *(found for name in said if (found := segment_of(name + SEALED)) is not None)]
    left.next_segment = max((found.last for found in there), default=-1) + 1
    for number in sorted(kinds):
        if kinds[number] != {SEALED}:
            _seal_pair(files, path, number, kinds[number], rank, left, verify=verify)
    merged: set[str] = set()
    names.sort(key=lambda each: (each.claim, each.number, -each.last))  # a merged one before what it was merged of
    for stem in dict.fromkeys(found.stem for found in names):
        name = f"{path.name}/{stem}{SEALED}"
        if stem in merged:
            continue
        try:
            table = Sealed(files, name)
            rows = _rows(table, name, left)
        except FileNotFoundError:
            continue
        except Damaged as error:
            left.lost.append(Damage(name, str(error)))
            continue
        _count(left, stem, table, rows)
        merged.update(() if table.damage else table.merged)
        if verify:
            left.verified += _verify(path, name, rows, left, progress)
    for name, (records, _) in said.items():
        if name not in left.segments and name not in merged:
            left.lost.append(Damage(f"{path.name}/{name}{SEALED}", f"it is not there, and held {records} records"))
    return left


def _seal_pair(
    files: LocalFolder, path: Path, number: int, kinds: set[str], rank: int, left: Leftovers, *, verify: bool
) -> None:
    """Make one sealed file of a partial and its journal.

    Where a sealed one is there too, it counts if all of it reads; else the journal over its bytes, with the rows that
    the journal lacks.
    """
    stem = segment(number)
    where = f"{path.name}/{stem}"
    rows, checks, losses, run, is_whole = _journal_of(files, path, where, kinds, left)
    if SEALED in kinds:
        good, well = _readable(files, f"{where}{SEALED}")
        known = {row.record for row in rows}
        lacking = [row for row in good if row.record not in known]
        if well and len(good) - len(lacking) == len(rows):
            (path / (stem + JOURNAL)).unlink(missing_ok=True)
            (path / (stem + PARTIAL)).unlink(missing_ok=True)
            return
        if lacking:
            rows, checks = sorted([*rows, *lacking], key=lambda row: row.record), None
        if PARTIAL not in kinds:
            (path / (stem + SEALED)).rename(path / (stem + PARTIAL))
    partial = path / (stem + PARTIAL)
    fd = None
    try:
        if partial.exists():
            fd = open_regular(partial, os.O_RDWR)
            size = os.fstat(fd).st_size
        else:
            size = 0
        kept, gone = [], []
        for row in rows:
            wrong = placed_wrongly(row, size) if row.has_tensor else None
            if wrong is None:
                kept.append(row)
            else:
                gone.append(row)
                left.lost.append(Damage(f"{where}{PARTIAL}", wrong, row.point, str(row.moment)))
        losses += _counted(gone)
        end = 0 if is_whole or size <= ROOM else size  # bytes that a damaged journal may have spoken of are kept
        if not (kept or losses or end):
            partial.unlink(missing_ok=True)
            (path / (stem + JOURNAL)).unlink(missing_ok=True)
            return
        damaged = _damaged(fd, kept) if verify and fd is not None else frozenset()
        what = Sealing(run, rank, kept, None if gone else checks, losses, unkeyed=damaged, end=end)
        seal(path, number, what, fd, following=lambda: None)
    except ValueError as error:  # only a journal that no writer of ours wrote
        left.lost.append(Damage(f"{where}{JOURNAL}", str(error)))
        return
    finally:
        if fd is not None:
            os.close(fd)
    left.sealed += 1
    left.recovered += len(kept)


def _counted(gone: Sequence[TableRow]) -> list[Dropped]:
    """Count the records of each point whose bytes are not there."""
    moments: dict[str, list[str]] = {}
    for row in gone:
        moments.setdefault(row.point, []).append(str(row.moment))
    return [Dropped(point, len(at), "its bytes were gone after a kill", at[0]) for point, at in moments.items()]


def _damaged(fd: int, rows: Sequence[TableRow]) -> frozenset[int]:
    """Return the records whose bytes are not what was written."""
    tensors = [row for row in rows if row.has_tensor]
    return frozenset(row.record for row in tensors if _sum(fd, row.offset, row.length) != row.crc32c)


def _journal_of(
    files: LocalFolder, path: Path, where: str, kinds: set[str], left: Leftovers
) -> tuple[list[TableRow], list[int] | None, list[Dropped], bytes, bool]:
    """Read a pair's journal, and tell whether all of it reads; where not, it is kept beside under another name."""
    holds = False
    if PARTIAL in kinds:
        with files.opened(f"{where}{PARTIAL}") as fd:
            holds = os.fstat(fd).st_size > ROOM
    if JOURNAL not in kinds:
        if holds:
            left.lost.append(Damage(f"{where}{JOURNAL}", f"it is not there, {NOTHING_ELSE}"))
        return [], [], [], os.urandom(8), False
    data = files.read(f"{where}{JOURNAL}")
    found = journal.read(data)
    left.lost += [Damage(f"{where}{JOURNAL}", f"byte {at}: {why}") for at, why in found.damage]
    if found.torn:
        never = f"byte {found.end}: {found.torn} bytes of a last frame that was never finished"
        left.lost.append(Damage(f"{where}{JOURNAL}", never, acknowledged=False))
    if not found.end and holds:
        left.lost.append(Damage(f"{where}{JOURNAL}", f"nothing of it reads, {NOTHING_ELSE}"))
    if found.damage or (holds and not found.end):
        name = Path(where).name + JOURNAL + _DAMAGED
        if not (path / name).exists():
            files.put(f"{path.name}/{name}", bytes(data))
    is_whole = bool(found.end) and not (found.damage or found.torn)
    return found.rows, found.checks, found.losses, found.run if found.end else os.urandom(8), is_whole


def _readable(files: LocalFolder, name: str) -> tuple[list[TableRow], bool]:
    """Return the rows of a sealed segment that read, and whether all of its table does."""
    left = Leftovers()
    try:
        rows = _rows(Sealed(files, name), name, left)
    except Damaged:
        return [], False
    return rows, not left.lost


def _rows(found: Sealed, name: str, left: Leftovers) -> list[TableRow]:
    """Return the rows of a sealed segment that are what was written, and name the others."""
    columns = found.columns()
    found.look_through()
    left.lost += [Damage(name, reason if at is None else f"record {at}: {reason}") for reason, at in found.damage]
    return [columns.row(at) for at in range(found.rows) if at not in found.bad]


def _count(left: Leftovers, stem: str, found: Sealed, rows: Sequence[TableRow]) -> None:
    left.records += len(rows)
    left.segments[stem] = [found.rows, found.size]
    for loss in found.losses:  # each segment has the count of all until then
        known = left.losses.get((found.run, loss.point, loss.reason))
        if known is None or known.count < loss.count:
            left.losses[found.run, loss.point, loss.reason] = loss
    left.next_record = max([left.next_record, *(row.record + 1 for row in rows)])
    left.next_step = max([left.next_step, *(row.step + 1 for row in rows)])


def _verify(path: Path, name: str, rows: Sequence[TableRow], left: Leftovers, progress: Progress) -> int:
    """Return how many tensors of a sealed segment are what was written, and name the others."""
    told = name.removesuffix(SEALED)
    tensors = [row for row in rows if row.has_tensor]
    good, sums = 0, {}
    fd = open_regular(path.parent / name, READING)
    try:
        size = os.fstat(fd).st_size
        for done, row in enumerate(tensors):
            progress(told, done, len(tensors))
            reason = placed_wrongly(row, size)
            if reason is None:
                place = (row.offset, row.length)
                if place not in sums:
                    sums[place] = _sum(fd, *place)
                reason = (
                    None if sums[place] == row.crc32c else "its checksum differs: the bytes are not what was written"
                )
            if reason is None:
                good += 1
            else:
                left.lost.append(Damage(name, reason, row.point, str(row.moment)))
        progress(told, len(tensors), len(tensors))
    finally:
        os.close(fd)
    return good


def _sum(fd: int, offset: int, length: int) -> int:
    value = 0
    for at in range(offset, offset + length, _PIECE):
        value = crc32c(os.pread(fd, min(_PIECE, offset + length - at), at), value)
    return value


def _manifest(files: LocalFolder, name: str) -> Manifest | None:
    """Read a manifest; None where there is none that reads. Raises NewerFormat for a later format."""
    with contextlib.suppress(FileNotFoundError, Damaged):
        return Manifest.loads(files.read(name))
    return None


def _settle(files: LocalFolder, name: str, manifest: Manifest | None, left: Leftovers) -> None:
    """Say in `run.json` that the run was recovered, unless its writer had the time to say how it ended."""
    path = files.path / name
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
    if manifest is None:
        if path.exists():  # what a person may still read is kept
            path.replace(path.with_name(path.name + _DAMAGED))
        manifest = Manifest(started="", completeness=Completeness(state="unknown"))
    done = manifest.completeness
    ended = done.state in ("recovered", "interrupted", "complete") and path.exists()
    if ended and not left.sealed and manifest.segments == left.segments | manifest.segments:
        return
    dropped = together(done.dropped, left.losses.values())
    completeness = replace(
        done,
        state=done.state if ended else "recovered",
        records=left.records if not ended else done.records,
        dropped=dropped,
    )
    if ended and left.sealed:
        completeness = replace(completeness, records=max(done.records, left.records))
    segments = manifest.segments | left.segments
    files.put(name, replace(manifest, completeness=completeness, segments=segments).dumps().encode())


def together(stated: Iterable[Dropped], journaled: Iterable[Dropped]) -> list[Dropped]:
    """Join what `run.json` says of losses and what the segments say: each counted once, the larger count."""
    said, found = _added(stated), _added(journaled)
    for key, loss in found.items():
        if key not in said or said[key].count < loss.count:
            said[key] = loss
    return list(said.values())


def _added(losses: Iterable[Dropped]) -> dict[tuple[str, str], Dropped]:
    """Add up the losses of several recordings into one run."""
    sums: dict[tuple[str, str], Dropped] = {}
    for loss in losses:
        before = sums.get((loss.point, loss.reason))
        sums[loss.point, loss.reason] = loss if before is None else replace(before, count=before.count + loss.count)
    return sums
