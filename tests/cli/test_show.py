"""`layerscope show`: the numbers are those of the tensors, and what is not there is said."""

import json
import math
import os
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch

from layerscope.models.tiny import tiny_transformer
from layerscope.points import Moment, Point
from layerscope.recorder import Tap, record
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Writer, disk, dtypes, open_run


def read(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def two_steps(tmp_path):
    """Write a run of given modules: `two_steps(net, patterns, inputs, **how)`."""

    def write(model, taps, inputs, **how):
        to = tmp_path / "made"
        with record(model, taps, to=to, **how):
            for x in inputs:
                model(x)
        return to

    return write


def test_the_statistics_are_those_of_the_stored_tensors(cli, trained):
    page = read(cli("show", trained, "--json").out)
    run = open_run(trained)
    assert len(page["points"]) == len(run.points) == 15
    for row in page["points"]:
        values = run.tensor(row["point"], step=2).double().numpy()
        assert row["step"] == 2
        assert row["shape"] == list(values.shape)
        assert row["mean"] == pytest.approx(values.mean(), rel=1e-6, abs=1e-9)
        assert row["std"] == pytest.approx(values.std(), rel=1e-6)
        assert row["rms"] == pytest.approx(math.sqrt((values**2).mean()), rel=1e-6)
        assert (row["min"], row["max"]) == (values.min(), values.max())
        assert row["zeros_share"] == (values == 0).mean()
        assert row["first_10"] == pytest.approx(values.ravel()[:10].tolist())
        spread = values.max() - values.min()
        assert row["p50"] == pytest.approx(np.percentile(values, 50), abs=0.05 * spread)


def test_the_latest_step_is_shown_and_said_and_another_can_be_asked_for(cli, trained):
    assert "step 2, the latest of 0-2" in cli("show", trained).out
    page = read(cli("show", trained, "model.norm", "--step", "0", "--json").out)
    expected = open_run(trained).tensor("model.norm", step=0).double().mean().item()
    assert page["points"][0]["mean"] == pytest.approx(expected, rel=1e-6)
    assert page["points"][0]["step"] == 0


def test_patterns_choose_points_and_sides(cli, trained):
    page = read(cli("show", trained, "model.layers.{0,-1}:grad_output", "--json").out)
    assert [row["point"] for row in page["points"]] == ["model.layers.0:grad_output", "model.layers.2:grad_output"]


def test_rows_come_in_the_order_of_depth_for_gradients_too(cli, trained):
    page = read(cli("show", trained, "--json").out)
    for side in ("input", "output", "grad_input", "grad_output"):
        names = [row["name"] for row in page["points"] if row["side"] == side and "layers" in row["name"]]
        assert names == ["model.layers.0", "model.layers.1", "model.layers.2"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("model.layer.*",), "nearest"),
        (("model.norm:input",), "there is model.norm:output"),
        (("type:Linear",), "a run keeps names, not classes"),
        (("--step", "9"), "there is step 0-2"),
        (("a[",), "never closed"),
        (("--json", "--markdown"), "ask for one of them"),
    ],
)
def test_what_is_not_there_is_exit_code_2_and_says_what_is(cli, trained, args, said):
    answer = cli("show", trained, *args)
    assert answer.code == 2
    assert said in answer.err
    assert answer.out == ""


def test_a_complete_run_says_so_and_an_incomplete_one_says_what_is_missing(cli, two_steps, trained):
    assert "✓ complete: 3 forwards, 15 points, 45 records" in cli("show", trained).out
    net = torch.nn.ModuleDict({"used": torch.nn.ReLU(), "unused": torch.nn.ReLU()})
    net.forward = lambda x: net["used"](x)
    answer = cli("show", two_steps(net, ["used", "unused"], [torch.ones(2)]))
    assert answer.code == 0
    assert "1 point missing" in answer.out
    assert "unused:output" in answer.out


