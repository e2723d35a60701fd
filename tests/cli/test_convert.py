"""`layerscope convert`: what it writes, what it prints, how it refuses."""

import json

import numpy as np
import pytest
import torch

from layerscope.cli.convert import LAYOUTS
from layerscope.store import open_run
from layerscope.store.layouts.convert import WRITTEN


def test_the_layouts_on_offer_are_those_that_are_written():
    assert LAYOUTS == WRITTEN


def test_a_run_becomes_files_that_numpy_loads(cli, trained, tmp_path):
    answer = cli("convert", trained, "layer_outputs", "--to", "quamba", "--mode", "fp32", "--step", "2")
    assert (answer.code, answer.err) == (0, "")
    assert "3 tensors written in the quamba layout, mode fp32; 12 records left out" in answer.out
    assert "mode_fp32_layer_0.npy" in answer.out
    assert "gradients have no place in the quamba layout" in answer.out
    assert np.load(tmp_path / "layer_outputs" / "mode_fp32_layer_2.npy").shape == (1, 10, 16)


def test_machines_get_the_same_as_json(cli, trained, tmp_path):
    answer = cli("convert", trained, "nn", "--to", "neuron", "--step", "0", "--json")
    page = json.loads(answer.out)
    assert page["converted"] == {
        "source": str(trained),
        "target": str(tmp_path / "nn"),
        "layout": "neuron",
        "mode": None,
    }
    written = {row["file"]: row for row in page["written"]}
    assert set(written) == {
        *("embedding_output.pt", "layer_1_output.pt", "layer_2_output.pt", "layer_3_output.pt", "logits_output.pt")
    }
    assert written["layer_1_output.pt"]["point"] == "model.layers.0:output"
    assert written["layer_1_output.pt"]["shape"] == [1, 10, 16]
    assert all(row["reason"] for row in page["left_out"])
    assert torch.load(tmp_path / "nn" / "layer_3_output.pt").shape == (1, 10, 16)


def test_patterns_choose_and_nothing_is_left_out(cli, trained):
    answer = cli("convert", trained, "lo", "model.layers.*", "--to", "quamba", "--mode", "0", "--step", "1")
    assert answer.code == 0
    assert "3 tensors written in the quamba layout, mode 0\n" in answer.out
    assert "left out" not in answer.out


def test_samples_that_went_through_in_several_forwards_become_one_file(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("layerscope.modes.preparing.TOKENS_AT_ONCE", 16)
    samples = ("--calib_data_num", "5", "--calib_seqlen", "8")
    assert cli("record", "tiny-transformer", "--mode", "bf16", "--layers", "all", *samples, "-o", "runs").code == 0
    assert len(open_run(tmp_path / "runs" / "bf16").moments) == 3
    answer = cli("convert", "runs/bf16", "lo", "--to", "quamba")
    assert (answer.code, answer.err) == (0, "")
    assert np.load(tmp_path / "lo" / "mode_bf16_layer_7.npy").shape[:2] == (5, 8)
    assert cli("convert", "runs/bf16", "one", "--to", "quamba", "--step", "2").code == 0
    assert np.load(tmp_path / "one" / "mode_bf16_layer_7.npy").shape[:2] == (1, 8)


def test_a_mode_of_a_folder_becomes_a_run(cli, tmp_path):
    (tmp_path / "lo").mkdir()
    for mode in ("fp32", "2-1"):
        np.save(tmp_path / "lo" / f"mode_{mode}_layer_0.npy", np.ones((2, 3), np.float16))
    answer = cli("convert", "lo:2-1", "runs/2-1", "--to", "layerscope")
    assert answer.code == 0
    assert "mode_2-1_stats.json is not there" in answer.out
    shown = cli("show", "runs/2-1")
    assert shown.code == 0
    assert "layers.0" in shown.out


def test_a_changed_dtype_is_said(cli, tmp_path):
    torch.save(torch.ones(2, 2, dtype=torch.bfloat16), tmp_path / "layer_1_output.pt")
    answer = cli("convert", ".", "lo", "--to", "quamba", "--mode", "bf16")
    assert "bfloat16 is written as float32" in answer.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("TRAINED", "lo", "--to", "quamba", "--mode", "0"), "was recorded at 3 moments"),
        (("TRAINED", "lo", "--to", "quamba", "--step", "0"), "say it with mode= or --mode"),
        (("TRAINED", "lo", "--to", "nonsense"), "is not one of"),
        (("TRAINED", "lo"), "Missing option '--to'"),
        (("nowhere", "lo", "--to", "quamba"), "there is nothing there"),
        (("TRAINED", "there", "--to", "layerscope"), "is already there"),
        (("TRAINED", "lo", "nothing.*", "--to", "layerscope"), "nothing.*"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(cli, trained, tmp_path, arguments, says):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.json").write_text("{}")
    answer = cli("convert", *(trained if word == "TRAINED" else word for word in arguments))
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err
    assert not (tmp_path / "lo").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_show_and_points_read_what_convert_wrote(cli, trained, layout):
    step = [] if layout in ("layerscope", "monitor") else ["--step", "0"]
    assert cli("convert", trained, "to", "--to", layout, "--mode", "m", *step).code == 0
    shown = cli("show", "to")
    assert (shown.code, shown.err) == (0, "")
    assert "layers.0" in shown.out
    if layout != "layerscope":
        assert f"a dump in the {layout} layout, which does not say whether it is complete" in shown.out
    assert "layers.0:output" in cli("points", "to").out
    assert json.loads(cli("show", "to", "--json").out)["run"]["layout"] == layout


def test_the_points_of_a_dump_of_arrays_are_listed_without_torch(fresh, tmp_path):
    np.save(tmp_path / "mode_fp32_layer_0.npy", np.ones((2, 2)))
    answer = fresh("points", ".", python=("-X", "importtime"))
    assert "layers.0:output" in answer.out
    modules = {line.rsplit("|", 1)[1].strip() for line in answer.err.splitlines() if line.startswith("import time:")}
    assert "numpy" in modules
    assert "torch" not in modules
