"""Layerscope's own layout, written from any other.

    convert("layer_outputs:2-1", "runs/2-1", layout="layerscope")

The new run is written beside its place and renamed when it is whole.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerscope.errors import Damaged, RunExists
from layerscope.store.address import PARTIAL, Address, LocalFolder, folder, rank_of
from layerscope.store.manifest import NAME, Completeness
from layerscope.store.writer import Blob, Writer

if TYPE_CHECKING:
    from pathlib import Path

    from layerscope.stats import Summary
    from layerscope.store.layouts.convert import Job
    from layerscope.store.run import Entry

# No model is waiting: better to wait for the disk than to drop.
_PATIENCE = 3600.0
_PIECE = 1 << 20
# How a recording can have ended; what is still being written has not.
_ENDED = ("complete", "recovered", "interrupted")


def write(job: Job) -> None:
    """Write every record that was asked for, with its statistics, as a run of layerscope's own."""
    entries = [entry for point in job.points for entry in job.entries(point)]
    if not entries:
        raise job.nothing("no record")
    entries.sort(key=lambda entry: entry.moment)
    files = folder(job.target)
    if not isinstance(files, LocalFolder):
        _fill(job, job.target, entries)
        return
    path = files.path
    beside, before = path.with_name(path.name + PARTIAL), path.with_name(path.name + ".replaced")
    if (before / NAME).is_file() and not path.exists():  # a kill came between the two renames
        before.rename(path)
    there = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if there and not job.overwrite:
        raise RunExists(f"{path} is already there; overwrite=True or --overwrite replaces a run")
    if there and not (path / NAME).is_file():
        raise RunExists(f"{path} is there and no run of layerscope's: {files.found()}; it is not replaced")
    shutil.rmtree(beside, ignore_errors=True)
    if before.is_dir() and all(each.name == NAME or rank_of(each.name) is not None for each in before.iterdir()):
        shutil.rmtree(before, ignore_errors=True)  # what the disk would not remove the last time
    try:
        ends = _fill(job, beside, entries)
        _read_back(beside, ends, len(entries))
        if there:
            path.rename(before)
        elif path.exists():
            path.rmdir()
        beside.rename(path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):
            if there and not path.exists():
                before.rename(path)
        raise
    with suppress(OSError):  # the fstat in it is not among the errors that it ignores
        shutil.rmtree(before, ignore_errors=True)


def _fill(job: Job, target: Address, entries: list[Entry]) -> str:
    """Write the records, each rank's into its own folder; return how the run says that it ended."""
    import torch  # noqa: F401  # before the writer's thread needs it: on a slow disk that takes a while

    source, was = job.source.manifest, job.source.manifest.completeness
    ends = was.state if was.state in _ENDED else "unknown"
    origin = {"converted_from": {"address": job.source.address, "layout": job.source.layout}}
    manifest = replace(source, mode=job.mode, settings=source.settings | origin, completeness=Completeness())
    done = 0
    for rank in sorted({entry.moment.rank for entry in entries}):
        writer = Writer(target, manifest, rank=rank, wait=_PATIENCE)
        try:
            for entry in (each for each in entries if each.moment.rank == rank):
                blob = None
                if entry.dtype is not None and entry.shape is not None:
                    blob = Blob(entry.dtype, entry.shape, entry.nbytes, _bytes_of(entry))
                writer.write(entry.point, entry.moment, blob=blob, summary=_summary_of(entry), note=entry.note or None)
                job.progress(str(entry.point), done, len(entries))
                done += 1
        except BaseException:
            writer.close(state="interrupted")
            raise
        stated = writer.close(
            forwards=was.forwards,
            points=len(job.points),
            recomputed=was.recomputed,
            missing=was.missing,
            failed=was.failed,
            state=ends,
        )
        if stated.dropped:
            lost = stated.dropped[0]
            raise Damaged(f"{lost.point} at {lost.first} could not be taken over: {lost.reason}")
        if stated.state != ends:
            raise Damaged(f"{target} was not finished: the disk took nothing; convert again, to a disk that does")
    for entry in entries:
        job.wrote(entry, "", entry.dtype)
    return ends


def _read_back(path: Path, ends: str, count: int) -> None:
    """Read every record of the new run, before anything is replaced by it."""
    from layerscope.store.opening import open_run

    run = open_run(path)
    for entry in run.records():
        if entry.dtype is not None:
            deque(entry.pieces(_PIECE), maxlen=0)  # which checks them
    unsealed = [each.name for each in path.rglob(f"*{PARTIAL}")]
    if unsealed or run.damaged or len(run) != count or run.manifest.completeness.state != ends:
        raise Damaged(f"{path} was not finished: the disk did not take all of it; convert again, to a disk that does")


def _bytes_of(entry: Entry) -> Callable[[], Any]:
    def data() -> Any:
        import torch

        return entry.tensor().contiguous().reshape(-1).view(torch.uint8).numpy()

    return data


def _summary_of(entry: Entry) -> Summary | Callable[[], Summary] | None:
    if entry.summary is not None or entry.dtype is None:
        return entry.summary

    def summary() -> Summary:
        from layerscope.stats import summarize

        return summarize(entry.tensor())

    return summary