def test_values_that_are_not_finite_are_named_first_and_counted(cli, two_steps):
    class Broken(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.tensor([math.nan, math.inf, -math.inf])])

    net = torch.nn.Sequential(torch.nn.ReLU(), Broken(), torch.nn.Identity())
    run = two_steps(net, "*", [torch.ones(4)])
    answer = cli("show", run)
    assert "✗ not finite: first in 1:output, 1 nan 1 inf 1 -inf; in 2 points altogether" in answer.out
    rows = {row["name"]: row for row in read(cli("show", run, "--json").out)["points"]}
    assert [rows[n]["nan"] for n in "012"] == [0, 1, 1]
    assert rows["1"]["mean"] == 1.0
    healthy = cli("show", run, "0")
    assert "not finite" not in healthy.out


def test_a_tensor_without_any_finite_value_is_shown_in_words(cli, two_steps):
    run = two_steps(torch.nn.Sequential(torch.nn.Identity()), "0", [torch.full((3,), math.nan)])
    assert re.search(r"^0 .* nan ", cli("show", run).out, re.MULTILINE)
    assert read(cli("show", run, "--json").out)["points"][0]["mean"] == "NaN"


def test_every_call_of_a_module_has_its_row(cli, two_steps):
    act = torch.nn.ReLU()
    net = torch.nn.Sequential(act, torch.nn.Linear(3, 3), act)
    run = two_steps(net, "0", [torch.ones(2, 3)])
    rows = read(cli("show", run, "--json").out)["points"]
    assert [(row["point"], row["call"]) for row in rows] == [("0:output", 0), ("0:output", 1)]
    assert len(read(cli("show", run, "--call", "1", "--json").out)["points"]) == 1


@pytest.mark.parametrize("keep", ["tensor", "summary", "both"])
def test_whatever_was_kept_gives_the_same_statistics(cli, two_steps, keep):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    row = read(cli("show", two_steps(torch.nn.Sequential(torch.nn.Identity()), "0", [x], keep=keep), "--json").out)
    assert row["points"][0]["mean"] == pytest.approx(x.double().mean().item(), rel=1e-6)
    assert row["points"][0]["dtype"] == "float32"
    assert row["points"][0]["shape"] == [4, 5]


def test_hostile_names_stay_text_in_every_form(cli, two_steps):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("a\x1b[2J", "</script>|`", "[bold]x", "层"):
                self.add_module(name, torch.nn.ReLU())

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

    run = two_steps(Net(), "*", [torch.ones(2)])
    for form in ((), ("--json",), ("--markdown",)):
        answer = cli("show", run, *form)
        assert answer.code == 0
        assert "\x1b" not in answer.out
    assert "\\u001b\\[2J" in cli("show", run).out
    names = [row["name"] for row in read(cli("show", run, "--json").out)["points"]]
    assert names == ["a\x1b[2J", "</script>|`", "[bold]x", "层"]


def test_piped_output_is_never_shortened(cli, two_steps):
    name = "x" * 300
    net = torch.nn.Sequential()
    net.add_module(name, torch.nn.ReLU())
    out = cli("show", two_steps(net, "*", [torch.ones(2)])).out
    assert name in out
    assert "left out" not in out
    assert "p99" in out


# --adjacent -------------------------------------------------------------------------------------


def adjacent(answer) -> list[dict]:
    assert answer.code == 0
    return read(answer.out)["adjacent"]


def test_the_change_from_layer_to_layer_is_that_of_the_tensors(cli, trained):
    rows = adjacent(cli("show", trained, "--adjacent", "--json"))
    run = open_run(trained)
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3))]
    assert [(r["before"], r["after"]) for r in rows] == [(f"{a}:output", f"{b}:output") for a, b in pairwise(names)]
    for row in rows:
        a, b = (run.tensor(row[k], step=2).double().numpy().ravel() for k in ("before", "after"))
        d = b - a
        assert row["basis"] == "tensors"
        assert row["max_abs"] == np.abs(d).max()
        assert row["mean_abs"] == pytest.approx(np.abs(d).mean(), rel=1e-12)
        assert row["relative_l2"] == pytest.approx(np.linalg.norm(d) / np.linalg.norm(a), rel=1e-12)
        assert row["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)


def test_without_tensors_the_summaries_give_bounds_that_hold_and_are_marked(cli, two_steps, tmp_path):
    ids = torch.arange(12).view(1, 12)
    model = tiny_transformer(layers=3, hidden=16, heads=2)
    run = two_steps(model, ["model.embed_tokens", "model.layers.*"], [ids], keep="summary")
    rows = adjacent(cli("show", run, "--adjacent", "--json"))
    page = cli("show", run, "--adjacent").out
    assert "at least what the summaries show" in page
    assert ">=" in page
    kept = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, i, o, name=name: kept.update({name: o}))
    model(ids)
    assert len(rows) == 3
    for row in rows:
        a, b = (kept[row[k].removesuffix(":output")].detach().double() for k in ("before", "after"))
        d = b - a
        assert row["basis"] == "summaries"
        assert 0 < row["max_abs"] <= d.abs().max().item() + 1e-12
        assert row["mean_abs"] <= d.abs().mean().item() + 1e-12
        assert row["relative_l2"] <= (d.norm() / a.norm()).item() + 1e-9
        assert row["cosine"] is None


