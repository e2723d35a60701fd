"""Make one segment of many small ones: a `flush` seals what there is, and elsewhere each file is a request.

    records, size = merge([Sealed(files, name), ...], folder, Path("merged"), names=[...])

The table is joined column by column; only rows that speak of bytes, which have moved, are made anew. The footer names
what was merged, so that a reader who finds both, after a kill in between, passes over the small ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from layerscope.errors import Damaged
from layerscope.store.address import READING, WRITING, open_regular, write_all
from layerscope.store.checksum import crc32c
from layerscope.store.columns import Columns, Has, pack
from layerscope.store.manifest import Dropped
from layerscope.store.segment import ROOM, TABLE_ROOM, Sealed, Sealing, tensor_entries, write_columns

_PIECE = 4 << 20


def merge(sources: Sequence[Sealed], folder: Path, to: Path, *, names: Sequence[str]) -> tuple[int, int]:
    """Write the segments of a run in `folder` as one, and return its records and size; a damaged one raises Damaged.

    `names` is what those that it replaces are called where it goes.
    """
    parts = [source.columns() for source in sources]
    for source in sources:
        if source.damage:
            raise Damaged(f"{source.name} is not merged: {source.damage[0][0]}")
    stretches = [_stretch(source, part) for source, part in zip(sources, parts, strict=True)]
    ends = np.cumsum([last - first for first, last in stretches])
    starts = ends - [last - first for first, last in stretches]
    moved = [int(start - first) for start, (first, _) in zip(starts, stretches, strict=True)]
    columns = Columns.joined(parts, moved)
    tensors = np.flatnonzero(columns.arrays["has"] & Has.TENSOR)
    rows = [columns.row(int(at)) for at in tensors]
    covered = int(ends[-1])
    entries = tensor_entries(rows, end=covered, begins=0)
    room = -(-(8 + TABLE_ROOM + sum(len(each) + 1 for each in entries)) // ROOM) * ROOM
    if len(tensors):
        offsets = columns.arrays["offset"].astype(np.int64)
        offsets[tensors] += room
        columns.arrays["offset"] = offsets.astype(np.uint32 if offsets.max() < 1 << 32 else np.int64)
        placed = [row._replace(offset=row.offset + room) for row in rows]
        columns.arrays["check"][tensors] = [crc32c(pack(row)) for row in placed]
    what = Sealing(bytes.fromhex(sources[0].run), sources[0].rank, [], losses=_losses(sources), merged=names)
    fd = open_regular(to, WRITING | os.O_CREAT | os.O_TRUNC)
    try:
        end = room + covered if covered else 0
        if end:
            os.lseek(fd, room, os.SEEK_SET)
            for source, stretch in zip(sources, stretches, strict=True):
                _copy(folder / source.name, *stretch, fd)
        size = write_columns(fd, what, columns, entries, end=end, room=room)
    finally:
        os.close(fd)
    return columns.rows, size


def _stretch(source: Sealed, columns: Columns) -> tuple[int, int]:
    """Return where a segment's tensors lie, nowhere when it has none."""
    has_bytes = ((columns.arrays["has"] & Has.TENSOR) != 0) & (columns.arrays["length"] > 0)
    return source.tensors if has_bytes.any() else (0, 0)


def _copy(path: Path, first: int, last: int, to: int) -> None:
    fd = open_regular(path, READING)
    try:
        while first < last:
            data = os.pread(fd, min(_PIECE, last - first), first)
            if not data:
                raise Damaged(f"{path} ends before its tensors do")
            write_all(to, data)
            first += len(data)
    finally:
        os.close(fd)


def _losses(sources: Sequence[Sealed]) -> list[Dropped]:
    """Return what was lost; a later segment counts on from an earlier one."""
    found: dict[tuple[str, str], Dropped] = {}
    for loss in (loss for source in sources for loss in source.losses):
        known = found.get((loss.point, loss.reason))
        if known is None or known.count < loss.count:
            found[loss.point, loss.reason] = loss
    return list(found.values())
