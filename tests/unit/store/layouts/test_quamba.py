"""Quamba's layout: files that numpy and json wrote by hand, and what is said of them."""

import json

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged, NoSuchPoint, Unsupported
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Manifest, open_run
from layerscope.store.layouts.convert import convert
from layerscope.store.layouts.statistics import described
from layerscope.store.memory import MemoryRun


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
    assert manifest.settings == {"calib_data_num": 10, "quantised": "mode 2-1"}


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16", "port"])
def test_a_mode_that_is_no_number_is_not_said_to_be_quantised(tmp_path, mode):
    np.save(tmp_path / f"mode_{mode}_layer_0.npy", np.ones((1, 2), np.float32))
    assert "quantised" not in open_run(tmp_path).manifest.settings


def test_statistics_are_those_of_the_arrays_and_not_of_the_file(dump, arrays):
    summary = open_run(dump).summary("layers.0")
    assert summary.mean == pytest.approx(arrays[0].astype(np.float64).mean(), rel=1e-12)


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


# Components -----------------------------------------------------------------------------------------


def test_component_dumps_are_points_of_their_layer(dump, arrays):
    u = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    np.save(dump / "mode_2-1_layer_0_ssm_input.npy", u)
    np.save(dump / "mode_2-1_layer_0_conv_output.npy", -u)
    np.save(dump / "mode_2-1_layer_0_gate_input.npy", u)  # no component that is known: another file
    run = open_run(dump)
    assert [str(p) for p in run.points] == [
        "layers.0.conv:output",
        "layers.0.ssm:input",
        "layers.0:output",
        "layers.23:output",
    ]
    for name in ("layers.0.ssm:input", "layer_0_ssm_input", "mode_2-1_layer_0_ssm_input"):
        np.testing.assert_array_equal(run.tensor(name).numpy(), u)
    np.testing.assert_array_equal(run.tensor("layers.0.conv").numpy(), -u)
    np.testing.assert_array_equal(run.tensor("layers.0").numpy(), arrays[0])


def test_a_folder_of_components_alone_is_a_run_of_each_mode(tmp_path):
    for mode in ("0", "2-1"):
        np.save(tmp_path / f"mode_{mode}_layer_7_ssm_output.npy", np.ones(3, np.float32))
    assert [str(p) for p in open_run(tmp_path, mode="2-1").points] == ["layers.7.ssm:output"]


@pytest.mark.parametrize("steps", [1, 2])
def test_codes_are_written_as_the_floats_they_stand_for(tmp_path, steps):
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 128, (steps, 1, 3, 4), dtype=np.int8)
    scale = np.float32(0.037)
    run = MemoryRun(Manifest(mode="0", model={"name": "m"}, settings={"calib_data_num": steps}))
    for step in range(steps):
        when = Moment(step=step, batch=step)
        run.add(Point("backbone.layers.0"), when, tensor=torch.full((1, 3, 4), float(step)))
        run.add(
            Point("backbone.layers.0.mixer.scan", "input", (0, "codes")), when, tensor=torch.from_numpy(codes[step])
        )
        run.add(Point("backbone.layers.0.mixer.scan", "input", (0, "scale")), when, tensor=torch.tensor(scale))
        run.add(Point("backbone.layers.0.mixer.scan", "input", (1,)), when, tensor=torch.ones(1, 3, 4))
    done = convert(run, tmp_path / "lo", layout="quamba")
    expected = codes.reshape(steps, 3, 4).astype(np.float32) * scale
    np.testing.assert_array_equal(np.load(tmp_path / "lo" / "mode_0_layer_0_ssm_input.npy"), expected)
    said = json.loads((tmp_path / "lo" / "mode_0_stats.json").read_text())["layer_0_ssm_input"]
    assert (said["dtype"], said["recorded_dtype"], said["shape"]) == ("float32", "int8", [steps, 3, 4])
    assert said["scale"] == pytest.approx(0.037)
    assert said["mean"] == pytest.approx(expected.astype(np.float64).mean(), rel=1e-6)
    assert [(str(left.point), left.records) for left in done.left_out] == [
        ("backbone.layers.0.mixer.scan:input[1]", steps)
    ]
    back = open_run(tmp_path / "lo")
    assert {str(p) for p in back.points} == {"layers.0.ssm:input", "layers.0:output"}
    again = convert(back, tmp_path / "again", layout="quamba")
    assert {each.file for each in again.written} == {"mode_0_layer_0.npy", "mode_0_layer_0_ssm_input.npy"}


def test_codes_of_several_scales_stand_for_no_one_float(tmp_path):
    run = MemoryRun(Manifest(mode="0", settings={"calib_data_num": 2}))
    for step in range(2):
        when = Moment(step=step, batch=step)
        run.add(Point("layers.0"), when, tensor=torch.ones(1, 2))
        run.add(Point("layers.0.scan", "input", ("codes",)), when, tensor=torch.ones(1, 2, dtype=torch.int8))
        run.add(Point("layers.0.scan", "input", ("scale",)), when, tensor=torch.tensor(0.5 + step))
    with pytest.raises(Unsupported, match="codes of 2 scales"):
        convert(run, tmp_path / "lo", layout="quamba")
    assert list((tmp_path / "lo").iterdir()) == []