def test_a_change_skips_what_is_not_finite_and_counts_it(cli, two_steps):
    class Spoil(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            y[0] = math.inf
            return y

    run = two_steps(torch.nn.Sequential(torch.nn.Identity(), Spoil()), "*", [torch.arange(4.0)])
    (row,) = adjacent(cli("show", run, "--adjacent", "--json"))
    assert (row["nonfinite"], row["max_abs"], row["mean_abs"]) == (1, 1.0, 1.0)


def test_chains_break_where_the_shape_changes(cli, two_steps):
    net = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in ((4, 4), (4, 4), (4, 6), (6, 6))))
    rows = adjacent(cli("show", two_steps(net, "*", [torch.ones(1, 4)]), "--adjacent", "--json"))
    assert [(r["before"], r["after"]) for r in rows] == [("0:output", "1:output"), ("2:output", "3:output")]


def test_inside_the_layers_is_shown_when_it_is_asked_for(cli, two_steps):
    model = tiny_transformer(layers=2, hidden=16, heads=2)
    run = two_steps(model, ["model.layers.*", "model.layers.*.mlp"], [torch.arange(5).view(1, 5)])
    everything = adjacent(cli("show", run, "--adjacent", "--json"))
    assert [r["after"] for r in everything] == ["model.layers.1:output"]
    asked = adjacent(cli("show", run, "**.mlp", "--adjacent", "--json"))
    assert [(r["before"], r["after"]) for r in asked] == [("model.layers.0.mlp:output", "model.layers.1.mlp:output")]


def test_points_that_are_nobodys_neighbours_are_said_to_be_that(cli, two_steps):
    net = torch.nn.ModuleDict({"one": torch.nn.ReLU()})
    net.forward = lambda x: net["one"](x)
    answer = cli("show", two_steps(net, "one", [torch.ones(2)]), "--adjacent")
    assert answer.code == 0
    assert "no two of these points are neighbours" in answer.out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64])
def test_every_dtype_has_a_change(cli, two_steps, dtype):
    class Cast(torch.nn.Module):
        def forward(self, x):
            return (x + 1 if dtype not in (torch.bool, torch.float8_e4m3fn) else x.float()).to(dtype)

    net = torch.nn.Sequential(Cast(), Cast())
    (row,) = adjacent(cli("show", two_steps(net, "*", [torch.ones(3).to(dtype)]), "--adjacent", "--json"))
    assert row["basis"] == "tensors"
    assert row["max_abs"] == (0.0 if dtype in (torch.bool, torch.float8_e4m3fn) else 1.0)


# Ranks, epochs, damage ------------------------------------------------------------------------------


def by_hand(to, *, rank: int, values: list[float], step: int = 0, epoch: int | None = None) -> None:
    """Write one record of one rank, as a recorder on that rank would."""
    array = np.array(values, dtype=np.float32)
    writer = Writer(to, Manifest(), rank=rank)
    blob = Blob("float32", array.shape, array.nbytes, lambda: array)
    assert writer.write(Point("layer"), Moment(epoch, step, step, 0, rank), blob=blob, summary=summarize(array))
    writer.close(forwards=1, points=1, recomputed=0, missing=[])


