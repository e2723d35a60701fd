"""A run's summaries as rows.

    table = run.summaries()
    table[0]["mean"]; table.to_dicts(); table.to_pandas(); table.to_parquet("summaries.parquet")

pandas and pyarrow are needed only by the verbs that are named after them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final, overload

from layerscope.errors import MissingExtra

__all__ = ["Table"]


@final
class Table(Sequence[dict[str, Any]]):
    """Rows of one record each, all with the same columns: where and when, then the statistics.

    A column that a row has no value for holds None.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        rows = list(rows)
        self.columns: list[str] = list(dict.fromkeys(name for row in rows for name in row))
        self._rows = [{name: row.get(name) for name in self.columns} for row in rows]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Table:
        return Table(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain dictionaries of their own."""
        return [dict(row) for row in self._rows]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame; raises MissingExtra without pandas."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra("to_pandas takes pandas: pip install 'layerscope[parquet]'") from error
        return pd.DataFrame(self._rows, columns=self.columns)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file; raises MissingExtra without pyarrow."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtra("to_parquet takes pyarrow: pip install 'layerscope[parquet]'") from error
        pq.write_table(pa.Table.from_pylist(self._rows), os.fspath(path))
