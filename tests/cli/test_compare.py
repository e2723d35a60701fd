"""`layerscope compare`: the verdict, the page, the exit code, the file left behind."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from layerscope.recorder import record
from layerscope.store import open_run


def read(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write(folder, mode: str, **layers: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    for name, values in layers.items():
        np.save(folder / f"mode_{mode}_{name}.npy", values)
    (folder / f"mode_{mode}_stats.json").write_text(json.dumps({"mode": mode, "model": "quamba-130m-w8a8"}))


@pytest.fixture
def modes(tmp_path):
    """A folder, with a space in its name, of modes in Quamba's layout: port is off from layer 0 on."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "layer outputs"
    a, b = (rng.normal(size=(4, 8, 16)).astype(np.float32) for _ in range(2))
    off = [x + np.float32(0.1) * rng.normal(size=x.shape).astype(np.float32) for x in (a, b)]
    write(folder, "fp32", layer_0=a, layer_23=b)
    write(folder, "copy", layer_0=a, layer_23=b)
    write(folder, "fp16", layer_0=a.astype(np.float16), layer_23=b.astype(np.float16))
    write(folder, "port", layer_0=off[0], layer_23=off[1])
    write(folder, "short", layer_0=a[:, :4], layer_23=b[:, :4])
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of three training steps; the second one's middle layer is scaled."""
    folder = tmp_path_factory.mktemp("runs")
    for name, scale in (("right", 1.0), ("wrong", 1.5)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        with torch.no_grad():
            model[2].weight.mul_(scale)
        with record(model, ["*:*"], to=folder / name):
            for _ in range(3):
                model(torch.randn(2, 5, 8)).square().sum().backward()
    return folder


# Exit codes -------------------------------------------------------------------------------------


def test_the_same_is_0_noise_is_0_and_a_difference_is_1(cli, modes):
    same = cli("compare", f"{modes}:fp32", f"{modes}:copy")
    assert (same.code, same.err) == (0, "")
    assert "✓ copy is the same as fp32" in same.out
    noise = cli("compare", f"{modes}:fp32", f"{modes}:fp16")
    assert noise.code == 0
    assert "✓ fp16 agrees up to noise with fp32" in noise.out
    differs = cli("compare", f"{modes}:fp32", f"{modes}:port")
    assert (differs.code, differs.err) == (1, "")
    assert "✗ port differs from fp32: layers.0 parts first" in differs.out


@pytest.mark.parametrize(
    ("candidate", "fail_on", "code"),
    [
        ("port", ["never"], 0),
        ("port", ["root"], 1),
        ("port", ["nonfinite"], 0),
        ("port", ["nonfinite", "root"], 1),
        ("port", ["missing", "unpaired"], 0),
        ("port", ["band:fair"], 1),
        ("port", ["band:mse:large"], 1),
        ("fp16", ["band:mse:large"], 0),
        ("port", ["band:correlation:good"], 1),
        ("fp16", ["band:good"], 0),
        ("fp16", ["band:very-close"], 1),
        ("fp16", ["root"], 0),
    ],
)
def test_fail_on_says_what_makes_it_1(cli, modes, candidate, fail_on, code):
    words = [word for what in fail_on for word in ("--fail-on", what)]
    assert cli("compare", f"{modes}:fp32", f"{modes}:{candidate}", "--detail", "none", *words).code == code


def test_a_point_without_a_partner_fails_only_where_that_is_asked_for(cli, modes):
    (modes / "mode_copy_layer_23.npy").unlink()
    pair = (f"{modes}:fp32", f"{modes}:copy")
    assert cli("compare", *pair).code == 0
    assert cli("compare", *pair, "--fail-on", "unpaired").code == 1


@pytest.mark.parametrize(
    ("fail_on", "says"),
    [
        (["sometimes"], "'sometimes' is not known; there is root, nonfinite, missing, unpaired, band:LEVEL, never"),
        (["never", "root"], "never stands alone"),
        (["band:awful"], "no band is called 'awful'; there is mse: very close, good, fair, large; correlation:"),
    ],
)
def test_a_condition_that_is_not_one_is_refused_before_anything_is_read(cli, fail_on, says):
    words = [word for what in fail_on for word in ("--fail-on", what)]
    answer = cli("compare", "nowhere", "nowhere", *words)
    assert answer.code == 2
    assert says in answer.err


def test_wrong_input_is_one_sentence_and_2(cli, modes, tmp_path):
    (tmp_path / "empty").mkdir()
    cut = (modes / "mode_copy_layer_0.npy").read_bytes()
    (modes / "mode_cut_layer_0.npy").write_bytes(cut[:500])
    np.save(modes / "mode_evil_layer_0.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for candidate, says in (
        (tmp_path / "nowhere", "is not a run"),
        (tmp_path / "empty", "is not a run"),
        (f"{modes}:9", "has no mode '9'; it has copy, cut"),
        (f"{modes}:cut", "truncated"),
        (f"{modes}:evil", "pickle"),
        (f"{modes}:short", "shapes differ, [4, 8, 16] against [4, 4, 16]"),
    ):
        answer = cli("compare", f"{modes}:fp32", candidate)
        assert answer.code == 2, candidate
        assert answer.out == ""
        assert says in answer.err
        assert len(answer.err.splitlines()) == 1
    assert cli("compare", tmp_path / "nowhere", f"{modes}:fp32").code == 2
    assert cli("compare", f"{modes}:fp32").code == 2


def test_a_reference_with_nan_is_reported_in_full_and_2(cli, modes):
    values = np.load(modes / "mode_fp32_layer_23.npy")
    values[1, 2, 3] = np.nan
    np.save(modes / "mode_fp32_layer_23.npy", values)
    answer = cli("compare", f"{modes}:fp32", f"{modes}:copy")
    assert answer.code == 2
    assert "Layer 23 - Comparison Results" in answer.out
    assert "the reference itself has NaN, first at layers.23 (step=0), 1 of 512 values" in answer.err
    assert len(answer.err.splitlines()) == 1


def test_a_damaged_record_is_a_row_of_its_own_and_2(cli, runs, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(runs / "right", damaged)
    file = max(damaged.rglob("*.safetensors"), key=lambda f: f.stat().st_size)
    written = bytearray(file.read_bytes())
    at = written.index(open_run(runs / "right").tensor("1", step=0).numpy().tobytes())
    written[at] ^= 0xFF
    file.write_bytes(written)
    answer = cli("compare", runs / "right", damaged, "--json")
    assert answer.code == 2
    lost = [row["point"] for row in read(answer.out)["rows"] if row["kind"] == "missing"]
    assert lost == ["1:output", "2:input[0]"]  # one tensor, stored once
    assert "not everything could be read: " in answer.err
    assert len(answer.err.splitlines()) == 1
    assert cli("compare", runs / "right", runs / "right").code == 0


def test_a_candidate_with_nan_is_1_because_the_reference_is_sound(cli, modes):
    values = np.load(modes / "mode_copy_layer_23.npy")
    values[1, 2, 3] = np.nan
    np.save(modes / "mode_copy_layer_23.npy", values)
    answer = cli("compare", f"{modes}:fp32", f"{modes}:copy")
    assert (answer.code, answer.err) == (1, "")
    assert "layers.23 parts first" in answer.out
    assert cli("compare", f"{modes}:fp32", f"{modes}:copy", "--fail-on", "nonfinite").code == 1


def test_of_several_one_that_cannot_be_compared_is_a_row_with_its_reason_and_2(cli, modes):
    answer = cli("compare", *(f"{modes}:{m}" for m in ("fp32", "copy", "short", "absent", "port")))
    assert answer.code == 2
    table = answer.out[answer.out.index("SUMMARY TABLE") :].splitlines()[2:6]
    assert [line.split()[0] for line in table] == ["copy", "short", "absent", "port"]
    assert "not compared" in table[1]
    assert "shapes differ, [4, 8, 16] against [4, 4, 16]" in table[1]
    assert "has no mode 'absent'" in table[2]
    assert len(answer.err.splitlines()) == 2


# The page ---------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_numpy(cli, modes):
    page = read(cli("compare", f"{modes}:fp32", f"{modes}:port", "--json").out)
    assert [row["name"] for row in page["rows"]] == ["layers.0", "layers.23"]
    for layer, row in zip((0, 23), page["rows"], strict=True):
        r, c = (np.load(modes / f"mode_{m}_layer_{layer}.npy").astype(np.float64) for m in ("fp32", "port"))
        d = c - r
        assert row["metrics"]["mse"] == pytest.approx((d**2).mean(), rel=1e-9)
        assert row["metrics"]["mae"] == pytest.approx(abs(d).mean(), rel=1e-9)
        assert row["metrics"]["correlation"] == pytest.approx(np.corrcoef(r.ravel(), c.ravel())[0, 1], rel=1e-9)
        assert tuple(row["metrics"]["worst"]["index"]) == np.unravel_index(abs(d).argmax(), d.shape)


def test_the_labels_that_people_search_for_are_on_lines_of_their_own(cli, modes):
    lines = [line.strip() for line in cli("compare", f"{modes}:fp32", f"{modes}:port").out.splitlines()]
    assert lines.count("Layer 0 - Comparison Results") == lines.count("Layer 23 - Comparison Results") == 1
    for label in ("MSE:", "RMSE:", "MAE:", "Mean Diff:", "Relative MSE:", "Correlation:", "50th (Median):", "99th:"):
        assert sum(line.startswith(label) for line in lines) == 2, label


def test_native_runs_show_every_side_and_the_worst_of_their_moments(cli, runs):
    answer = cli("compare", runs / "right", runs / "wrong", "--detail", "none")
    assert answer.code == 1
    assert "2 parts first at step=0" in answer.out
    for title in ("outputs", "inputs", "gradients of the outputs", "gradients of the inputs"):
        assert f"\n{title}, the worst of 3 moments each\n" in answer.out
    page = read(cli("compare", runs / "right", runs / "wrong", "--json").out)
    assert len(page["rows"]) == len(list(open_run(runs / "right").records()))
    assert page["first_divergence"]["point"] == "2:output"


def test_points_choose_what_is_compared(cli, runs):
    healthy = cli("compare", runs / "right", runs / "wrong", "--points", "0", "--points", "1", "--json")
    assert healthy.code == 0
    assert {row["point"] for row in read(healthy.out)["rows"]} >= {"0:output", "1:output"}
    answer = cli("compare", runs / "right", runs / "wrong", "--points", "model.nothing")
    assert answer.code == 2
    assert "model.nothing" in answer.err


def test_a_noise_run_is_what_the_verdict_rests_on_and_the_limit_can_be_set(cli, modes):
    pair = (f"{modes}:fp32", f"{modes}:port", "--detail", "none")
    answer = cli("compare", *pair, "--noise", f"{modes}:port")
    assert answer.code == 0
    assert f"the floor that {modes}:port shows" in answer.out
    assert cli("compare", *pair, "--noise", f"{modes}:port", "--limit", "0.01").code == 1
    assert cli("compare", *pair, "--limit", "0").code == 2


def test_bands_are_changed_by_text_or_by_file(cli, modes, tmp_path):
    pair = (f"{modes}:fp32", f"{modes}:fp16")
    (tmp_path / "my bands.txt").write_text("# ours\nmse < 1e-9: fine\nmse: off\n")
    for said in ("mse < 1e-9: fine; mse: off", tmp_path / "my bands.txt"):
        assert "MSE off" in cli("compare", *pair, "--bands", said).out
        assert cli("compare", *pair, "--bands", said, "--fail-on", "band:off").code == 1
    assert "MSE very close" in cli("compare", *pair).out
    answer = cli("compare", *pair, "--bands", "bands.txt")
    assert answer.code == 2
    assert "'bands.txt' is neither a file nor bands" in answer.err


def test_rules_are_read_from_a_file(cli, modes, tmp_path):
    (tmp_path / "rules").write_text("ignore layers.0\n")
    page = read(cli("compare", f"{modes}:fp32", f"{modes}:port", "--pairing", tmp_path / "rules", "--json").out)
    assert [row["name"] for row in page["rows"]] == ["layers.23"]
    assert cli("compare", f"{modes}:fp32", f"{modes}:port", "--pairing", tmp_path / "nowhere").code == 2
    (tmp_path / "rules").write_text("marry a b\n")
    answer = cli("compare", f"{modes}:fp32", f"{modes}:port", "--pairing", tmp_path / "rules")
    assert answer.code == 2
    assert "marry" in answer.err
    (tmp_path / "rules").write_bytes(b"\xff\xfe\0")
    answer = cli("compare", f"{modes}:fp32", f"{modes}:port", "--pairing", tmp_path / "rules")
    assert answer.code == 2
    assert "is no file of rules: it is not text in UTF-8" in answer.err


def test_a_limit_that_is_no_number_is_one_sentence_and_2(cli, modes):
    answer = cli("compare", f"{modes}:fp32", f"{modes}:port", "--limit", "nan")
    assert answer.code == 2
    assert answer.err.startswith("layerscope: limit is how many times the floor an error may be")
    assert "unexpected" not in answer.err


def test_markdown_and_json_are_two_pages(cli, modes):
    pair = (f"{modes}:fp32", f"{modes}:port")
    assert cli("compare", *pair, "--markdown").out.startswith("# fp32 against port\n")
    assert cli("compare", *pair, "--markdown", "--json").code == 2


# The file left behind ---------------------------------------------------------------------------


def test_the_saved_comparison_is_what_json_prints_in_folders_that_are_made(cli, modes, tmp_path):
    to = tmp_path / "new folder" / "deeper" / "port.json"
    answer = cli("compare", f"{modes}:fp32", f"{modes}:port", "--json", "--save_comparison", to)
    assert answer.code == 1
    assert to.read_text() == answer.out
    assert read(answer.out)["verdict"] == "differs"
    assert [p.name for p in to.parent.iterdir()] == ["port.json"]
    cli("compare", f"{modes}:fp32", f"{modes}:copy", "--save-comparison", to)
    assert read(to.read_text())["verdict"] == "same"


def test_nothing_is_saved_where_nothing_was_compared_and_a_folder_in_the_way_is_left_alone(cli, modes, tmp_path):
    to = tmp_path / "out.json"
    assert cli("compare", f"{modes}:fp32", f"{modes}:short", "--save_comparison", to).code == 2
    assert not to.exists()
    to.mkdir()
    answer = cli("compare", f"{modes}:fp32", f"{modes}:copy", "--save_comparison", to)
    assert answer.code == 2
    assert answer.err == f"layerscope: Is a directory: '{to}'\n"
    assert "copy is the same as fp32" in answer.out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layer outputs", "out.json"]


# The process ------------------------------------------------------------------------------------


def test_help_has_examples_and_imports_no_torch(fresh):
    answer = fresh("compare", "--help", python=("-X", "importtime"))
    assert answer.code == 0
    assert "layerscope compare layer_outputs:fp32 layer_outputs:2-1" in answer.out
    loaded = {line.split("|")[-1].strip() for line in answer.err.splitlines()}
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "rich"}


INTERRUPTED = """
import os, signal, sys
from layerscope.cli import main
from layerscope.compare import record_pair
measure, calls = record_pair.measure, []
def eighth(*sides, **how):
    calls.append(1)
    if len(calls) == 8:
        os.kill(os.getpid(), signal.SIGINT)
    return measure(*sides, **how)
record_pair.measure = eighth
main(sys.argv[1:])
"""


def test_ctrl_c_is_130_with_a_sentence_and_leaves_nothing_behind(cli, tmp_path):
    model = nn.Sequential(*(nn.Identity() for _ in range(40)))
    for name in ("a", "b"):
        with record(model, "*", to=tmp_path / name):
            model(torch.arange(64.0))
    args = ("compare", tmp_path / "a", tmp_path / "b")
    before = sorted(tmp_path.rglob("*"))
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *args],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        timeout=60,
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "layerscope: interrupted; nothing was written"
    assert sorted(tmp_path.rglob("*")) == before
    again = read(cli(*args, "--json").out)
    assert again["verdict"] == "same"
    assert len(again["rows"]) == 40
