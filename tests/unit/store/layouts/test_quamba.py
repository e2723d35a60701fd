"""Quamba's layout: files that numpy and json wrote by hand, and what is said of them."""

import json

import numpy as np
import pytest

from layerscope.errors import Damaged, NoSuchPoint
from layerscope.points import Point
from layerscope.stats import summarize
from layerscope.store import open_run
from layerscope.store.layouts.statistics import described


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {layer: rng.standard_normal((1, 5, 8)).astype(np.float32) for layer in (0, 23)}


@pytest.fixture
def dump(tmp_path, arrays):
    for layer, array in arrays.items():
        np.save(tmp_path / f"mode_2-1_layer_{layer}.npy", array)
    said = {"mode": "2-1", "model": "quamba-130m-w8a8", "calib_data_num": 10, "layer_0": {"mean": float("nan")}}
    (tmp_path / "mode_2-1_stats.json").write_text(json.dumps(said))
    return tmp_path


def test_layers_count_from_0_and_are_found_under_every_name_of_theirs(dump, arrays):
    run = open_run(dump)
    assert run.points == [Point("layers.0"), Point("layers.23")]
    for layer, array in arrays.items():
        for name in (f"layers.{layer}", f"layer_{layer}", f"mode_2-1_layer_{layer}", f"layer_{layer}_output"):
            np.testing.assert_array_equal(run.tensor(name).numpy(), array)


def test_the_manifest_has_mode_model_and_settings(dump):
    manifest = open_run(dump).manifest
    assert (manifest.mode, manifest.model) == ("2-1", {"name": "quamba-130m-w8a8"})
    assert manifest.settings == {"calib_data_num": 10}


def test_statistics_are_those_of_the_arrays_and_not_of_the_file(dump, arrays):
    summary = open_run(dump).summary("layers.0")
    assert summary.mean == pytest.approx(arrays[0].astype(np.float64).mean(), rel=1e-12)


def test_pieces_are_the_array_in_order(dump, arrays):
    (entry,) = open_run(dump).records("layers.23")
    pieces = [piece.numpy() for piece in entry.pieces(7)]
    assert [len(piece) for piece in pieces] == [7, 7, 7, 7, 7, 5]
    np.testing.assert_array_equal(np.concatenate(pieces), arrays[23].reshape(-1))


def test_a_missing_statistics_file_is_a_note(dump):
    assert open_run(dump).notes == []
    (dump / "mode_2-1_stats.json").unlink()
    assert open_run(dump).notes == ["mode_2-1_stats.json is not there: model and settings are unknown"]


def test_statistics_alone_are_summaries_where_enough_is_said(tmp_path, arrays):
    summary = summarize(arrays[0], level="moments")
    said = {"mode": "0", "layer_0": described(summary), "layer_1": {"mean": 0.5, "std": 1.0}}
    (tmp_path / "mode_0_stats.json").write_text(json.dumps(said))
    run = open_run(tmp_path)
    assert run.points == [Point("layers.0")]
    assert run.summary("layer_0") == summary
    assert run.notes == ["layer_1 has some statistics and no array, too few for a summary: it is passed over"]
    with pytest.raises(NoSuchPoint, match="a summary and no tensor"):
        run.tensor("layer_0")


def test_a_torn_statistics_file_is_damaged_by_name(dump):
    (dump / "mode_2-1_stats.json").write_text('{"mode": "2-1", ')
    with pytest.raises(Damaged, match=r"mode_2-1_stats\.json is not JSON"):
        open_run(dump)
    (dump / "mode_2-1_stats.json").write_text("[1]")
    with pytest.raises(Damaged, match="a JSON list, and an object is expected"):
        open_run(dump)
