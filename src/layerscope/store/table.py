"""Columns of one length, and a run's summaries as such.

    table = run.summaries()
    table[0]["mean"]; table.to_dicts(); table.to_pandas(); table.to_arrow(); table.to_parquet("summaries.parquet")

pandas and pyarrow are needed only by the verbs that are named after them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, final, overload

import numpy as np

from layerscope.errors import LayerscopeError, MissingExtra, NoSuchPoint
from layerscope.points import Point
from layerscope.store.columns import COUNTS, MOMENTS, SKETCH, Array, Columns, Has
from layerscope.store.records import WHEN, Records

if TYPE_CHECKING:
    from layerscope.stats import Summary
    from layerscope.store.source import Source


@final
class RecordTable(Sequence[dict[str, Any]]):
    """Rows that all have the same columns, kept column by column. A column holds None where a row has no value."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]] = (),
        *,
        columns: Mapping[str, Any] | None = None,
        size: int | None = None,
    ) -> None:
        """Take rows, or `columns`: an array or a list each, or what makes one when it is asked for; `size` of each."""
        if columns is None:
            rows = list(rows)
            names = list(dict.fromkeys(name for row in rows for name in row))
            columns = {name: [row.get(name) for row in rows] for name in names}
        self._made: dict[str, Any] = {}
        self._columns = dict(columns)
        self._size = len(self.column(next(iter(self._columns)))) if size is None and self._columns else size or 0

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def column(self, name: str) -> Any:
        """Return one column: an array where every row has a number, else a list."""
        if name not in self._made:
            column = self._columns[name]
            self._made[name] = column() if callable(column) else column
        return self._made[name]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> RecordTable: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | RecordTable:
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            return RecordTable(
                columns={name: partial(self._some, name, index) for name in self._columns}, size=len(chosen)
            )
        return {name: _plain(self.column(name)[index]) for name in self._columns}

    def _some(self, name: str, index: slice) -> Any:
        return self.column(name)[index]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_dicts())

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain dictionaries of their own."""
        names = self.columns
        columns = [_listed(self.column(name)) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame; raises MissingExtra without pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra("to_pandas takes pandas: pip install 'layerscope[parquet]'") from error
        return pd.DataFrame({name: self.column(name) for name in self._columns})

    def to_arrow(self) -> Any:
        """Return a pyarrow Table; raises MissingExtra without pyarrow."""
        try:
            import pyarrow as pa
        except ImportError as error:
            raise MissingExtra("to_arrow takes pyarrow: pip install 'layerscope[parquet]'") from error
        return pa.table({name: pa.array(self.column(name)) for name in self._columns})

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file; raises MissingExtra without pyarrow."""
        table = self.to_arrow()
        import pyarrow.parquet as pq

        pq.write_table(table, os.fspath(path))


def _listed(column: Any) -> list[Any]:
    if isinstance(column, np.ndarray):
        return column.tolist()  # type: ignore[no-any-return]
    return [each.tolist() for each in column] if len(column) and isinstance(column[0], np.ndarray) else list(column)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


# A run's summaries ------------------------------------------------------------------------------


