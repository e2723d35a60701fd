"""table.py: rows that go elsewhere."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from layerscope.errors import MissingExtra
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, MemoryRun, RecordTable, Writer, open_run

ROWS = [{"point": "a", "mean": 1.5, "first_10": [1.0, 2.0]}, {"point": "b", "mean": math.nan, "p50": 3.0}]


def test_every_row_has_every_column():
    table = RecordTable(ROWS)
    assert table.columns == ["point", "mean", "first_10", "p50"]
    assert table[1]["first_10"] is None
    assert table[-2] == {"point": "a", "mean": 1.5, "first_10": [1.0, 2.0], "p50": None}
    assert [row["point"] for row in table] == ["a", "b"]
    assert len(table[:1]) == 1
    assert repr(table) == "Table(2 rows: point, mean, first_10, p50)"


def test_the_dictionaries_are_the_callers_own():
    table = RecordTable(ROWS)
    table.to_dicts()[0]["point"] = "changed"
    assert table[0]["point"] == "a"


def test_to_pandas():
    frame = RecordTable(ROWS).to_pandas()
    assert list(frame.columns) == ["point", "mean", "first_10", "p50"]
    assert frame["p50"][1] == 3.0


def test_to_parquet(tmp_path):
    import pyarrow.parquet as pq

    RecordTable(ROWS).to_parquet(tmp_path / "x.parquet")
    back = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert back[0] == {"point": "a", "mean": 1.5, "first_10": [1.0, 2.0], "p50": None}
    assert math.isnan(back[1]["mean"])


@pytest.mark.parametrize(("module", "verb"), [("pandas", "to_pandas"), ("pyarrow", "to_parquet")])
def test_a_missing_extra_names_itself(monkeypatch, module, verb):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'layerscope\[parquet\]'"):
        getattr(RecordTable(ROWS), verb)(*(["x"] if verb == "to_parquet" else []))


# A run's summaries -------------------------------------------------------------------------------


def values(n: int) -> np.ndarray:
    array = np.random.default_rng(n).normal(0, 10.0 ** (n % 7 - 3), 50 + n).astype(np.float32)
    array[: n % 4] = [np.nan, np.inf, -0.0][: n % 4]
    return np.full(3, np.nan, np.float32) if n == 5 else array[:0] if n == 6 else array


def recorded(kind: str, path):
    """Forty records in several segments: statistics, tensors, both, and some of them twice."""
    run = MemoryRun() if kind == "memory" else Writer(path, Manifest(), segment_tensors=4)
    for n in [*range(40), 7, 3]:
        array = values(n)
        summary = None if n % 5 == 0 else replace(summarize(array), sketch=None) if n % 9 == 8 else summarize(array)
        where = Point("a.b", "input", ("k", n % 3)), Moment(n % 2 or None, n, n, n % 2, 0)
        if kind == "memory":
            import torch

            run.add(*where, tensor=None if n % 5 == 1 else torch.from_numpy(array), summary=summary)
        else:
            blob = None if n % 5 == 1 else Blob("float32", array.shape, array.nbytes, lambda array=array: array)
            run.write(*where, blob=blob, summary=summary)
    run.close()
    return run if kind == "memory" else open_run(path)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_every_column_is_what_each_summary_says_by_itself(tmp_path, kind):
    """Percentiles to the last bit; `rms` and `l2`, a hypotenuse of numpy's and not of Python's, to one unit in it."""
    run = recorded(kind, tmp_path / "run")
    table = run.summaries()
    entries = list(run.records())
    assert len(table) == len(entries) == 40
    for row, entry in zip(table.to_dicts(), entries, strict=True):
        summary = entry.summary or summarize(entry.tensor())
        expected = {
            "point": str(entry.point),
            "name": "a.b",
            "side": "input",
            "epoch": entry.moment.epoch,
        } | summary.row()
        for name, value in expected.items():
            if isinstance(value, float):
                units = {"rms": 1, "l2": 2}.get(name, 0)
                np.testing.assert_array_max_ulp(np.float64(row[name]), np.float64(value), units)
            elif name == "first_10":
                assert np.array(row[name]).tobytes() == np.array(value).tobytes()
            else:
                assert row[name] == value, name


def test_percentiles_come_from_sketches_bit_for_bit(tmp_path):
    run = recorded("disk", tmp_path / "run")
    for q in (1, 5, 50, 95, 99):
        column = run.summaries().column(f"p{q}")
        for value, entry in zip(column, run.records(), strict=True):
            summary = entry.summary or summarize(entry.tensor())
            if summary.sketch is None:
                assert value is None
            else:
                assert np.float64(value).tobytes() == np.float64(summary.percentile(q)).tobytes()


def test_pandas_and_arrow_get_the_same_columns(tmp_path):
    table = recorded("disk", tmp_path / "run").summaries()
    frame, arrow = table.to_pandas(), table.to_arrow()
    assert list(frame.columns) == arrow.column_names == table.columns
    np.testing.assert_array_equal(frame["mean"].to_numpy(), np.array(table.column("mean"), np.float64))
    assert arrow["count"].to_pylist() == list(table.column("count"))
    assert arrow["step"].to_pylist() == [entry.moment.step for entry in recorded("memory", None).records()]


def test_some_rows_of_a_table_are_those_rows(tmp_path):
    table = recorded("disk", tmp_path / "run").summaries()
    some = table[3:20:4]
    assert [row["step"] for row in some] == [row["step"] for row in table.to_dicts()[3:20:4]]
    assert (len(some), some.columns) == (5, table.columns)
