"""Which channels of which layers carry the largest values, and what they cost a quantiser.

    found = outliers("runs/fp32")
    found.to_dicts(); found.to_pandas(); print(found)
    found.layers                              # a row for each point, whether it has outliers or not

`stats/channels.py` says when a channel stands out, and how many bits it costs.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from layerscope.errors import LayerscopeError, NoSuchPoint
from layerscope.points import Point
from layerscope.progress import Progress
from layerscope.report.parts import Cell, Column, Document, Notes, Part, Sentence, Value
from layerscope.report.parts import Table as Grid
from layerscope.report.writing import many
from layerscope.stats.channels import ABSMAX, TIMES, Channels
from layerscope.store import Damage, Entry, RecordTable, Run, open_run, selected

if TYPE_CHECKING:
    from layerscope.stats.tensor_views import Array


MOST_TOKENS = 0.2  # the share of a channel's places from which it is said to be carried by most of them
SHOWN = 40  # rows of a page
_NUMBERS = ("absmax", "mean", "rms", "share", "kurtosis", "tokens")


@final
@dataclass(frozen=True)
class Outliers:
    """The channels that stand out, the most expensive first; empty where none does.

    A row has the point and the channel; `absmax`, `mean`, `rms`, `share` of the layer's range and `kurtosis` over all
    records; `bits`, what it costs the other channels under one scale; `tokens`, the share of places that carry it;
    `records`, in how many `of` the point's records it stands out; `stays`, what the two come to.
    """

    rows: RecordTable
    layers: RecordTable
    left_out: tuple[str, ...] = ()
    damaged: tuple[Damage, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dictionary for each channel that stands out."""
        return self.rows.to_dicts()

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame of them; raises MissingExtra without pandas."""
        return self.rows.to_pandas()

    def __str__(self) -> str:
        from layerscope.report import terminal

        return terminal.render(Document("channels", tuple(self.parts())))

    def parts(self) -> Iterator[Part]:
        """Yield what a page shows."""
        yield Sentence(_headline(self), "warn" if len(self) else "good")
        if again := _again(self.rows):
            yield Notes("again", tuple(Sentence(text, "quiet") for text in again), most=5)
        for text in self.left_out:
            yield Sentence(text, "quiet")
        yield _layer_grid(self.layers)
        if len(self):
            yield _channel_grid(self.rows)


def outliers(
    run: str | os.PathLike[str] | Run,
    patterns: str | Sequence[str] = (),
    *,
    axis: int = -1,
    times: float = TIMES,
    epoch: int | None = None,
    step: int | None = None,
    batch: int | None = None,
    call: int | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> Outliers:
    """Find the channels that stand out in a run, over all its records or those of one epoch, step, batch, call or rank.

    A record without statistics of channels is taken from its tensor, along `axis`. Raises NoSuchPoint where there is
    neither. `times` is how many times the median channel of its layer an outlier is, at least. Points of integers and
    truth values, such as token ids and masks, have no channels to quantise and are left out.
    """
    reader = run if isinstance(run, Run) else open_run(run)
    points = selected(reader, [patterns] if isinstance(patterns, str) else list(patterns))
    gathered: list[_Gathered] = []
    damaged: list[Damage] = []
    without: list[Point] = []
    other: list[Point] = []
    for done, point in enumerate(points):
        if progress is not None:
            progress(point.place, done, len(points))
        one = _Gathered(point, times)
        for entry in reader.records(point, epoch=epoch, step=step, batch=batch, call=call, rank=rank):
            if entry.point != point:
                continue
            try:
                one.take(entry, axis)
            except LayerscopeError as error:  # one bad record does not hide the others
                damaged.append(Damage(reader.address, str(error), str(entry.point), str(entry.moment)))
        if one.total is not None:
            gathered.append(one)
        elif one.whole_numbers:
            other.append(point)
        elif one.bare:
            without.append(point)
    if not gathered and without:
        raise NoSuchPoint(
            f"no record of {reader.address} has statistics of channels, or a tensor to take them from; "
            "record with statistics='channels'."
        )
    left_out = _left_out(without, other, gathered)
    rows = [row for one in gathered for row in one.rows()]
    rows.sort(key=lambda row: -row["bits"])
    return Outliers(RecordTable(rows), RecordTable([one.row() for one in gathered]), tuple(left_out), tuple(damaged))


@dataclass
class _Gathered:
    """The channels of one point, over its records."""

    point: Point
    times: float
    total: Channels | None = None
    records: int = 0
    standing: Counter[int] = field(default_factory=Counter)  # in how many records each channel stands out
    unlike: int = 0  # records whose channels are others
    bare: int = 0  # records with neither channels nor a tensor
    whole_numbers: int = 0  # records of integers

    def take(self, entry: Entry, axis: int) -> None:
        """Add a record, if it has channels like those before it."""
        channels = self._channels(entry, axis)
        if channels is None:
            return
        if self.total is not None and not self.total.is_like(channels):
            self.unlike += 1
            return
        self.total = channels if self.total is None else self.total + channels
        self.records += 1
        self.standing.update(_places(channels.outlying(times=self.times)))

    def _channels(self, entry: Entry, axis: int) -> Channels | None:
        summary = entry.summary
        dtype = entry.dtype or (summary.dtype if summary is not None else "")
        if "float" not in dtype and "complex" not in dtype:
            self.whole_numbers += 1
            return None
        if summary is not None and summary.channels is not None:
            return summary.channels
        if entry.dtype is None:
            self.bare += 1
            return None
        from layerscope.stats import summarize

        return summarize(entry.tensor(), channels=axis).channels

    def row(self) -> dict[str, Any]:
        """Return what is known of the layer."""
        total, whole = self._total, self._total.whole
        beyond, size = total.outlying(times=self.times), total.table[ABSMAX]
        return {
            "point": str(self.point),
            "channels": len(total),
            "axis": total.axis,
            "records": self.records,
            "absmax": float(whole.absmax[0]),
            "largest": int(size.argmax()) if len(total) else None,
            "without": float(size[~beyond].max(initial=0.0)),
            "kurtosis": float(whole.kurtosis[0]),
            "outliers": int(beyond.sum()),
            "bits": float(total.bits(times=self.times).max(initial=0.0)),
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each channel that stands out."""
        total = self._total
        bits = total.bits(times=self.times)
        numbers = {name: getattr(total, name) for name in _NUMBERS}
        for channel in _places(total.outlying(times=self.times)):
            seen, tokens = self.standing[channel], float(numbers["tokens"][channel])
            yield {
                "point": str(self.point),
                "channel": channel,
                **{name: float(values[channel]) for name, values in numbers.items()},
                "bits": float(bits[channel]),
                "records": seen,
                "of": self.records,
                "stays": f"{'most' if tokens >= MOST_TOKENS else 'few'} tokens, "
                f"{'every record' if seen == self.records else 'some records'}",
            }

    @property
    def _total(self) -> Channels:
        assert self.total is not None
        return self.total


