"""`layerscope show --over`: a line for each statistic of one point, and the numbers behind it."""

import json
import math

import numpy as np
import pytest
import torch

from layerscope.cli.over import document
from layerscope.recorder import record
from layerscope.report import terminal
from layerscope.store import open_run

HEIGHTS = "▁▂▃▄▅▆▇█"


@pytest.fixture
def run(tmp_path):
    """Write a run of one module that passes given values on: `run([tensors], per_epoch=...)`."""

    def write(values, *, per_epoch=None, name="run", **how):
        model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
        with record(model, ["0"], to=tmp_path / name, **how) as rec:
            for at, x in enumerate(values):
                if per_epoch is not None and at % per_epoch == 0:
                    rec.moment(epoch=at // per_epoch)
                model(x)
        return tmp_path / name

    return write


def drawn(path, width, *, over="steps", point="0"):
    """Return the lines at a width: {title: (drawing, what stands behind it)}."""
    page, _ = document(open_run(path), "run", over=over, point=point, given={}, progress=lambda *_: None)
    lines = {}
    for line in terminal.render(page, width=width).splitlines():
        title, _, rest = line.partition("  ")
        drawing = rest.strip().partition("  ")
        if drawing[0] and set(drawing[0]) <= {*HEIGHTS, "!", "0"}:
            lines[title.strip()] = (drawing[0], drawing[2].strip())
    return lines


def test_the_numbers_are_those_of_the_tensors(cli, run):
    values = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(5)]
    path = run(values, keep="summary")
    page = json.loads(cli("show", path, "--over", "steps", "--point", "0", "--json").out)
    assert [row["step"] for row in page["over"]] == [0, 1, 2, 3, 4]
    for row, x in zip(page["over"], values, strict=True):
        array = x.double().numpy()
        assert row["mean"] == pytest.approx(array.mean(), rel=1e-6)
        assert row["std"] == pytest.approx(array.std(), rel=1e-6)
        assert row["absmax"] == np.abs(array).max()
        assert row["l2"] == pytest.approx(np.linalg.norm(array), rel=1e-6)


@pytest.mark.parametrize(("over", "key"), [("epochs", "epoch"), ("batches", "batch")])
def test_epochs_and_batches_are_added_up(cli, run, over, key):
    values = [torch.full((2,), float(i)) for i in range(6)]
    page = json.loads(cli("show", run(values, per_epoch=3), "--over", over, "--point", "0", "--json").out)
    together = {"epochs": [[0, 1, 2], [3, 4, 5]], "batches": [[0, 3], [1, 4], [2, 5]]}[over]
    assert [row[key] for row in page["over"]] == list(range(len(together)))
    assert [row["step"] for row in page["over"]] == [None] * len(together)
    assert [row["mean"] for row in page["over"]] == pytest.approx([np.mean(group) for group in together])
    assert [row["count"] for row in page["over"]] == [2 * len(group) for group in together]


@pytest.mark.parametrize("width", [80, 140])
def test_a_line_rises_where_the_values_rise(run, width):
    path = run([torch.tensor([i, -i / 2]) for i in np.linspace(0.5, 4, 8, dtype="float32")])
    lines = drawn(path, width)
    assert list(lines) == ["mean", "std", "min", "max", "absmax", "l2"]
    assert lines["absmax"][0] == HEIGHTS
    assert lines["min"][0] == HEIGHTS[::-1]
    assert lines["absmax"][1] == "0.5000 (step 0) → 4.000 (step 7)"


def test_one_step_among_thousands_is_not_averaged_away(run):
    values = [torch.tensor([1.0]) for _ in range(500)]
    values[321] = torch.tensor([100.0])
    values[322] = torch.tensor([-50.0])
    for width in (80, 140):
        lines = drawn(run(values, keep="summary", name=f"w{width}"), width)
        assert lines["max"][0].count("█") >= 1
        assert "▁" in lines["min"][0]
        assert len(lines["max"][0]) <= 60


