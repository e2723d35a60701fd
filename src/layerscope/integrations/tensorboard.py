"""Frames in TensorBoard: scalars, histograms and attention maps.

    watch(model, optimizer, statistics="full", sinks=[TensorBoard("runs/board")])
    # tensorboard --logdir runs/board

A histogram is read from the sketch that a summary has (`statistics="full"`); no tensor is looked at twice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope import ranks
from layerscope.errors import MissingExtra
from layerscope.integrations.pictures import picture
from layerscope.integrations.tags import STATISTICS, distributions, known, numbers

if TYPE_CHECKING:
    from layerscope.rules import Alarm, Frame
    from layerscope.stats import Summary

__all__ = ["TensorBoard"]

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

    def alarm(self, alarm: Alarm) -> None:
        """Write an alarm as text, at once."""
        from torch.utils.tensorboard.summary import text

        said = text(f"alarm/{alarm.rule}", str(alarm))  # type: ignore[no-untyped-call]
        self._writer.add_summary(said, alarm.moment.step)
        self._writer.flush()

    def close(self) -> None:
        """Write out what is held back."""
        self._writer.close()


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
