"""table.py: rows that go elsewhere."""

from __future__ import annotations

import math
import sys

import pytest

from layerscope.errors import MissingExtra
from layerscope.store import Table

ROWS = [{"point": "a", "mean": 1.5, "first_10": [1.0, 2.0]}, {"point": "b", "mean": math.nan, "p50": 3.0}]


def test_every_row_has_every_column():
    table = Table(ROWS)
    assert table.columns == ["point", "mean", "first_10", "p50"]
    assert table[1]["first_10"] is None
    assert table[-2] == {"point": "a", "mean": 1.5, "first_10": [1.0, 2.0], "p50": None}
    assert [row["point"] for row in table] == ["a", "b"]
    assert len(table[:1]) == 1
    assert repr(table) == "Table(2 rows: point, mean, first_10, p50)"


def test_the_dictionaries_are_the_callers_own():
    table = Table(ROWS)
    table.to_dicts()[0]["point"] = "changed"
    assert table[0]["point"] == "a"


def test_to_pandas():
    frame = Table(ROWS).to_pandas()
    assert list(frame.columns) == ["point", "mean", "first_10", "p50"]
    assert frame["p50"][1] == 3.0


def test_to_parquet(tmp_path):
    import pyarrow.parquet as pq

    Table(ROWS).to_parquet(tmp_path / "x.parquet")
    back = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert back[0] == {"point": "a", "mean": 1.5, "first_10": [1.0, 2.0], "p50": None}
    assert math.isnan(back[1]["mean"])


@pytest.mark.parametrize(("module", "verb"), [("pandas", "to_pandas"), ("pyarrow", "to_parquet")])
def test_a_missing_extra_names_itself(monkeypatch, module, verb):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'layerscope\[parquet\]'"):
        getattr(Table(ROWS), verb)(*(["x"] if verb == "to_parquet" else []))