def test_the_step_of_a_spike_is_named(cli, run):
    values = [torch.tensor([1.0, -2.0]) for _ in range(9)]
    assert "leaves its median" not in cli("show", run(values, name="even"), "--over", "steps", "--point", "0").out
    values[6] = torch.tensor([-300.0, 1.0])
    told = cli("show", run(values), "--over", "steps", "--point", "0")
    assert "absmax leaves its median of 2.000 at step 6 (300.0)\n" in told.out
    values[7] = torch.tensor([400.0, 1.0])
    told = cli("show", run(values, name="twice"), "--over", "steps", "--point", "0")
    assert "at step 6 (300.0); largest at step 7 (400.0)" in told.out


def test_what_grows_over_decades_is_drawn_on_a_logarithmic_scale(run):
    lines = drawn(run([torch.tensor([10.0**i]) for i in range(8)]), 140)
    assert lines["absmax, log"][0] == HEIGHTS
    assert "absmax" not in lines


def test_what_is_not_finite_is_said_with_its_step(cli, run):
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan, math.inf, 2.0])
    told = cli("show", run([good, good, bad, good, bad]), "--over", "steps", "--point", "0")
    assert told.code == 0
    assert "not finite: first at step 2, 2 of 4 values; in 2 of 5 steps altogether" in told.out
    assert "nan/inf" in told.out
    assert "not finite" not in cli("show", run([good, good], name="healthy"), "--over", "steps", "--point", "0").out


def test_one_moment_is_said_to_be_one(cli, run):
    told = cli("show", run([torch.ones(3)]), "--over", "steps", "--point", "0")
    assert told.code == 0
    assert "there is one step only, and no line to draw" in told.out
    assert "▁" not in told.out


def test_a_point_that_is_not_there_has_near_names(cli, trained):
    told = cli("show", trained, "--over", "steps", "--point", "model.layer.1")
    assert told.code == 2
    assert "nearest: model.layers.1" in told.err


def test_several_points_are_listed(cli, trained):
    told = cli("show", trained, "--over", "steps", "--point", "model.layers.*")
    assert told.code == 2
    assert "names 3 points, and lines are of one: model.layers.0:output, model.layers.1:output" in told.err


def test_gradients_have_lines_too(cli, trained):
    told = cli("show", trained, "--over", "steps", "--point", "model.layers.1:grad_output", "--json")
    run = open_run(trained)
    means = [run.tensor("model.layers.1:grad_output", step=s).double().mean().item() for s in range(3)]
    assert [row["mean"] for row in json.loads(told.out)["over"]] == pytest.approx(means, rel=1e-4, abs=1e-10)


def test_moments_narrow_the_line(cli, run):
    path = run([torch.full((2,), float(i)) for i in range(6)], per_epoch=3)
    told = cli("show", path, "--over", "steps", "--point", "0", "--epoch", "1", "--json")
    assert [row["mean"] for row in json.loads(told.out)["over"]] == [3, 4, 5]
    nothing = cli("show", path, "--over", "steps", "--point", "0", "--epoch", "9")
    assert nothing.code == 2
    assert "0:output has no record at --epoch 9; the run has step 0-5" in nothing.err


def test_epochs_that_were_never_named_are_said_to_be_missing(cli, run):
    told = cli("show", run([torch.ones(2)] * 3), "--over", "epochs", "--point", "0")
    assert told.code == 2
    assert "no epoch was named while 0:output was recorded; --over steps shows it." in told.err


@pytest.mark.parametrize(
    "given", [["--over", "steps"], ["--point", "0"], ["0", "--over", "steps", "--point", "0"]], ids=str
)
def test_half_a_question_is_refused(cli, run, given):
    told = cli("show", run([torch.ones(2)]), *given)
    assert told.code == 2
    assert "--over steps --point POINT" in told.err


def test_markdown_has_the_lines(cli, run):
    told = cli(
        "show", run([torch.full((2,), float(i)) for i in range(4)]), "--over", "steps", "--point", "0", "--markdown"
    )
    assert "**mean** `▁▃▆█` from 0 (step 0) to 3.000 (step 3)" in told.out


def test_a_record_that_cannot_be_read_leaves_the_others(cli, run):
    path = run([torch.full((512,), float(i)) for i in range(4)], keep="tensor")
    (segment,) = path.rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[data.index(torch.full((512,), 3.0).numpy().tobytes()) + 8] ^= 0xFF  # in the values of the last record
    segment.write_bytes(data)
    told = cli("show", path, "--over", "steps", "--point", "0", "--json")
    assert told.code == 2
    assert len(json.loads(told.out)["over"]) == 3
