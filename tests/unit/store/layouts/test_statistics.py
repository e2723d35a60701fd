"""Statistics as dumps carry them, read back as a Summary."""

import json
import math

import numpy as np
import pytest

from layerscope.errors import Damaged
from layerscope.stats import summarize
from layerscope.store import strictjson
from layerscope.store.address import LocalFolder
from layerscope.store.layouts.statistics import described, object_in, summary_of


def test_a_summary_is_written_and_read_back():
    values = np.array([[1.5, math.nan, -math.inf], [0.0, 2.0, 3.0]], np.float32)
    summary = summarize(values, level="moments")
    entry = described(summary)
    assert summary_of(strictjson.loads(strictjson.dumps(entry))) == summary
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (entry["mean"], entry["std"]) == (pytest.approx(finite.mean()), pytest.approx(finite.std()))
    assert entry["std_ddof"] == 0
    assert (entry["has_nan"], entry["has_inf"], entry["shape"], entry["dtype"]) == (True, True, [2, 3], "float32")


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_std_of_a_sample_is_said_to_be_one_and_read_back_as_the_populations(count):
    values = np.arange(count, dtype=np.float32) ** 2
    summary = summarize(values, level="moments")
    entry = described(summary, sample=True)
    assert entry["std_ddof"] == 1
    expected = values.astype(np.float64).std(ddof=1) if count > 1 else math.nan
    assert entry["std"] == pytest.approx(expected, nan_ok=True)
    back = summary_of(entry)
    assert back.std == pytest.approx(summary.std, rel=1e-15, nan_ok=True)
    assert (back.count, back.shape) == (summary.count, summary.shape)


def test_a_dtype_that_the_file_could_not_hold_is_said_beside_it():
    entry = described(summarize(np.ones(3, np.float16), level="moments"), written="float32")
    assert (entry["dtype"], entry["recorded_dtype"]) == ("float32", "float16")
    assert summary_of(entry).dtype == "float16"


@pytest.mark.parametrize(
    "change", [{"count": 7}, {"shape": None}, {"zeros": "many"}, {"first_10": 3}, {"nan": math.inf}]
)
def test_numbers_that_do_not_fit_together_are_no_summary(change):
    entry = described(summarize(np.ones(3), level="moments"))
    assert summary_of(entry) is not None
    assert summary_of({**entry, **change}) is None


def test_what_most_scripts_write_is_too_little():
    assert summary_of({"shape": [3], "mean": 1.0, "std": 0.0, "min": 1.0, "max": 1.0, "first_10": [1.0]}) is None
    assert summary_of("text") is None


def test_a_bare_nan_is_understood_and_other_things_are_damaged(tmp_path):
    files = LocalFolder(tmp_path)
    (tmp_path / "s.json").write_text(json.dumps({"a": math.nan, "b": "Infinity"}))
    read = object_in(files, "s.json")
    assert math.isnan(read["a"])
    assert read["b"] == math.inf
    (tmp_path / "s.json").write_bytes(b"\xff\xfe")
    with pytest.raises(Damaged, match=r"s\.json is not JSON"):
        object_in(files, "s.json")
