"""A training run to look at: layers and steps as heat maps, series of points, alarms, attention maps.

    training(run, run.points)           # nothing where there is one step alone

Of many steps some are read, evenly spread and always the first and the last, and a sentence says how many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from layerscope.errors import LayerscopeError
from layerscope.pages.selection import by_depth
from layerscope.pages.statistics import MOSTLY_ZERO, STATISTICS
from layerscope.points import SIDE_TITLES, Moment, Point, caption
from layerscope.progress import Progress
from layerscope.report.parts import (
    Curves,
    Event,
    Fold,
    Heading,
    HeatMap,
    Line,
    Part,
    Select,
    Sentence,
    Timeline,
)
from layerscope.report.writing import many
from layerscope.stats import Summary
from layerscope.store import Entry, Run

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

RECORDS = 5_000  # of which the statistics are read: about a second of a page
ACROSS, DOWN = 160, 120  # cells of a map
SERIES = 6
MAPS = 8  # attention maps, of as many moments
TOKENS = 96  # of a map, either way


def training(run: Run, points: Sequence[Point], progress: Progress) -> Iterator[Part]:
    """Show what changes over the steps of a run."""
    when = sorted({Moment(m.epoch, m.step, m.batch) for m in run.moments})
    if len(when) > 1:
        shown = by_depth(points)
        several = max(1, min(ACROSS, RECORDS // max(1, min(len(shown), DOWN))))
        moments = _spread(when, several)
        found = _read(run, _spread(shown, DOWN), moments, progress)
        yield Heading("layers and steps")
        if len(moments) < len(when):
            yield Sentence(f"{len(moments):,} of {len(when):,} steps are drawn, evenly spread", "quiet")
        if len(shown) > DOWN:
            yield Sentence(f"{DOWN:,} of {len(shown):,} points are drawn, evenly spread", "quiet")
        yield from _maps(found, moments)
        yield from _series(found, moments)
    yield from _attention(run, points)


def alarm_parts(alarms: Sequence[Mapping[str, Any]], when: Sequence[Moment]) -> Iterator[Part]:
    """Show alarms, as they are kept, on a timeline, and what the last frames before each of them showed."""
    if not alarms:
        return
    events = [Event(one["step"], f"{one.get('rule')}: {one.get('where')}: {one.get('because')}") for one in alarms]
    steps = [moment.step for moment in when] + [event.at for event in events]
    first = events[0]
    yield Sentence(f"{many(len(events), 'alarm')}; the first, at step {first.at:,}: {first.text}", "bad")
    yield Timeline("alarms", "alarms", (min(steps), max(steps)), tuple(events), audience="page")
    for alarm, event in zip(alarms, events, strict=True):
        frames = alarm.get("frames")
        before = [one for one in frames if _is_frame(one)] if isinstance(frames, list) else []
        points = list(dict.fromkeys(point for one in before for point in one["rms"]))
        if points:
            table = tuple(tuple(_size(one["rms"].get(point)) for one in before) for point in points)
            columns = tuple(f"step {one.get('step')}" for one in before)
            drawn = HeatMap("frames", "rms", tuple(points), columns, table, log=True, audience="page")
            yield Fold(f"the frames before step {event.at:,}: {event.text}", (drawn,), tone="bad")


def _is_frame(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("rms"), Mapping)


def _size(value: object) -> float | None:
    """Return a number of an alarm's file, where what is not finite is a word; None for what is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _spread(items: Sequence[_T], most: int) -> list[_T]:
    """Choose so many, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return [*items]
    return [items[round(n * (len(items) - 1) / max(1, most - 1))] for n in range(most)]


def _read(
    run: Run, points: Sequence[Point], moments: Sequence[Moment], progress: Progress
) -> dict[Point, dict[Moment, Summary]]:
    """Return the statistics that were kept of the points at the moments, all calls and ranks added up."""
    wanted = set(points)
    found: dict[Point, dict[Moment, Summary]] = {point: {} for point in points}
    for done, moment in enumerate(moments):
        progress(str(moment), done, len(moments))
        for entry in run.records(epoch=moment.epoch, step=moment.step, batch=moment.batch):
            if entry.point not in wanted or entry.moment.epoch != moment.epoch:
                continue
            try:
                summary = entry.summary
            except LayerscopeError:
                continue  # it is named among what cannot be read
            if summary is not None:
                before = found[entry.point].get(moment)
                found[entry.point][moment] = summary if before is None else before + summary
    return {point: of for point, of in found.items() if of}


def _maps(found: dict[Point, dict[Moment, Summary]], moments: Sequence[Moment]) -> Iterator[Part]:
    if not found:
        yield Sentence(
            "no statistics were kept with the tensors; record with --keep both to see them over steps", "warn"
        )
        return
    columns = tuple(_when(moment) for moment in moments)
    sides = [side for side in SIDE_TITLES if any(point.side == side for point in found)]
    options: list[tuple[str, tuple[Part, ...]]] = []
    for statistic, (_, log) in STATISTICS.items():
        drawn = []
        for side in sides:
            rows = [point for point in found if point.side == side]
            table = tuple(tuple(_value(found[p].get(m), statistic) for m in moments) for p in rows)
            values = [v for row in table for v in row if v is not None]
            if values and (any(values) or statistic not in MOSTLY_ZERO):
                title, names = f"{statistic}, {SIDE_TITLES[side]}", tuple(caption(point) for point in rows)
                drawn.append(HeatMap("steps", title, names, columns, table, log=log, across="step", audience="page"))
        if drawn:
            options.append((statistic, tuple(drawn)))
    yield Select("statistic", tuple(options))


def _value(summary: Summary | None, statistic: str) -> float | None:
    """Return a statistic, to the digits of float32; what is left of a tensor that is not all finite says nothing."""
    if summary is None:
        return None
    if summary.finite < summary.count and statistic != "not finite":
        return math.nan
    value = STATISTICS[statistic][0](summary)
    return None if value is None else float(f"{value:.9g}")


def _series(found: dict[Point, dict[Moment, Summary]], moments: Sequence[Moment]) -> Iterator[Part]:
    """Draw the points that change most, as lines."""
    if not found:
        return

    def change(point: Point) -> float:
        values = [s.rms for s in found[point].values() if s.rms > 0 and math.isfinite(s.rms)]
        broken = any(s.finite < s.count for s in found[point].values())
        return math.inf if broken else max(values) / min(values) if values else 0.0

    chosen = sorted(found, key=lambda point: -change(point))[:SERIES]
    lines = tuple(Line(str(p), tuple(_value(found[p].get(m), "rms") for m in moments)) for p in found if p in chosen)
    title = f"rms of the {len(lines)} points that change most" if len(found) > len(lines) else "rms"
    labels = tuple(_when(moment) for moment in moments)
    yield Curves("series", title, labels, lines, log=True, across="step", audience="page")


def _when(moment: Moment) -> str:
    return f"{moment.step}" if moment.epoch is None else f"epoch {moment.epoch} step {moment.step}"


# Attention --------------------------------------------------------------------------------------


def _attention(run: Run, points: Sequence[Point]) -> Iterator[Part]:
    """Show recorded attention maps, of the first sample, at the moments they were recorded."""
    maps = [point for point in points if _is_map(run, point)]
    if not maps:
        return
    yield Heading("attention")
    yield Sentence("each line is a token that looks, each column the token it looks at; the first is at the top left")
    for point in maps[:MAPS]:
        entries = [entry for entry in run.records(point) if entry.point == point and entry.dtype is not None]
        chosen = _spread(entries, MAPS)
        options = []
        try:
            for entry in chosen:
                options.append((str(entry.moment), tuple(_heads(entry))))
        except ImportError:
            yield Sentence("attention maps are read with torch, which is not installed here", "quiet")
            return
        except LayerscopeError as error:
            yield Sentence(str(error), "warn")
        if len(chosen) < len(entries):
            yield Sentence(f"{len(chosen)} of {len(entries):,} moments of {point} are drawn, evenly spread", "quiet")
        if options:
            yield Select(str(point), tuple(options))
    if len(maps) > MAPS:
        yield Sentence(f"{MAPS} of {len(maps)} points with attention maps are drawn", "quiet")


def _is_map(run: Run, point: Point) -> bool:
    """Tell whether a point's tensors are attention maps: named so, and square in their last two axes."""
    if "attn" not in str(point) and "attention" not in str(point):
        return False
    entry = next((e for e in run.records(point) if e.point == point), None)
    shape = entry.shape if entry is not None else None
    return entry is not None and entry.dtype is not None and shape is not None and _square(shape)


