"""A watched training to look at: the alarms on a timeline with the frames before them, then its run.

html.save(page(watching.alarms, watching.run, "runs/train"), "report.html")
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from layerscope.pages.run import page as page_of_run
from layerscope.pages.training import alarm_parts
from layerscope.report.parts import Document, Event, Fold, Heading, HeatMap, Part, Sentence
from layerscope.rules import Alarm
from layerscope.store import Run

__all__ = ["page", "record_of"]


def page(alarms: Sequence[Alarm], run: Run, name: str) -> Document:
    """Build the page of a watched training."""
    events = [Event(alarm.moment.step, str(alarm)) for alarm in alarms]
    said = "no rule has raised an alarm" if not alarms else f"{len(alarms):,} alarms; the first: {alarms[0]}"
    parts: list[Part] = [Sentence(said, "bad" if alarms else "good"), *alarm_parts(events, run.moments)]
    parts += _frames(alarms)
    rest = page_of_run(run, name, alarms=False)
    return Document(name, (*parts, *rest.parts))


def record_of(alarm: Alarm) -> dict[str, str | int | float | None]:
    """Return an alarm as plain values, for the file beside its run."""
    return {
        "rule": alarm.rule,
        "where": alarm.where,
        "epoch": alarm.moment.epoch,
        "step": alarm.moment.step,
        "rank": alarm.moment.rank,
        "value": alarm.value,
        "threshold": alarm.threshold,
        "because": alarm.because,
        "action": alarm.action,
    }


def _frames(alarms: Sequence[Alarm]) -> Iterator[Part]:
    """Draw what the last frames before each alarm showed."""
    kept = [alarm for alarm in alarms if alarm.frames]
    if kept:
        yield Heading("the frames before each alarm")
    for alarm in kept:
        frames = alarm.frames
        points = list(dict.fromkeys(reading.point for frame in frames for reading in frame.readings))
        rms = [{r.point: r.summary.rms if r.finite else math.nan for r in reversed(frame.readings)} for frame in frames]
        table = tuple(tuple(one.get(point) for one in rms) for point in points)
        columns = tuple(f"step {frame.moment.step}" for frame in frames)
        drawn = HeatMap("frames", "rms", tuple(map(str, points)), columns, table, log=True, audience="page")
        yield Fold(str(alarm), (drawn,), tone="bad")