class StoredStatistics:
    """The stored statistics of some records, of one part of a run or several, read a column at a time.

    `has` has the bits of each record; the numbers of one without a summary mean nothing.
    """

    def __init__(self, groups: Sequence[tuple[Columns, Array, slice]], size: int) -> None:
        """Take parts, the rows in each, and where among all of them those are."""
        self._groups, self._size = groups, size
        self.has = self.column("has").astype(np.int64)
        self.has[self._bad()] = 0

    def column(self, name: str) -> Array:
        """Return one column, with a number or a row of numbers for each record."""
        parts = [part.array(name)[rows] for part, rows, _ in self._groups]
        kind = np.int64 if name in COUNTS else np.float64 if name in (*MOMENTS, "first") else None
        return np.concatenate(parts, dtype=kind) if parts else np.empty(0, kind)

    def lost(self) -> Array | None:
        """Tell the records of which a column turned out damaged since `has` was read; None where there are none."""
        lost = self._bad() & (self.has != 0)
        return lost if lost.any() else None

    def _bad(self) -> Array:
        bad = np.zeros(self._size, bool)
        for part, rows, where in self._groups:
            if part.bad:
                bad[where] = np.isin(rows, list(part.bad))
        return bad

    def dtypes(self) -> list[str]:
        """Return the dtype of what each summary is of."""
        dtypes: list[str] = []
        for part, rows, _ in self._groups:
            dtypes += _chosen([*part.dtypes, ""], part.array("summary_dtype")[rows])
        return dtypes

    def shapes(self) -> list[tuple[int, ...] | None]:
        """Return the shape of what each summary is of, None where it is of several."""
        shapes: list[tuple[int, ...] | None] = []
        for part, rows, where in self._groups:
            code = part.array("summary_shape")[rows].astype(np.int64)
            code = np.where(self.has[where] & Has.ONE_SHAPE, code, len(part.shapes))
            shapes += _chosen([*part.shapes, None], code)
        return shapes

    def sketches(self) -> tuple[Array, Array, Array, Array]:
        """Return keys and counts of all sketches, and for each record where its own begin and how many they are."""
        keys, counts = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        starts, sizes, at = np.zeros(self._size, np.int64), np.zeros(self._size, np.int64), 0
        for part, rows, where in self._groups:
            a = part.load(SKETCH).arrays
            starts[where] = a["sketch_start"][rows].astype(np.int64) + at
            sizes[where] = np.where(self.has[where] & Has.SKETCH, a["sketch_size"][rows], 0)
            keys.append(a["sketch_keys"])
            counts.append(a["sketch_counts"])
            at += len(a["sketch_keys"])
        return np.concatenate(keys), np.concatenate(counts), starts, sizes


def table_of(source: Source, records: Records, places: Array, summary_of: Callable[[int], Summary]) -> RecordTable:
    """Return the statistics of records, as columns from end to end where they were stored."""
    where = _where(records, places)
    statistics, damage = source.statistics(places), {}
    there = (statistics.has & Has.SUMMARY) != 0
    computed: dict[int, dict[str, Any]] = {}
    for n in np.flatnonzero(~there):
        try:
            computed[int(n)] = summary_of(int(places[n])).row()
        except NoSuchPoint:
            computed[int(n)] = {}
        except LayerscopeError as error:  # one bad record does not hide the others
            computed[int(n)] = {}
            damage[int(n)] = str(error)
    numbers = {name: partial(_held, statistics, make) for name, make in _numbers(statistics).items()}
    columns = {**where, **numbers} if there.any() else dict(where)
    if computed:
        columns = _filled(columns, computed, len(places))
    if damage:
        columns["damaged"] = [damage.get(n) for n in range(len(places))]
    return RecordTable(columns=columns, size=len(places))


def _held(statistics: StoredStatistics, make: Callable[[], Any]) -> Any:
    """Make a column; what turns out damaged in the making is None."""
    column, lost = make(), statistics.lost()
    if lost is None:
        return column
    return [None if is_lost else each for each, is_lost in zip(_listed(column), lost.tolist(), strict=True)]


def _filled(columns: dict[str, Any], computed: Mapping[int, Mapping[str, Any]], size: int) -> dict[str, Any]:
    """Put what was computed for some rows into the columns; where a row has nothing it holds None."""
    names = dict.fromkeys([*columns, *(name for row in computed.values() for name in row)])
    filled = {}
    for name in names:
        column = columns.get(name)
        if name in _WHERE:
            filled[name] = column
            continue
        values = [None] * size if column is None else _listed(column() if callable(column) else column)
        for n, row in computed.items():
            values[n] = row.get(name)
        filled[name] = values
    return filled


_WHERE = ("point", "name", "side", "leaf", *WHEN)


