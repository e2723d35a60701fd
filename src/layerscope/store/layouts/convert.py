"""Write a run in another layout: what users' own scripts read.

    done = convert("runs/2-1", "layer_outputs", layout="quamba")
    done.written; done.left_out         # nothing is left out in silence

Files are written beside their place and renamed when all of them are whole. Of a run with several moments one must be
chosen, unless the layout has a place for all of them (`layerscope`, `monitor`). Samples that were recorded a few at a
time are one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from layerscope.errors import Ambiguous, BadText, NoSuchPoint, Unsupported
from layerscope.points import Moment, Point
from layerscope.progress import Progress, no_progress
from layerscope.store.address import Address, LocalFolder, folder
from layerscope.store.joining import are_samples, joined
from layerscope.store.records import WHEN
from layerscope.store.run import Entry, Run

Layout = Literal["layerscope", "quamba", "first-layer", "neuron", "monitor"]
WRITTEN: tuple[Layout, ...] = get_args(Layout)

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor that was written: which record it is, and where it went.

    `dtype` is that of the file, None where statistics alone were written.
    """

    point: Point
    moment: Moment
    file: str
    dtype: str | None
    shape: tuple[int, ...] | None
    recorded_dtype: str | None


@dataclass(frozen=True, slots=True)
class Left:
    """What the layout has no place for, and why; `records` of one point."""

    point: Point
    records: int
    reason: str


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did."""

    source: str
    target: str
    layout: Layout
    mode: str | None
    written: tuple[Written, ...]
    left_out: tuple[Left, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class Job:
    """One conversion on its way: what is asked of a layout's `write(job)`, and what it says of its doing."""

    source: Run
    target: Address
    layout: Layout
    mode: str | None
    points: list[Point]
    when: dict[str, int]
    overwrite: bool
    progress: Progress
    written: list[Written] = field(default_factory=list)
    left_out: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where to write; these layouts are files on this machine."""
        files = folder(self.target)
        if not isinstance(files, LocalFolder):
            raise Unsupported(f"the {self.layout} layout is written to this machine's disks, not to {files.address}")
        return files.path

    @property
    def named_mode(self) -> str:
        """The mode that names files and keys; raises where none was given, or where it can be no name."""
        if self.mode is None:
            raise Unsupported(
                f"the {self.layout} layout names what it holds after a mode, and {self.source.address} states none: "
                "say it with mode= or --mode"
            )
        if not self.mode or any(sign in self.mode for sign in "/:\0") or self.mode in (".", ".."):
            raise BadText(f"{self.mode!r} is no mode to name a file after: letters, digits, dots and dashes are")
        return self.mode

    def entries(self, point: Point) -> list[Entry]:
        """Return the records of a point at the moments that were asked for."""
        return [entry for entry in self.source.records(point, **self.when) if entry.point == point]

    def one(self, point: Point) -> Entry | None:
        """Return the record of a point where there can be but one; None when it has none at these moments.

        Samples that went through the model a few at a time are one record.
        """
        entries = self.entries(point)
        if len(entries) > 1 and are_samples(entries, self.source.manifest):
            return next(joined(self.source, entries).records())
        if len(entries) > 1:
            moments = [str(entry.moment) for entry in entries]
            more = f" and {len(moments) - _LISTED} more" if len(moments) > _LISTED else ""
            differ = [w for w in WHEN if len({getattr(entry.moment, w) for entry in entries}) > 1]
            raise Ambiguous(
                f"{point} was recorded at {len(moments)} moments: {', '.join(moments[:_LISTED])}{more}; "
                f"the {self.layout} layout holds one, so choose it with "
                f"{', '.join(f'{word}= or --{word}' for word in differ)}"
            )
        return entries[0] if entries else None

    def wrote(self, entry: Entry, file: str, dtype: str | None) -> None:
        """Note that a record was written; with no dtype, its statistics alone."""
        self.written.append(Written(entry.point, entry.moment, file, dtype, entry.shape, entry.dtype))
        self.progress(str(entry.point), len(self.written), 0)

    def leave(self, point: Point, reason: str, *, records: int | None = None) -> None:
        """Note that records of a point have no place."""
        count = len(self.entries(point)) if records is None else records
        self.left_out.append(Left(point, count, reason))

    def leave_others(self, used: Sequence[Point | None]) -> None:
        """Note every point that was not used, with what it is."""
        for point in self.points:
            if point not in used:
                kind = "gradients have" if point.side.startswith("grad") else f"an {point.side} of this module has"
                self.leave(point, f"{kind} no place in the {self.layout} layout")

    def nothing(self, wanted: str) -> NoSuchPoint:
        """Return the error for a source that has nothing for the layout."""
        asked = " ".join(f"{word}={value}" for word, value in self.when.items())
        at = f" at {asked}" if asked else ""
        return NoSuchPoint(f"{self.source.address} has {wanted}{at}: nothing to write in the {self.layout} layout")


def convert(
    source: Address | Run,
    target: Address,
    *,
    layout: Layout,
    mode: str | None = None,
    points: Sequence[str] = (),
    epoch: int | None = None,
    step: int | None = None,
    batch: int | None = None,
    call: int | None = None,
    rank: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a run, or a dump in any layout that is read, in `layout`; return what was written and what was left out.

    `mode` names it in what is written, and is the source's own where it is left out. `points` are patterns. What is
    already there for the same mode raises RunExists unless `overwrite`; other modes stay.
    """
    from layerscope.store.opening import open_run
    from layerscope.store.selecting import selected

    if layout not in WRITTEN:
        raise Unsupported(f"there is no layout {layout!r} to write; there are {', '.join(WRITTEN)}")
    reader = source if isinstance(source, Run) else open_run(source)
    when = {w: v for w, v in zip(WHEN, (epoch, step, batch, call, rank), strict=True) if v is not None}
    named = reader.manifest.mode if mode is None else mode
    job = Job(reader, target, layout, named, selected(reader, points), when, overwrite, progress or no_progress)
    import_module(f"layerscope.store.layouts.{_MODULES.get(layout, layout)}").write(job)
    at = folder(target).address
    return Converted(
        reader.address, at, layout, job.mode, tuple(job.written), tuple(job.left_out), (*reader.notes, *job.notes)
    )


_MODULES = {"first-layer": "first_layer", "layerscope": "native"}