def test_ranks_are_added_up_and_one_can_be_asked_for(cli, tmp_path):
    by_hand(tmp_path / "run", rank=0, values=[1.0, 2.0])
    by_hand(tmp_path / "run", rank=1, values=[6.0, 7.0])
    assert "ranks 0-1 added up" in cli("show", "run").out
    (row,) = read(cli("show", "run", "--json").out)["points"]
    assert (row["mean"], row["min"], row["max"], row["count"], row["ranks"]) == (4.0, 1.0, 7.0, 4, [0, 1])
    (row,) = read(cli("show", "run", "--rank", "1", "--json").out)["points"]
    assert (row["mean"], row["ranks"]) == (6.5, [1])


def test_epochs_are_said_and_can_be_asked_for(cli, two_steps, tmp_path):
    net = torch.nn.Sequential(torch.nn.Identity())
    with record(net, "0", to=tmp_path / "run") as rec:
        for epoch in (1, 2):
            rec.moment(epoch=epoch)
            for i in range(2):
                net(torch.full((2,), 10.0 * epoch + i))
    assert "epoch 2, step 3, batch 1, the latest of 0-3" in cli("show", "run").out
    (row,) = read(cli("show", "run", "--epoch", "1", "--json").out)["points"]
    assert (row["epoch"], row["step"], row["mean"]) == (1, 1, 11.0)
    (row,) = read(cli("show", "run", "--epoch", "1", "--batch", "0", "--json").out)["points"]
    assert row["mean"] == 10.0
    assert cli("show", "run", "--epoch", "7").code == 2


def test_a_damaged_record_is_named_and_the_others_are_shown(cli, two_steps):
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh())
    run = two_steps(net, "*", [torch.full((64,), 3.0)], keep="tensor")
    assert "cannot be read" not in cli("show", run).out
    (segment,) = run.rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[data.index(torch.full((64,), 3.0).tanh().numpy().tobytes()) + 5] ^= 0xFF
    segment.write_bytes(data)
    answer = cli("show", run, "--adjacent", "--json")
    assert (answer.code, answer.err) == (2, "")
    page = read(answer.out)
    assert [row["point"] for row in page["points"]] == ["0:output"]
    (row,) = page["damaged"]
    assert (row["point"], row["file"]) == ("1:output", "rank-00000/segment-00000.safetensors")
    assert "checksum" in row["reason"]
    first = page["sentences"][0]
    assert first["tone"] == "bad"
    assert "1 damaged record (1:output at step=0 in rank-00000/segment-00000.safetensors)" in first["text"]
    assert (page["run"]["state"], page["run"]["complete"]) == ("damaged", False)


@pytest.mark.parametrize("keep", ["tensor", "both"])
@pytest.mark.parametrize("harm", ["gone", "cut"])
@pytest.mark.parametrize("command", ["show", "points"])
def test_a_segment_that_is_gone_or_cut_is_said_on_top_and_is_exit_code_2(cli, two_steps, keep, harm, command):
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh())
    run = two_steps(net, "*", [torch.full((64,), 3.0)], keep=keep)
    assert cli(command, run).code == 0
    (segment,) = run.rglob("*.safetensors")
    segment.unlink() if harm == "gone" else os.truncate(segment, segment.stat().st_size - 1)
    answer = cli(command, run)
    assert (answer.code, answer.err) == (2, "")
    top = answer.out.splitlines()[1]
    said = "it is not there, and held 2 records" if harm == "gone" else "each record is checked by itself"
    assert top.startswith("✗ finished with ")
    assert said in top
    assert "rank-00000/segment-00000.safetensors" in top
    page = read(cli(command, run, "--json").out)
    shown = [row["point"] for row in page.get("points", [])]
    assert shown == ([] if harm == "gone" else ["0:output", "1:output"])


class Wider(torch.nn.Module):
    def forward(self, x):
        return x.double()


def test_a_record_of_an_unknown_dtype_is_said_and_is_exit_code_2(cli, two_steps, monkeypatch):
    """A later version may store a dtype that this one does not know."""
    run = two_steps(torch.nn.Sequential(Wider(), torch.nn.Identity()), "0:io", [torch.ones(4)], keep="tensor")
    for table in (disk, dtypes):
        monkeypatch.setattr(table, "STORED", {name: how for name, how in dtypes.STORED.items() if name != "float64"})
    answer = cli("show", run)
    assert (answer.code, answer.err) == (2, "")
    assert "1 damaged record (0:output" in answer.out.splitlines()[1]
    assert "float64" in answer.out
    assert [row["point"] for row in read(cli("show", run, "--json").out)["points"]] == ["0:input[0]"]


