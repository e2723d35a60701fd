"""Files that are whole or not there."""

import json
import math

import numpy as np
import pytest
import torch

from layerscope.errors import Unsupported
from layerscope.points import Moment, Point
from layerscope.store.layouts import files
from layerscope.store.layouts.files import FileBatch, numpy_dtype, write_json, write_npy, write_pt
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.source import Item


def entry_of(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    item = Item(Point("p"), Moment(), name, tuple(tensor.shape), tensor.nbytes, lambda: tensor)
    (entry,) = foreign_run("a", "x", [item]).records()
    return entry


def test_a_batch_is_there_at_its_end_and_not_before(tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "stale").write_text("old")
    with FileBatch(tmp_path / "to") as batch:
        batch.new("a").write_text("new")
        batch.forget("stale")
        assert [p.name for p in sorted((tmp_path / "to").iterdir())] == ["a.partial", "stale"]
    assert [p.name for p in (tmp_path / "to").iterdir()] == ["a"]


def test_a_batch_that_fails_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "a").write_text("old")

    def fail():
        with FileBatch(tmp_path) as batch:
            batch.new("a").write_text("new")
            batch.forget("a")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "old"}


def test_a_batch_that_cannot_take_its_place_leaves_nothing_beside(tmp_path):
    (tmp_path / "a").mkdir()

    def fail():
        with FileBatch(tmp_path) as batch:
            batch.new("a").write_text("new")
            batch.new("b").write_text("new")

    with pytest.raises(OSError, match="directory"):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "int8", "bool", "complex64", "uint16"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_an_array_is_what_numpy_loads(tmp_path, dtype, shape, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 4)  # several pieces even of a small tensor
    tensor = (torch.arange(math.prod(shape)).reshape(shape) - 3).abs().to(getattr(torch, dtype))
    summary, written = write_npy(tmp_path / "a.npy", entry_of(tensor))
    loaded = np.load(tmp_path / "a.npy")
    assert (str(loaded.dtype), loaded.shape) == (written, shape)
    wanted = tensor.float() if dtype in ("bfloat16", "float8_e5m2") else tensor
    np.testing.assert_array_equal(loaded, wanted.numpy())
    assert (summary.dtype, summary.shape, summary.count, summary.tensors) == (dtype, shape, tensor.numel(), 1)
    if tensor.numel():
        exact = np.abs(loaded) if dtype == "complex64" else loaded.astype(np.float64)
        assert summary.mean == pytest.approx(exact.mean())
        assert summary.std == pytest.approx(exact.std())
        assert list(summary.first) == exact.reshape(-1)[:4].tolist()[: len(summary.first)]


def test_the_first_values_are_ten_where_there_are_ten(tmp_path):
    summary, _ = write_npy(tmp_path / "a.npy", entry_of(torch.arange(30.0)))
    assert summary.first == tuple(range(10))


def test_what_numpy_has_no_word_for_goes_as_float32_or_not_at_all():
    assert [numpy_dtype(d) for d in ("float64", "bfloat16", "float8_e4m3fn", "complex32")] == [
        *("float64", "float32", "float32", "complex64")
    ]
    with pytest.raises(Unsupported, match="numpy has no dtype for float4_e2m1fn_x2"):
        numpy_dtype("float4_e2m1fn_x2")


def test_saved_values_load_with_torchs_defaults(tmp_path):
    write_pt(tmp_path / "a.pt", {"a": torch.ones(2, dtype=torch.bfloat16), "b": [1, math.inf]})
    loaded = torch.load(tmp_path / "a.pt")
    assert loaded["a"].dtype == torch.bfloat16
    assert loaded["b"] == [1, math.inf]


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "a.json", {"mean": math.nan, "shape": (1, 2)})

    def refuse(name):
        raise ValueError(name)

    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"mean": "NaN", "shape": [1, 2]}
