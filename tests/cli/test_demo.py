"""`layerscope demo`: every quantisation of a small model, compared, saved, and never in the way of what is there."""

import shlex

import numpy as np
import pytest

from layerscope.store import open_run

QUANTISED = ["0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"]


@pytest.fixture
def short(monkeypatch):
    """A demo of one short sample: what is shown is the same."""
    monkeypatch.setattr("layerscope.cli.demo.SAMPLES", 1)
    monkeypatch.setattr("layerscope.cli.demo.TOKENS", 16)


def last_layer(folder, mode):
    return open_run(folder / mode).tensor("backbone.layers.23").double().numpy()


def test_the_demo_compares_every_quantisation_saves_it_all_and_says_what_to_do_next(cli, tmp_path, short):
    answer = cli("demo")
    assert (answer.code, answer.err) == (0, "")
    folder = tmp_path / "runs" / "demo"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["fp32", *QUANTISED])
    for mode in ("fp32", *QUANTISED):
        run = open_run(folder / mode)
        assert run.complete
        assert (run.manifest.mode, len(run.points)) == (mode, 24)

    table = answer.out[answer.out.index("SUMMARY TABLE - All Modes vs fp32") :].splitlines()[2:9]
    assert [line.split()[0] for line in table] == QUANTISED
    reference = last_layer(folder, "fp32")
    errors = {}
    for line in table:
        mode, _, _, mse, *_ = line.split()
        difference = last_layer(folder, mode) - reference
        assert float(mse) == pytest.approx((difference**2).mean(), rel=1e-5)
        errors[mode] = np.linalg.norm(difference) / np.linalg.norm(reference)
    nearest = min(errors, key=errors.__getitem__)
    assert f"{nearest} stays closest to fp32, {errors[nearest]:.4g}"[:-1] in answer.out
    assert "✓ 0 is fp32, quantised: mode 0, and no layer stands out" in answer.out
    (alike,) = [line for line in answer.out.splitlines() if "no measure of any row tells them apart" in line]
    same = alike.split(" alike:")[0].split(" = ")
    assert same[:2] == ["0", "2-0"]
    assert all(
        np.array_equal(last_layer(folder, mode), last_layer(folder, "0")) == (mode in same) for mode in QUANTISED
    )
    assert "error over depth" in answer.out
    assert "0: outputs" not in answer.out  # that much is for the report
    assert answer.out.rstrip().endswith("runs/demo.html, in any browser")
    looked_at = (tmp_path / "runs" / "demo.html").read_text("utf-8")
    assert "no candidate differs from fp32: 7 quantised, with no layer that stands out" in looked_at
    assert len(looked_at.encode()) < 1_500_000 * 7 / 8
    report = (tmp_path / "runs" / "demo.md").read_text()
    assert "## 0: outputs" in report
    assert report.count("| `backbone.layers.23` |") == len(QUANTISED)


def test_a_second_demo_takes_the_next_free_name_and_a_chosen_one_is_not_overwritten(cli, tmp_path, short):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert cli("demo").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo", "demo-2", "demo-2.html", "demo-2.md"]
    again = cli("demo", "-o", "runs/demo-2")
    assert again.code == 2
    assert "runs/demo-2/fp32" in again.err
    assert again.err.count("\n") == 1


def test_the_commands_it_proposes_work(cli, tmp_path, short):
    out = cli("demo").out
    commands = [shlex.split(line.split("layerscope ", 1)[1]) for line in out.splitlines() if "· layerscope" in line]
    assert [command[0] for command in commands] == ["compare", "show", "modes"]
    commands[2] += ["--calib_data_num", "1", "--calib_seqlen", "16", "--html", "ranked.html"]
    compared, shown, ranked = (cli(*command) for command in commands)
    assert "3 is fp32, quantised: mode 3, and no layer stands out" in compared.out
    looked_at = (tmp_path / "ranked.html").read_text("utf-8")
    assert "default-src 'none'" in looked_at
    assert looked_at.count("backbone.layers.") > 10
    assert "quamba-small" in looked_at.partition("provenance</h2>")[2]
    assert (compared.code, shown.code, ranked.code) == (0, 0, 0)
