"""Frames in TensorBoard: scalars, histograms and attention maps.

    watch(model, optimizer, statistics="full", sinks=[TensorBoard("runs/board")])
    # tensorboard --logdir runs/board

A histogram is read from the sketch that a summary has (`statistics="full"`); no tensor is looked at twice.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope import ranks
from layerscope.errors import LayerscopeError, MissingExtra
from layerscope.integrations.pictures import picture
from layerscope.integrations.tags import STATISTICS, distributions, known, numbers
from layerscope.points import Point
from layerscope.rules import Frame, Reading
from layerscope.store import Run, open_run

if TYPE_CHECKING:
    from layerscope.compare import Comparison
    from layerscope.rules import Alarm
    from layerscope.stats import Summary

MEASURES = ("relative_l2", "max_abs", "mean_abs", "mse", "cosine", "correlation", "sqnr")

PARTS, OCTAVES = 8, 6  # of a histogram: about a hundred bins


class TensorBoard:
    """A sink that writes event files under `folder`; `statistics` are the scalars of every point.

    Ranks other than 0 write to folders of their own below it, which TensorBoard shows as runs of their own.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, statistics: Sequence[str] = STATISTICS, histograms: bool = True
    ) -> None:
        self._statistics = known(statistics)
        self._histograms = histograms
        try:
            from torch.utils.tensorboard import FileWriter
        except ImportError as error:
            raise MissingExtra("TensorBoard takes tensorboard: pip install 'layerscope[tensorboard]'") from error
        rank = ranks.rank()
        self._writer = FileWriter(os.fspath(Path(folder, f"rank-{rank:05d}") if rank else folder))

    def write(self, frame: Frame) -> None:
        """Write a frame under the number of its step, as one event: one for each scalar took fifteen times as long."""
        from tensorboard.compat.proto.summary_pb2 import Summary as Values
        from torch.utils.tensorboard.summary import image

        values = [Values.Value(tag=tag, simple_value=value) for tag, value in numbers(frame, self._statistics)]
        if self._histograms:
            values += [
                Values.Value(tag=f"histogram/{tag}", histo=_histogram(summary))
                for tag, summary in distributions(frame)
                if summary.sketch is not None and summary.finite
            ]
        for name, attention in frame.images.items():
            drawn = image(f"attention/{name}", picture(attention), dataformats="HW")  # type: ignore[no-untyped-call]
            values += drawn.value
        self._writer.add_summary(Values(value=values), frame.moment.step)

    def add(self, values: Any, step: int) -> None:
        """Write values of our own making."""
        self._writer.add_summary(values, step)

    def alarm(self, alarm: Alarm) -> None:
        """Write an alarm as text, at once."""
        from torch.utils.tensorboard.summary import text

        said = text(f"alarm/{alarm.rule}", str(alarm))  # type: ignore[no-untyped-call]
        self._writer.add_summary(said, alarm.moment.step)
        self._writer.flush()

    def close(self) -> None:
        """Write out what is held back."""
        self._writer.close()


def write_run(run: Run, folder: str | os.PathLike[str], *, statistics: Sequence[str] = STATISTICS) -> int:
    """Write the statistics of a recorded run, a step for each of its own; returns how many records were written."""
    sink = TensorBoard(folder, statistics=statistics)
    written = 0
    try:
        for moment in sorted({replace(moment, call=0, rank=0) for moment in run.moments}):
            found: dict[Point, Summary] = {}
            for entry in run.records(epoch=moment.epoch, step=moment.step, batch=moment.batch):
                when = entry.moment
                if when.epoch != moment.epoch:
                    continue
                summary = entry.summary or run.summary(
                    entry.point, epoch=when.epoch, step=when.step, batch=when.batch, call=when.call, rank=when.rank
                )
                before = found.get(entry.point)
                found[entry.point] = summary if before is None else before + summary
                written += 1
            sink.write(Frame(moment, tuple(Reading(point, summary) for point, summary in found.items())))
    finally:
        sink.close()
    return written


def write_comparison(comparison: Comparison, folder: str | os.PathLike[str]) -> int:
    """Write every measure of every row, a folder for each candidate, so that TensorBoard lays them over each other.

    Beside them stand the histograms of all the runs that are still where they were. Returns how many rows were written.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary as Values

    written = 0
    for nth, against in enumerate(comparison):
        name = re.sub(r"[^\w.-]+", "_", against.candidate).strip(".") or str(nth)
        sink = TensorBoard(Path(folder, name))
        try:
            for row in against.compared:
                numbers = {measure: getattr(row.metrics, measure) for measure in MEASURES}
                numbers |= {"ratio": row.ratio, "floor": row.floor.error if row.floor is not None else None}
                told = {f"{key}/{row.point}": value for key, value in numbers.items() if value is not None}
                values = [Values.Value(tag=tag, simple_value=value) for tag, value in told.items()]
                sink.add(Values(value=values), row.moment.step)
                written += 1
        finally:
            sink.close()
    runs = [(comparison.reference, comparison.address), *((a.candidate, a.address) for a in comparison)]
    for name, address in runs:
        with contextlib.suppress(LayerscopeError, OSError):
            write_run(open_run(address), Path(folder, "runs", re.sub(r"[^\w.-]+", "_", name).strip(".") or "run"))
    return written


def _histogram(summary: Summary) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    edges, counts = summary.histogram(parts=PARTS, octaves=OCTAVES)
    return HistogramProto(
        min=summary.min,
        max=summary.max,
        num=summary.finite,
        sum=summary.mean * summary.finite,
        sum_squares=summary.l2 * summary.l2,  # infinite where ** would raise
        bucket_limit=[min(edge, sys.float_info.max) for edge in edges[1:]],
        bucket=counts,
    )
