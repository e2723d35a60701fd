"""Somebody has the file of a compiled model, and asks whether it computes what the eager one does, layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import architectures
import layerscope as ls
from artefacts import Logits, saved
from layerscope.cli import main
from preloaded import Preloaded


def recorded(model, ids, to):
    with ls.record(model, "**", to=to) as rec, torch.no_grad():
        rec.model(ids)
        rec.model((ids + 3) % 128)
    return to


@pytest.mark.parametrize(("name", "kind"), [("llama", "export"), ("llama", "onnx")])
def test_the_file_agrees_with_the_model_it_was_made_from(tmp_path, name, kind):
    model, ids = Logits(architectures.make(name)).eval(), architectures.inputs(name)["input_ids"]
    eager = recorded(model, ids, tmp_path / "eager")
    file = recorded(saved(model, ids, kind, tmp_path), ids, tmp_path / kind)
    result = ls.compare(eager, file)
    assert str(result.verdict) == ("noise" if kind == "onnx" else "same")
    assert result.first_divergence is None
    paired = [row for row in result.rows if row.kind in ("same", "noise")]
    assert (
        len(paired) >= len(ls.open_run(eager).points) - 5
    )  # attention weights that nobody uses, the folded rotary table


ELSEWHERE = """
import sys, torch
from torch import nn

class Secret(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.second(self.first(x).relu())

torch.manual_seed(7)
model, folder = Secret().eval(), sys.argv[1]
inputs = [torch.randn(2, 4), torch.randn(2, 4)]
torch.jit.save(torch.jit.trace(model, (inputs[0],)), f"{folder}/model.pt")
torch.export.save(torch.export.export(model, (inputs[0],)), f"{folder}/model.pt2")
torch.save({"inputs": inputs, "first": [model.first(x).detach() for x in inputs]}, f"{folder}/expected.pt")
"""


def test_a_file_of_a_process_that_has_ended_is_opened_where_its_source_is_not(tmp_path):
    with Preloaded() as parent:
        ended = parent.run(ELSEWHERE, tmp_path)
    assert ended.code == 0, ended.err
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for file in ("model.pt", "model.pt2"):
        with ls.record(tmp_path / file, "first") as rec, torch.no_grad():
            for x in expected["inputs"]:
                rec.model(x)
        for step, value in enumerate(expected["first"]):
            assert torch.equal(rec.run.tensor("first", step=step), value)


def test_what_the_taps_of_a_recording_change_is_in_the_run_and_on_every_page(tmp_path, capsys):
    """torch.compile may fuse otherwise when somebody looks; here it plainly does, so that the check can fail."""

    def fusing(graph, inputs):
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        return lambda *args: [t + 0.5 if at == 0 and len(outputs) > 1 else t for at, t in enumerate(graph(*args))]

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    for name, backend, how in (
        ("eager", None, {}),
        ("changed", fusing, {}),
        ("unchanged", "aot_eager", {}),
        ("skipped", "aot_eager", {"options": ls.RecordOptions(observer="skip")}),
    ):
        torch._dynamo.reset()
        made = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        with torch.no_grad(), ls.record(made, "*", to=tmp_path / name, **how):
            made(x)
    said = {
        "changed": "the taps change the output: max abs 5.00e-01",
        "unchanged": "the taps change nothing in the output",
        "skipped": "not measured: observer='skip'",
    }
    for name, sentence in said.items():
        assert sentence in ls.open_run(tmp_path / name).manifest.settings["observer_effect"]
        for command in (["show", name], ["compare", "eager", name]):
            with pytest.raises(SystemExit):
                main([command[0], *(str(tmp_path / run) for run in command[1:])])
            assert sentence in " ".join(capsys.readouterr().out.split())