def _square(shape: tuple[int, ...]) -> bool:
    return len(shape) in (3, 4) and shape[-1] == shape[-2] > 1 and shape[-3] <= 256


def _heads(entry: Entry) -> Iterator[Part]:
    """Draw what each token gets from each head, then the map of each head; of many neighbours, the largest."""
    from torch.nn.functional import max_pool2d

    tensor = entry.tensor().detach().float()
    heads = tensor[0] if tensor.dim() == 4 else tensor
    every = math.ceil(heads.shape[-1] / TOKENS)
    said = f", the largest of each {every}" if every > 1 else ""
    given = max_pool2d(heads.mean(dim=-2)[None], (1, every), ceil_mode=True)[0]
    labels = tuple(f"token {n * every}" for n in range(given.shape[-1]))
    if len(heads) > 1:
        names = tuple(f"head {n}" for n in range(len(heads)))
        title = f"what each token is given, the mean of those that look{said}"
        yield HeatMap("given", title, names, labels, _digits(given), log=True, audience="page")
    for nth, head in enumerate(max_pool2d(heads[:MAPS], every, ceil_mode=True)):
        yield HeatMap(
            "attention", f"head {nth}{said}", labels, labels, _digits(head), log=True, square=True, audience="page"
        )
    if len(heads) > MAPS:
        yield Sentence(f"{MAPS} of {len(heads)} heads are drawn", "quiet")


def _digits(table: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{v:.6g}") for v in row) for row in table.tolist())
