"""Open a run, whatever wrote it: our own format, or another tool's dump.

open_run("runs/fp32"); open_run("s3://bucket/fp32"); open_run("layer_outputs:2-1")
"""

from __future__ import annotations

import os

from layerscope.errors import Damaged, NotARun
from layerscope.store.address import Address, Folder, LocalFolder, folder, rank_folder, rank_of, segment_of
from layerscope.store.disk import Disk, read_manifest
from layerscope.store.layouts import LAYOUTS, DumpPlace, recognised
from layerscope.store.manifest import NAME
from layerscope.store.run import Run


def open_run(address: Address, *, mode: str | None = None) -> Run:
    """Open a run, or a dump in another layout, by path, `file://` or any fsspec address.

    An address may end in `:MODE` where that is not part of its name: `layer_outputs:2-1`. Raises NotARun with what was
    found there instead, or with the modes there are; Ambiguous when there are several and none was asked for.
    """
    place = _place(address, mode)
    run: Run | None = native(place.files) if place.file is None else None
    if run is None:
        run = recognised(place)
    if run is None:
        raise NotARun(
            f"{place.address} is not a run: {place.found()}. A run is a folder with {NAME} and rank-00000 in "
            f"it, or a dump in a layout of {', '.join(name.replace('_', '-') for name in LAYOUTS)}"
        )
    if place.mode not in (None, run.manifest.mode):
        known = run.manifest.mode
        there = f"that is mode {known}" if known is not None else f"a {run.layout} run that names no mode"
        raise NotARun(f"{place.address} has no mode {place.mode!r}: {there}")
    return run


def _place(address: Address, mode: str | None) -> DumpPlace:
    """Tell a mode behind a colon from a name that has one: what exists under its whole name is meant so."""
    files = folder(address)
    before, colon, asked = os.fspath(address).rpartition(":")
    if colon and before and asked and "/" not in asked and not _exists(files) and _exists(folder(before)):
        if mode not in (None, asked):
            raise NotARun(f"{address} asks for mode {asked!r}, and mode={mode!r} for another; ask for one of them")
        files, mode = folder(before), asked
    if isinstance(files, LocalFolder):
        if files.path.is_file():
            return DumpPlace(LocalFolder(files.path.parent), files.path.name, mode)
    elif files.names() == [files.address.rpartition("/")[2]]:  # fsspec lists a file as itself
        above, _, name = files.address.rpartition("/")
        return DumpPlace(folder(above), name, mode)
    return DumpPlace(files, None, mode)


def _exists(files: Folder) -> bool:
    return files.path.exists() if isinstance(files, LocalFolder) else bool(files.names())


def native(files: Folder) -> Run | None:
    """Recognise a run in layerscope's own layout."""
    names = files.names()
    ranks = [rank for name in names if (rank := rank_of(name)) is not None]
    has_segments = any(segment_of(name) is not None for rank in ranks for name in files.names(rank_folder(rank)))
    try:
        manifest = read_manifest(files, NAME)
    except Damaged:
        return Run(Disk(files)) if has_segments else None
    return Run(Disk(files)) if manifest is not None or has_segments else None
