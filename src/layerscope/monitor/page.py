"""A watched training to look at: the alarms on a timeline with the frames before them, then its run.

html.save(page(watching.alarms, watching.run, "runs/train"), "report.html")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerscope.pages.run import page as page_of_run
from layerscope.report.parts import Document, Sentence
from layerscope.rules import Alarm
from layerscope.store import Run


def page(alarms: Sequence[Alarm], run: Run, name: str) -> Document:
    """Build the page of a watched training."""
    parts = page_of_run(run, name, alarms=[record_of(alarm) for alarm in alarms]).parts
    return Document(name, parts if alarms else (Sentence("no rule has raised an alarm", "good"), *parts))


def record_of(alarm: Alarm) -> dict[str, Any]:
    """Return an alarm as plain values, for the file beside its run; of its frames, the size of each point."""
    sizes = [{str(r.point): r.summary.rms if r.finite else math.nan for r in one.readings} for one in alarm.frames]
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
        "frames": [{"step": one.moment.step, "rms": rms} for one, rms in zip(alarm.frames, sizes, strict=True)],
    }