def _places(mask: Array) -> list[int]:
    return [int(place) for place in mask.nonzero()[0]]


def _left_out(without: list[Point], other: list[Point], gathered: list[_Gathered]) -> Iterator[str]:
    if without:
        yield f"{many(len(without), 'point')} without statistics of channels or tensors: {without[0]}, for one"
    if other:
        yield f"{many(len(other), 'point')} of integers or truth values left out: {other[0]}, for one"
    unlike = [one for one in gathered if one.unlike]
    if unlike:
        records = sum(one.unlike for one in unlike)
        yield f"{many(records, 'record')} with other channels than the first left out: {unlike[0].point}, for one"


# The page -----------------------------------------------------------------------------------------


def _headline(found: Outliers) -> str:
    layers = [row for row in found.layers if row["outliers"]]
    if not layers:
        return f"no channel stands out in {many(len(found.layers), 'point')}"
    worst = max(layers, key=lambda row: row["bits"])
    return (
        f"{many(len(found), 'channel')} {'stands' if len(found) == 1 else 'stand'} out in {len(layers)} of "
        f"{many(len(found.layers), 'point')}; the most expensive costs {worst['bits']:.1f} bits, in {worst['point']}"
    )


def _again(rows: RecordTable) -> list[str]:
    """Say which channels stand out in several points."""
    points = Counter(row["channel"] for row in rows)
    return [f"channel {channel} stands out in {n} points" for channel, n in points.most_common() if n > 1]


def _layer_grid(layers: RecordTable) -> Grid:
    columns = [
        Column("point", "point", "name"),
        Column("channels", "channels", "count", rank=4),
        Column("absmax", "absmax", "number"),
        Column("largest", "in channel", "count", rank=1),
        Column("without", "without outliers", "number", rank=3),
        Column("kurtosis", "kurtosis", "number", rank=2),
        Column("outliers", "outliers", "count"),
        Column("bits", "bits", "number"),
        Column("axis", "axis", audience="data"),
        Column("records", "records", "count", rank=5),
    ]
    return Grid.of("layers", columns, (_cells(row, columns, bool(row["outliers"])) for row in layers))


def _channel_grid(rows: RecordTable) -> Grid:
    columns = [
        Column("point", "point", "name"),
        Column("channel", "channel", "count"),
        Column("bits", "bits", "number"),
        Column("absmax", "absmax", "number"),
        Column("mean", "mean", "number", rank=3),
        Column("rms", "rms", "number", rank=2),
        Column("share", "of range", "percent", rank=4),
        Column("kurtosis", "kurtosis", "number", rank=5),
        Column("tokens", "tokens", "percent", rank=6),
        Column("stays", "stays", rank=1),
        Column("records", "records", "count", audience="data"),
        Column("of", "of", "count", audience="data"),
    ]
    return Grid.of("outliers", columns, (_cells(row, columns, False) for row in rows), most=SHOWN)


def _cells(row: dict[str, Any], columns: Sequence[Column], warn: bool) -> Iterator[Cell | Value]:
    for column in columns:
        value = row[column.key]
        if isinstance(value, float) and math.isnan(value):
            value = None
        yield Cell(value, "warn" if warn and column.key in ("outliers", "bits") else "plain")
