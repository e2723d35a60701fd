"""Files and texts that are changed at random give an answer: a value or one sentence, in little memory, without a hang.

`tests/faults/found/` has what fuzzing found, by target; each is tried again here, in this process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from faults import fuzzing
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Writer

CHILD = Path(__file__).with_name("fuzzing.py")
FOUND = Path(__file__).with_name("found")
LIBRARIES = {"onnx": "onnxscript", "checkpoint": "transformers"}
MODEL, X = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2))), torch.ones(4, 3)


def script(folder):
    torch.jit.save(torch.jit.trace(MODEL, X), folder / "model.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.script(MODEL.eval())), folder / "frozen.pt")


def export(folder):
    sizes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    torch.export.save(torch.export.export(MODEL, (X,), dynamic_shapes=sizes), folder / "model.pt2")


def npz(folder):
    np.savez(folder / "first_layer_io_all_modes.npz", mode_0_input=np.arange(9.0), mode_0_output=np.ones((3, 3)))


def npy(folder):
    np.save(folder / "mode_0_layer_0.npy", np.arange(40.0).reshape(8, 5))
    (folder / "mode_0_stats.json").write_text(json.dumps({"mode": "0", "model": "m", "layer_0": {"mean": 1.0}}))


def pt(folder):
    torch.save(torch.arange(40.0), folder / "layer_1_output.pt")
    torch.save(torch.arange(4.0), folder / "embedding_output.pt", _use_new_zipfile_serialization=False)
    torch.save({"layer_0": {"mean": 1.0, "shape": [4], "dtype": "float32"}}, folder / "statistics.pt")


def run(folder):
    """One segment sealed, the next as a kill leaves it, with losses."""
    writer = Writer(folder / "live", Manifest(mode="m"), segment_tensors=2)
    for n in range(3):
        data = np.arange(n, n + 6, dtype=np.float32)
        blob = Blob("float32", (2, 3), 24, lambda data=data: data)
        writer.write(Point("a", leaf=(n,)), Moment(step=n), blob=blob, summary=summarize(data), note={"n": n})
    writer.lose(Point("b"), Moment(step=1), "on purpose")
    writer.flush()
    shutil.copytree(folder / "live", folder / "run")
    writer.close()
    shutil.rmtree(folder / "live")
    for partial in folder.rglob("*.partial"):
        partial.write_bytes(partial.read_bytes().rstrip(b"\0"))


def inputs(folder):
    save_file({"x": torch.ones(3, 2), "y": torch.arange(3)}, folder / "inputs.safetensors")
    np.savez(folder / "inputs.npz", x=np.ones(3))
    torch.save({"x": torch.ones(3)}, folder / "inputs.pt")


def onnx(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(MODEL, (X,), folder / "model.onnx", dynamo=True, verbose=False)


def checkpoint(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()


SEEDS = {each.__name__: each for each in (script, export, npz, npy, pt, run, inputs, onnx, checkpoint)}
SHORT = {**dict.fromkeys(SEEDS, 150), "onnx": 20, "inputs": 60, "run": 60, **dict.fromkeys(fuzzing.TEXTS, 5_000)}
LONG = {  # of each of three; more than a million together
    **dict.fromkeys(fuzzing.TEXTS, 100_000),
    **dict.fromkeys(("script", "export"), 30_000),
    **dict.fromkeys(("npz", "npy", "pt"), 5_000),
    "run": 2_000,
    "inputs": 4_000,
    "onnx": 10_000,
    "checkpoint": 300,
}


def assert_fuzzed(target, tmp_path, count, number):
    pytest.importorskip(LIBRARIES.get(target, "torch"))
    for name in ("seeds", "found"):
        (tmp_path / name).mkdir()
    if target in SEEDS:
        SEEDS[target](tmp_path / "seeds")
    done = subprocess.run(
        [sys.executable, str(CHILD), target, *map(str, (tmp_path / "seeds", tmp_path / "found", count, number))],
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{[*(tmp_path / 'found').iterdir()]}\n{done.stderr[-4000:]}"
    assert json.loads(done.stdout)["inputs"] == count


@pytest.mark.parametrize("target", [name for name in SHORT if name != "checkpoint"])
def test_changed_at_random_it_gives_an_answer(target, tmp_path):
    assert_fuzzed(target, tmp_path, SHORT[target], 0)


@pytest.mark.stress
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("target", LONG)
def test_changed_at_random_for_long_it_gives_an_answer(target, number, tmp_path):
    assert_fuzzed(target, tmp_path, LONG[target], number + 1)


@pytest.mark.parametrize("path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_gives_an_answer(path, tmp_path):
    target = path.parent.name.partition(".")[0]
    pytest.importorskip(LIBRARIES.get(target, "torch"))
    if target in fuzzing.TEXTS:
        fuzzing.assert_answered(lambda: fuzzing.TEXTS[target](path.read_text("utf-8", "surrogatepass")))
        return
    SEEDS[target](tmp_path)
    name = (path.name.partition("+")[2] or path.name).replace("+", "/")
    (tmp_path / name).write_bytes(path.read_bytes())
    fuzzing.assert_answered(lambda: fuzzing.FILES[target](tmp_path / name))


def test_a_fault_would_be_found(tmp_path):
    """The target is broken on purpose: a child that cannot fail proves nothing."""
    broken = CHILD.read_text().replace(
        "parsed = Pattern.parse(text)", "parsed = Pattern.parse(text); assert '*' not in text"
    )
    (tmp_path / "broken.py").write_text(broken)
    (tmp_path / "found").mkdir()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "broken.py"), "pattern", str(tmp_path), str(tmp_path / "found"), "500", "0"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert b"*" in (tmp_path / "found" / "pattern.txt").read_bytes()