def _where(records: Records, places: Array) -> dict[str, Any]:
    codes = records.point[places]
    used, codes = np.unique(codes, return_inverse=True)
    texts = [records.names[code] for code in used]
    points = [Point.parse(text) for text in texts]
    told = {
        "point": texts,
        "name": [point.name for point in points],
        "side": [point.side for point in points],
        "leaf": [text[len(f"{point.place}:{point.side}") :] for text, point in zip(texts, points, strict=True)],
    }
    columns: dict[str, Any] = {name: partial(_chosen, [*values, ""], codes) for name, values in told.items()}
    columns |= {name: partial(_when, records, name, places) for name in WHEN}
    return columns


def _chosen(values: Sequence[Any], codes: Array) -> list[Any]:
    """Return a value for each code; one that a damaged row made up is taken for the last."""
    table = np.empty(len(values), object)
    for at, value in enumerate(values):  # numpy would make a table of numbers of shapes
        table[at] = value
    return table[np.minimum(codes, len(values) - 1)].tolist()  # type: ignore[no-any-return]


def _when(records: Records, name: str, places: Array) -> Any:
    column = records.when[name][places].astype(np.int64)
    there = records.has_epoch[places]
    return column if name != "epoch" or there.all() else _where_there(column, there)


def _numbers(s: StoredStatistics) -> dict[str, Any]:
    """Return what `Summary.row` gives, for all of them at once; each column is made when it is asked for."""
    from layerscope.stats import PERCENTILES

    columns: dict[str, Any] = {name: partial(s.column, name) for name in COUNTS}
    columns |= {"finite": partial(_finite, s), "has_nan": lambda: s.column("nan") > 0}
    columns |= {"has_inf": lambda: s.column("posinf") + s.column("neginf") > 0}
    columns |= {name: partial(s.column, name) for name in MOMENTS}
    columns |= {"absmax": lambda: np.maximum(np.abs(s.column("min")), np.abs(s.column("max")))}
    columns |= {"l2": partial(_l2, s), "rms": partial(_rms, s)}
    columns |= {"dtype": s.dtypes, "shape": s.shapes}
    percentiles = cache(partial(_percentiles, s))
    columns |= {f"p{q}": lambda at=at: percentiles()[at] for at, q in enumerate(PERCENTILES)}
    columns |= {"first_10": partial(_first, s)}
    columns |= {"fingerprint": partial(_prints, s, 0, Has.FINGERPRINT), "placed": partial(_prints, s, 1, Has.PLACED)}
    return columns


def _finite(s: StoredStatistics) -> Array:
    return s.column("count") - s.column("nan") - s.column("posinf") - s.column("neginf")


def _rms(s: StoredStatistics) -> Array:
    return np.hypot(s.column("mean"), s.column("std"))


def _l2(s: StoredStatistics) -> Array:
    finite = _finite(s)
    return np.where(finite > 0, _rms(s) * np.sqrt(np.maximum(finite, 0)), 0.0)


def _percentiles(s: StoredStatistics) -> list[Any]:
    from layerscope.stats import PERCENTILES, quantiles

    sketched, finite = (s.has & Has.SKETCH) != 0, _finite(s) > 0
    qs = [q / 100 for q in PERCENTILES]
    found = quantiles(qs, *s.sketches(), low=s.column("min"), high=s.column("max"))
    values = [np.where(finite, each, np.nan) for each in found]
    return values if sketched.all() else [_where_there(each, sketched) for each in values]


def _first(s: StoredStatistics) -> list[Array]:
    """Return the first values of each, as arrays: a hundred thousand lists are a second of the collector's time."""
    return [row[:count] for row, count in zip(s.column("first"), s.column("first_count").tolist(), strict=True)]


def _prints(s: StoredStatistics, which: int, bit: int) -> list[str | None]:
    digits = s.column("fingerprint")[:, which].astype(">u8").tobytes().hex()
    there, starts = (s.has & bit != 0).tolist(), range(0, len(digits), 16)
    return [digits[at : at + 16] if is_there else None for at, is_there in zip(starts, there, strict=True)]


def _where_there(values: Array, there: Array) -> list[float | None]:
    return [value if is_there else None for value, is_there in zip(values.tolist(), there.tolist(), strict=True)]
