"""Porting: 62 layers that another process compiled, and 63 hidden states of them where the model's source is not."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import layerscope as ls
from layerscope.store.layouts.convert import convert

PAGE = Path(__file__).with_name("neuron_snippets.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))

SOURCE = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(128, 8)
            self.layers = nn.ModuleList(Layer() for _ in range(62))
            self.head = nn.Linear(8, 128)
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)
"""

# Compiled with taps, and the plain file that anybody could have made; what the layers compute, called one by one.
SAVING = """
    import sys, warnings, torch
    warnings.simplefilter("ignore")
    import layerscope as ls
    from deep_source import Deep

    backend, folder = sys.argv[1:]
    model, generator = Deep().eval(), torch.Generator().manual_seed(5)
    inputs = [torch.randint(0, 128, (2, 7), generator=generator) for _ in range(3)]
    example = (inputs[0],)
    with torch.no_grad():
        ls.compile(model, example, backend=backend, observer="skip").save(f"{folder}/tapped")
        if backend == "torchscript":
            torch.jit.save(torch.jit.trace(model, example), f"{folder}/plain.pt")
        elif backend == "export":
            torch.export.save(torch.export.export(model, example), f"{folder}/plain.pt2")
        else:
            torch.onnx.export(model, example, f"{folder}/plain.onnx", dynamo=True, verbose=False)
        expected = []
        for x in inputs[1:]:
            states = [model.embed(x)]
            for layer in model.layers:
                states.append(layer(states[-1]))
            expected.append({"x": x, "states": torch.stack(states)})
    torch.save(expected, f"{folder}/expected.pt")
"""


@pytest.fixture(
    scope="module", params=["torchscript", *(pytest.param(b, marks=pytest.mark.stress) for b in ("export", "onnx"))]
)
def abroad(request, tmp_path_factory):
    """What a process that has ended left; the source has gone with it."""
    if request.param == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    work = tmp_path_factory.mktemp(request.param)
    (work / "deep_source.py").write_text(textwrap.dedent(SOURCE))
    (work / "saving.py").write_text(textwrap.dedent(SAVING))
    command = [sys.executable, work / "saving.py", request.param, work]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (work / "deep_source.py").unlink()
    assert importlib.util.find_spec("deep_source") is None
    return work


def assert_states(found, expected, folder):
    rounding = 1e-5 if folder.name.startswith("onnx") else 0.0  # ONNX Runtime orders sums its own way
    assert len(found) == len(expected) == 63
    for state, value in zip(found, expected, strict=True):
        torch.testing.assert_close(state, value, rtol=0, atol=rounding * max(1.0, float(value.abs().max())))


@torch.no_grad()
def test_what_was_compiled_with_taps_gives_63_states_of_each_input(abroad):
    loaded = ls.load_compiled(abroad / "tapped")
    cases = torch.load(abroad / "expected.pt", weights_only=True)
    assert not torch.equal(cases[0]["states"], cases[1]["states"])
    for case in cases:
        loaded(case["x"])
        assert_states(ls.get_layer_hidden_states(), case["states"], abroad)


@torch.no_grad()
def test_a_plain_file_gives_63_states_of_each_input_after_the_fact(abroad):
    [file] = [path for path in abroad.glob("plain.*") if path.suffix != ".data"]
    cases = torch.load(abroad / "expected.pt", weights_only=True)
    names = ["embed", *(f"layers.{number}" for number in range(62))]
    with ls.record(file, ["embed", "layers.*"]) as rec:
        for case in cases:
            rec.model(case["x"])
    assert rec.missing == []
    for step, case in enumerate(cases):
        assert_states([rec.run.tensor(name, step=step) for name in names], case["states"], abroad)


@torch.no_grad()
def test_the_snippets_of_the_neuron_page_read_what_is_written(abroad, tmp_path, capsys):
    case = torch.load(abroad / "expected.pt", weights_only=True)[0]
    loaded = ls.load_compiled(abroad / "tapped")
    with ls.record(loaded, ["embed", "layers.*"]) as rec:
        loaded(case["x"])
    states = [rec.run.tensor(name) for name in ("embed", *(f"layers.{number}" for number in range(62)))]
    convert(rec.run, tmp_path / "test_layers" / "full_model", layout="neuron")
    (tmp_path / "gpu_reference" / "full_model").mkdir(parents=True)
    theirs = states[30] * 1.01
    torch.save(theirs, tmp_path / "gpu_reference" / "full_model" / "layer_30_output.pt")

    def said(title):
        capsys.readouterr()
        exec(SNIPPETS[title].replace("/home/ubuntu/traced_model", str(tmp_path)), {})
        return capsys.readouterr().out.splitlines()

    line = re.compile(r"layer_(\d+): Mean=(\S+), Std=(\S+), NaN=False, Inf=False")
    told = {int(found[1]): (float(found[2]), float(found[3])) for found in map(line.fullmatch, said("statistics"))}
    assert told.keys() == set(range(63))
    for number, state in enumerate(states):
        assert told[number] == pytest.approx((float(state.float().mean()), float(state.float().std())), abs=2e-6)
    assert said("layer")[1:] == [
        f"Mean: {states[30].float().mean():.6f}",
        f"Std: {states[30].float().std():.6f}",
        "Has NaN: False",
    ]
    away = (states[31] - states[30]).abs()
    assert said("adjacent") == [f"Max diff: {away.max():.6f}", f"Mean diff: {away.mean():.6f}"]
    away = (states[30] - theirs).abs()
    lines = said("gpu")
    assert f"  Max: {away.max():.6f}" in lines
    assert lines[-1].startswith("Cosine Similarity: ")
    assert float(lines[-1].split()[-1]) == pytest.approx(1.0)
    assert len(SNIPPETS) == 4
