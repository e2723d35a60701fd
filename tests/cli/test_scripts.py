"""The scripts with the names that users know: thin, from a checkout, whatever the folder is called."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


def write(folder: Path, mode: str, *layers: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    for number, values in zip((0, 23), layers, strict=False):
        np.save(folder / f"mode_{mode}_layer_{number}.npy", values)
    (folder / f"mode_{mode}_stats.json").write_text(json.dumps({"mode": mode}))


@pytest.fixture
def made(tmp_path):
    """A folder of modes in a working folder; both names have spaces."""
    rng = np.random.default_rng(0)
    work = tmp_path / "my work"
    work.mkdir()
    folder = work / "layer outputs"
    a, b = (rng.normal(size=(2, 4, 8)).astype(np.float32) for _ in range(2))
    write(folder, "fp32", a, b)
    write(folder, "fp16", a.astype(np.float16), b.astype(np.float16))
    write(folder, "2-1", a + np.float32(0.1), b - np.float32(0.2))
    write(folder, "short", a[:, :2], b[:, :2])
    return folder


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def script(made, capsys, monkeypatch):
    """Run compare_with_fp.py in this process, in the folder above the modes."""
    monkeypatch.syspath_prepend(SCRIPTS)
    found = spec_from_file_location("compare_with_fp", SCRIPTS / "compare_with_fp.py")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.chdir(made.parent)

    def run(*args: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["compare_with_fp.py", *map(str, args)])
        capsys.readouterr()
        try:
            code = module.main()
        except SystemExit as left:
            code = left.code
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def shell(made):
    """Run a script as a user does, in the folder above the modes."""

    def run(*command: object, **env: str) -> Answer:
        done = subprocess.run(
            [*map(str, command)],
            cwd=made.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


def read(file: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def test_one_mode_is_compared_with_fp32_and_saved(script, made):
    done = script("2-1", "--output_dir", "layer outputs", "--save_comparison", "new dir/2-1.json")
    assert (done.code, done.err) == (0, "")  # made, whatever it says
    assert "✓ 2-1 is fp32, quantised: mode 2-1" in done.out
    assert "Layer 0 - Comparison Results" in done.out
    assert "Layer 23 - Comparison Results" in done.out
    r, c = (np.load(made / f"mode_{m}_layer_0.npy").astype(np.float64) for m in ("fp32", "2-1"))
    saved = read(made.parent / "new dir" / "2-1.json")
    assert saved["rows"][0]["metrics"]["mse"] == pytest.approx(((c - r) ** 2).mean(), rel=1e-9)
    assert f"  MSE:                 {((c - r) ** 2).mean():.6e}" in done.out


def test_a_dump_of_other_tools_is_judged_by_what_its_mode_is_called(script, made):
    """24 layers off by 20 %, as INT8 has them, are a mode's own and a port's fault; so is one layer that stands out."""
    rng = np.random.default_rng(1)
    for layer in range(24):
        values = rng.normal(size=(2, 64, 8)).astype(np.float32)
        off = values + rng.normal(size=values.shape).astype(np.float32) * np.float32(0.2)
        np.save(made / f"mode_fp32_layer_{layer}.npy", values)
        for mode in ("0", "port"):
            np.save(made / f"mode_{mode}_layer_{layer}.npy", off)
        np.save(made / f"mode_3_layer_{layer}.npy", values + (off - values) * (1 if layer != 7 else 6))
    said = [script(mode, "--output_dir", "layer outputs").out for mode in ("0", "port", "3")]
    assert "✓ 0 is fp32, quantised: mode 0, and no layer stands out" in said[0]
    assert "✗ port differs from fp32" in said[1]
    assert "✗ 3 differs from fp32" in said[2]
    assert "layers.7" in said[2].splitlines()[1]


def test_another_reference_can_be_named(script):
    done = script("fp32", "--reference", "fp16", "--output_dir", "layer outputs")
    assert done.code == 0
    assert "✓ fp32 agrees up to noise with fp16" in done.out


def test_a_mode_of_another_shape_is_2_with_one_sentence(script):
    done = script("short", "--output_dir", "layer outputs")
    assert (done.code, done.out) == (2, "")
    assert "shapes differ, [2, 4, 8] against [2, 2, 8]" in done.err
    assert len(done.err.splitlines()) == 1


def test_what_is_missing_is_said_with_the_command_that_makes_it(script):
    nothing = script("2-1")
    assert (nothing.code, nothing.out) == (2, "")
    assert "layer_outputs has no mode fp32: it is not there" in nothing.err
    assert "save_layer_outputs.py quamba-130m-w8a8 --mode fp32 --output_dir layer_outputs`" in nothing.err
    mode = script("9", "--output_dir", "layer outputs")
    assert mode.code == 2
    assert "has no mode 9: it has 2-1, fp16, fp32, short" in mode.err
    assert "save_layer_outputs.py MODEL --mode 9 --output_dir 'layer outputs'`" in mode.err  # nothing says whose it is
    assert script().code == 2


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (["quamba-small", "quamba-small"], "quamba-small"),
        (["my nets.py:make", None], "'my nets.py:make'"),
        (["quamba-small", "tiny-transformer"], "MODEL"),
        (["SomeClass", None], "MODEL"),
    ],
)
def test_the_command_names_the_model_of_the_folder(script, made, models, named):
    for mode, model in zip(("fp32", "2-1"), models, strict=True):
        (made / f"mode_{mode}_stats.json").write_text(json.dumps({"mode": mode, "model": model}))
    for file in (*made.glob("mode_fp16_*"), *made.glob("mode_short_*")):
        file.unlink()
    said = script("9", "--output_dir", "layer outputs").err
    assert f"save_layer_outputs.py {named} --mode 9 --output_dir 'layer outputs'`" in said


def test_the_command_that_makes_a_missing_mode_makes_it(script, shell):
    told = script("fp32", "--output_dir", "made here").err.replace("quamba-130m-w8a8", "tiny-transformer")
    (command,) = re.findall("`python3 (.+?)`", told)
    assert shell(sys.executable, *shlex.split(command.replace("fp32", "fp32 bf16"))).code == 0
    assert script("bf16", "--output_dir", "made here").code == 0


def test_the_command_makes_the_mode_as_the_others_were_made(script, made):
    said = {"model": "quamba-small", "pretrained_dir": "my weights", "calib_data_num": 3, "calib_seqlen": 16}
    for mode in ("fp32", "fp16", "2-1", "short"):
        more = {"calib_seqlen": 8} if mode == "short" else {}  # which leaves nobody knowing that one
        (made / f"mode_{mode}_stats.json").write_text(json.dumps({"mode": mode, **said, **more}))
    told = script("3", "--output_dir", "layer outputs").err
    flags = "--mode 3 --output_dir 'layer outputs' --pretrained_dir 'my weights' --calib_data_num 3`"
    assert f"save_layer_outputs.py quamba-small {flags}" in told


def test_a_reader_that_is_gone_is_no_error(made):
    command = [sys.executable, SCRIPTS / "compare_with_fp.py", "--all", "--output_dir", made.name]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=made.parent, env=env, **pipes) as done:
        done.stdout.close()
        assert (done.stderr.read(), done.wait(60)) == (b"", 141)


def test_all_modes_have_a_row_and_a_file_each(shell, made):
    (made / "mode_cut_layer_0.npy").write_bytes((made / "mode_fp32_layer_0.npy").read_bytes()[:200])
    done = shell(SCRIPTS / "compare_all_modes.sh", "--output_dir", "layer outputs")
    assert done.code == 0
    table = done.out[done.out.index("SUMMARY TABLE - All Modes vs fp32") :].splitlines()[1:6]
    assert table[0].split()[:4] == ["Mode", "Layer", "0", "MSE"]
    rows = {line.split()[0]: line for line in table[1:]}
    assert list(rows) == ["2-1", "cut", "fp16", "short"]
    assert "shapes differ, [2, 4, 8] against [2, 2, 8]" in rows["short"]
    assert "truncated" in rows["cut"]
    r, c = (np.load(made / f"mode_{m}_layer_0.npy").astype(np.float64) for m in ("fp32", "2-1"))
    assert float(rows["2-1"].split()[1]) == pytest.approx(((c - r) ** 2).mean(), rel=1e-6)
    files = made.parent / "comparisons"
    assert sorted(p.name for p in files.iterdir()) == [f"mode_{m}_comparison.json" for m in rows]
    assert read(files / "mode_2-1_comparison.json")["verdict"] == "quantised"
    assert read(files / "mode_fp16_comparison.json")["verdict"] == "noise"
    assert read(files / "mode_short_comparison.json")["candidates"][0]["compared"] == 0


def test_the_folder_and_the_reference_may_come_from_the_environment(shell):
    done = shell(SCRIPTS / "compare_all_modes.sh", OUTPUT_DIR="layer outputs", REFERENCE="fp16")
    assert done.code == 0
    assert "SUMMARY TABLE - All Modes vs fp16" in done.out


def test_all_modes_is_2_when_none_can_be_compared(script, made):
    for mode in ("fp16", "2-1"):
        for file in made.glob(f"mode_{mode}_*"):
            file.unlink()
    done = script("--all", "--output_dir", "layer outputs")
    assert (done.code, done.out) == (2, "")
    assert "shapes differ" in done.err
    for file in made.glob("mode_short_*"):
        file.unlink()
    alone = script("--all", "--output_dir", "layer outputs")
    assert alone.code == 2
    assert "holds no mode but fp32" in alone.err
    assert "--mode quant_only" in alone.err  # every model has that group


def test_one_mode_beside_the_reference_still_has_its_summary(script, made):
    for mode in ("fp16", "short"):
        for file in made.glob(f"mode_{mode}_*"):
            file.unlink()
    done = script("--all", "--output_dir", "layer outputs")
    assert done.code == 0
    assert "SUMMARY TABLE - All Modes vs fp32" in done.out


def test_several_files_need_several_names(script):
    done = script("2-1", "fp16", "--output_dir", "layer outputs", "--save_comparison", "one.json")
    assert done.code == 2
    assert "{mode}" in done.err


def test_the_wrapper_runs_through_a_link_from_another_folder(shell, made):
    (made.parent / "comparewithfp").symlink_to(SCRIPTS / "comparewithfp")
    done = shell("./comparewithfp", "fp16", "--output_dir", made.name)
    assert (done.code, done.err) == (0, "")
    assert "✓ fp16 agrees up to noise with fp32" in done.out
    assert os.access(SCRIPTS / "compare_with_fp.py", os.X_OK)


def test_a_python_without_layerscope_hands_over_to_the_one_of_the_checkout(made, shell, tmp_path):
    bare = (sys.executable, "-S")
    done = shell(*bare, SCRIPTS / "compare_with_fp.py", "fp16", "--output_dir", made.name, PYTHONPATH="")
    assert (done.code, done.err) == (0, "")
    assert "✓ fp16 agrees up to noise with fp32" in done.out
    (tmp_path / "elsewhere").mkdir()
    for name in ("checkout.py", "compare_with_fp.py"):
        (tmp_path / "elsewhere" / name).write_text((SCRIPTS / name).read_text())
    moved = tmp_path / "elsewhere" / "compare_with_fp.py"
    alone = shell(*bare, moved, "fp16", "--output_dir", made.name, PYTHONPATH="")
    assert alone.code == 2
    assert "this Python has no layerscope: run `make setup`" in alone.err