def test_forwards_that_raised_and_records_that_gave_way_are_said(cli, tmp_path):
    writer = Writer(tmp_path / "run", Manifest())
    for value in (1.0, 2.0):
        data = np.full(4, value, np.float32)
        writer.write(Point("a"), Moment(), blob=Blob("float32", (4,), 16, lambda data=data: data))
    writer.close(forwards=7, points=1, failed=2)
    answer = cli("show", "run")
    assert answer.code == 0
    top = answer.out.splitlines()[1]
    assert "2 of 7 forwards raised" in top
    assert "1 record gave way to later ones of the same moment" in top
    assert "complete" not in top


def test_a_pattern_that_matches_nothing_advises_to_list_the_run(cli, trained):
    answer = cli("show", trained, "nope")
    assert answer.code == 2
    assert f"`layerscope points {trained}`" in answer.err
    assert "MODEL" not in answer.err


def test_a_damaged_journal_is_said_and_what_else_it_holds_is_read(cli, tmp_path):
    writer = Writer(tmp_path / "written", Manifest())
    for n in range(3):
        data = np.full(4, n, np.float32)
        writer.write(Point(f"p{n}"), Moment(), blob=Blob("float32", (4,), 16, lambda data=data: data))
    writer.flush()
    shutil.copytree(tmp_path / "written", tmp_path / "run")  # what a kill leaves
    writer.close()
    (journal,) = (tmp_path / "run").rglob("*.journal")
    journal.write_bytes(journal.read_bytes().replace(b"p1:output", b"q1:output"))
    answer = cli("show", "run")
    assert (answer.code, answer.err) == (2, "")
    assert "1 damaged part of a journal" in answer.out
    assert [row["point"] for row in read(cli("show", "run", "--json").out)["points"]] == ["p0:output", "p2:output"]


def test_what_only_the_schedule_left_out_is_said(cli, tmp_path):
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with record(net, [Tap("0"), Tap("1", when="first(1)")], to=tmp_path / "run"):
        for _ in range(3):
            net(torch.ones(2))
    answer = cli("show", "run")
    assert "1 of 2 points have no record at this moment" in answer.out
    only = cli("show", "run", "1")
    assert "step 0, the latest with these points; the run has step 0-2" in only.out


# Channels -----------------------------------------------------------------------------------------


@pytest.fixture
def channelled(tmp_path):
    """A run of a model whose layer 1 has one large channel, of two layers, with statistics of channels."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 48))
    with torch.no_grad():
        model[1].bias[30] = -64.0
    with record(model, ["0", "1"], to=tmp_path / "run", keep="summary", statistics="channels"), torch.no_grad():
        for _ in range(2):
            model(torch.randn(20, 16))
    return tmp_path / "run"


def test_channels_that_stand_out_are_shown_with_what_they_cost(cli, channelled):
    answer = cli("show", channelled, "--channels")
    assert answer.code == 0
    assert "1 channel stands out in 1 of 2 points" in answer.out
    assert "most tokens, every record" in answer.out


def test_channels_as_json_are_those_of_python(cli, channelled):
    import layerscope as ls

    page = read(cli("show", channelled, "--channels", "--json").out)
    [row] = ls.outliers(channelled).to_dicts()
    assert page["outliers"] == [row]
    assert (row["point"], row["channel"]) == ("1:output", 30)
    assert [(layer["point"], layer["outliers"]) for layer in page["layers"]] == [("0:output", 0), ("1:output", 1)]
    one = read(cli("show", channelled, "0", "--channels", "--step", 1, "--json").out)
    assert [layer["records"] for layer in one["layers"]] == [1]
    assert "outliers" not in one


def test_a_run_without_channels_says_how_to_record_them(cli, two_steps):
    run = two_steps(torch.nn.Sequential(torch.nn.ReLU()), "0", [torch.ones(2, 3)], keep="summary")
    answer = cli("show", run, "--channels")
    assert answer.code == 2
    assert "record with statistics='channels'" in answer.err


def test_channels_are_a_page_of_their_own(cli, channelled):
    assert cli("show", channelled, "--channels", "--adjacent").code == 2
