"""Frames in Parquet: one row for each point and step, for pandas and whatever else reads columns.

    watch(model, optimizer, sinks=[Parquet("runs/statistics.parquet")])
    pandas.read_parquet("runs/statistics.parquet")     # at any time: while it grows, after a crash

A Parquet file can be read once its footer is written, which comes last, and cannot grow after that. So this is a folder
of files, each whole: the last one is written anew, and put in place of the older, until it is full. What a crash takes
is what was not written yet, `seconds` at most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope import ranks
from layerscope.errors import MissingExtra, RunExists
from layerscope.points import leaf_text

if TYPE_CHECKING:
    from layerscope.points import Moment
    from layerscope.rules import Alarm, Frame
    from layerscope.stats import Summary

ROWS = 1 << 16  # of a file

_WHERE = {"epoch": "int64", "step": "int64", "batch": "int64", "rank": "int64", "point": "string", "name": "string"}
_COUNTS = ("tensors", "count", "finite", "nan", "posinf", "neginf", "zeros")
_NUMBERS = ("mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "p1", "p5", "p50", "p95", "p99")
_COLUMNS = {
    **_WHERE,
    "side": "string",
    "leaf": "string",
    "dtype": "string",
    "shape": "string",
    **dict.fromkeys(_COUNTS, "int64"),
    **dict.fromkeys(_NUMBERS, "double"),
    "weight_rms": "double",
    "update_ratio": "double",
    "alarm": "string",
    "value": "double",
    "threshold": "double",
    "because": "string",
}


class Parquet:
    """A sink that writes rows to Parquet files in `folder`, at least every `seconds`, each rank to files of its own.

    A row has the columns of `run.summaries()`. A parameter's row has side `parameter`, its weight's `weight_rms`, its
    `update_ratio`, and the statistics of its gradient; an alarm's row has `alarm`, `value`, `threshold` and `because`.
    A folder that has rows already is refused unless `append` asks to go on there.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, seconds: float = 30.0, append: bool = False, rows: int = ROWS
    ) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtra("Parquet takes pyarrow: pip install 'layerscope[parquet]'") from error
        self._arrow: Any = pyarrow
        self._schema = pyarrow.schema([(name, getattr(pyarrow, _TYPES[kind])()) for name, kind in _COLUMNS.items()])
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stem = f"rank-{ranks.rank():05d}"
        there = [int(path.stem.rpartition("-")[2]) for path in self._folder.glob(f"{self._stem}-*.parquet")]
        if there and not append:
            raise RunExists(f"{os.fspath(folder)!r} has rows already; give another folder, or append=True to go on.")
        self._part = max(there, default=-1) + 1
        self._seconds = seconds
        self._most = rows
        self._batches: list[Any] = []  # of the last file
        self._whole = True  # whether the file has them all
        self._fresh: list[dict[str, Any]] = []
        self._written = time.monotonic()

    def write(self, frame: Frame) -> None:
        """Add the rows of a frame."""
        self._add(_rows(frame))

    def alarm(self, alarm: Alarm) -> None:
        """Add the row of an alarm, and write it."""
        told = {"alarm": alarm.rule, "value": alarm.value, "threshold": alarm.threshold, "because": alarm.because}
        where = {"point": alarm.where, "name": alarm.parameter or alarm.point.name, "side": alarm.point.side}
        self._fresh.append({**_when(alarm.moment), **where, **told})
        self.flush()

    def flush(self) -> None:
        """Have every row on disk."""
        if self._fresh:
            self._batches.append(self._arrow.RecordBatch.from_pylist(self._fresh, schema=self._schema))
            self._fresh, self._whole = [], False
        if not self._whole:
            self._put()
            self._whole = True
        self._written = time.monotonic()

    def close(self) -> None:
        """Write what is held back."""
        self.flush()

    def _add(self, rows: Iterator[Mapping[str, Any]]) -> None:
        self._fresh.extend(dict(row) for row in rows)
        full = sum(batch.num_rows for batch in self._batches) + len(self._fresh) >= self._most
        try:
            if full or time.monotonic() - self._written >= self._seconds:
                self.flush()
        finally:
            if full:  # what the disk did not take by now is lost: memory must not fill instead
                self._part, self._batches, self._whole = self._part + 1, [], True

    def _put(self) -> None:
        table = self._arrow.Table.from_batches(self._batches, self._schema).combine_chunks()
        path = self._folder / f"{self._stem}-{self._part:06d}.parquet"
        # Readers of a folder pass over names that begin with a dot.
        hidden = self._folder / f".{path.name}"
        self._arrow.parquet.write_table(table, hidden)
        hidden.replace(path)


_TYPES = {"int64": "int64", "double": "float64", "string": "string"}


def _rows(frame: Frame) -> Iterator[dict[str, Any]]:
    when = _when(frame.moment)
    for reading in frame.readings:
        point = reading.point
        where = {"point": str(point), "name": point.name, "side": point.side, "leaf": leaf_text(point.leaf)}
        yield {**when, **where, **_statistics(reading.summary)}
    for parameter in frame.parameters:
        where = {"point": parameter.name, "name": parameter.name, "side": "parameter", "leaf": ""}
        weight = {"weight_rms": parameter.weight_rms, "update_ratio": parameter.update_ratio}
        yield {**when, **where, **weight, **({} if parameter.gradient is None else _statistics(parameter.gradient))}


def _when(moment: Moment) -> dict[str, Any]:
    return {"epoch": moment.epoch, "step": moment.step, "batch": moment.batch, "rank": moment.rank}


def _statistics(summary: Summary) -> dict[str, Any]:
    row = summary.row()
    shape = None if summary.shape is None else "x".join(map(str, summary.shape))
    return {**{name: row[name] for name in (*_COUNTS, *_NUMBERS, "dtype")}, "shape": shape}
