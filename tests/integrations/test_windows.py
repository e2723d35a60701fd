"""`convert` to what other tools look at: read back with json, and with TensorBoard's own reader."""

import json

import pytest
import torch
from torch import nn

from layerscope.cli import main
from layerscope.compare import compare
from layerscope.recorder import record
from layerscope.store import open_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name in ("a", "b"):
        with record(model, ["0", "1"], to=folder / name, keep="both"):
            for step in range(3):
                model(torch.full((2, 4), 1.0 + step))
        with torch.no_grad():
            model[1].weight *= 2
    return folder


@pytest.fixture
def saved(runs, tmp_path, capsys):
    to = tmp_path / "c.json"
    convert("compare", runs / "a", runs / "b", "--save_comparison", to, code=1)
    capsys.readouterr()
    return to


def convert(*args, code=0):
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in args])
    assert (left.value.code or 0) == code


def test_overlays_have_the_worst_of_each_module(runs, saved, tmp_path, capsys):
    convert("convert", saved, tmp_path / "over", "--to", "model-explorer")
    assert "written for Model Explorer" in capsys.readouterr().out
    data = json.loads((tmp_path / "over" / "b-relative_l2.json").read_text(), parse_constant=pytest.fail)
    rows = compare(runs / "a", runs / "b").rows
    worst = {name: max(row.metrics.relative_l2 for row in rows if row.name == name) for name in ("0", "1")}
    assert {key: one["value"] for key, one in data["main"]["results"].items()} == worst
    assert [stop["stop"] for stop in data["main"]["gradient"]] == [0, 1]


def test_what_is_not_finite_is_left_out_and_counted(saved, tmp_path, capsys):
    convert("convert", saved, tmp_path / "over", "--to", "model-explorer")
    data = json.loads((tmp_path / "over" / "b-sqnr.json").read_text(), parse_constant=pytest.fail)
    assert list(data["main"]["results"]) == ["1"]  # module 0 is equal: its signal has no noise
    assert "1 number left out, not finite" in capsys.readouterr().out


def test_a_run_has_an_overlay_for_each_statistic(runs, tmp_path):
    convert("convert", runs / "a", tmp_path / "over", "--to", "model-explorer")
    data = json.loads((tmp_path / "over" / "rms.json").read_text())
    expected = open_run(runs / "a").tensor("1", step=2).double().square().mean().sqrt().item()
    assert data["main"]["results"]["1"]["value"] == pytest.approx(expected, rel=1e-6)


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    read.Reload()
    return read


def test_tensorboard_reads_the_rows_of_a_comparison_and_the_histograms_of_its_runs(runs, saved, tmp_path, capsys):
    convert("convert", saved, tmp_path / "board", "--to", "tensorboard")
    assert "6 rows written" in capsys.readouterr().out
    rows = [row for row in compare(runs / "a", runs / "b").rows if row.name == "1"]
    told = events(tmp_path / "board" / "b").Scalars("relative_l2/1:output")
    assert [one.step for one in told] == [0, 1, 2]
    assert [one.value for one in told] == pytest.approx([row.metrics.relative_l2 for row in rows], rel=1e-6)
    histograms = events(tmp_path / "board" / "runs" / "a").Histograms("histogram/1:output")
    assert [one.histogram_value.num for one in histograms] == [8, 8, 8]


def test_tensorboard_reads_the_steps_of_a_run(runs, tmp_path):
    convert("convert", runs / "a", tmp_path / "board", "--to", "tensorboard")
    told = events(tmp_path / "board").Scalars("mean/0:output")
    expected = [open_run(runs / "a").tensor("0", step=step).double().mean().item() for step in range(3)]
    assert [one.value for one in told] == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_options_of_layouts_are_refused(runs, tmp_path, capsys):
    convert("convert", runs / "a", tmp_path / "x", "0", "--to", "tensorboard", code=2)
    assert "leave out PATTERN" in capsys.readouterr().err


def test_a_hostile_candidate_leads_nowhere_else(runs, tmp_path):
    from dataclasses import replace

    from layerscope.integrations.modelexplorer import write_overlays

    found = compare(runs / "a", runs / "b")
    hostile = replace(found, candidates=(replace(found.candidates[0], candidate="../../../evil\x1b"),))
    files, _ = write_overlays(hostile, tmp_path / "in")
    assert {file.parent for file in files} == {tmp_path / "in"}
