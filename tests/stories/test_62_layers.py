"""Porting: 62 layers that another process compiled, and 63 hidden states of them where the model's source is not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest
import torch

import layerscope as ls

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
