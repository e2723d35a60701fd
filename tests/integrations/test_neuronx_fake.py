"""neuronx-distributed-inference, played by a fake with its interface: nothing here has met the library or the hardware.

The fake's application compiles by `torch.jit.trace` into `model.pt`, loads it, and leaves its layers in the thread, as
the library with `record_layer_outputs` does.
"""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import layerscope as ls
from layerscope.errors import MissingExtra, NothingRecorded, Unsupported
from layerscope.integrations.neuronx import application, ready

LAYERS, WIDTH = 3, 4
MODEL_BASE = "neuronx_distributed_inference.models.model_base"


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, input_ids):
        states = [self.embed(input_ids)]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])))
        return states[-1] @ self.embed.weight.T, *states


@pytest.fixture
def library(monkeypatch):
    """The module that has the function of the documents."""
    module = types.ModuleType(MODEL_BASE)
    module.kept = SimpleNamespace(layer_hidden_states=None)
    module.get_layer_hidden_states = lambda: module.kept.layer_hidden_states
    package, models = types.ModuleType("neuronx_distributed_inference"), types.ModuleType("models")
    for name, made in ((package.__name__, package), (MODEL_BASE.rpartition(".")[0], models), (MODEL_BASE, module)):
        monkeypatch.setitem(sys.modules, name, made)
    return module


@pytest.fixture
def fake(library):
    class FakeForCausalLM(nn.Module):
        """`NeuronApplicationBase` as far as it matters: config, compile, load, a forward of keywords."""

        def __init__(self, *, recorded=True, ranks=1):
            super().__init__()
            torch.manual_seed(0)
            self.config = SimpleNamespace(neuron_config=SimpleNamespace(record_layer_outputs=recorded, tp_degree=ranks))
            self.source, self.traced_model, self.compiled, self.ranks = Decoder(), None, 0, ranks

        def compile(self, compiled_model_path):
            self.compiled += 1
            traced = torch.jit.trace(self.source, torch.zeros(1, 5, dtype=torch.long))
            torch.jit.save(traced, compiled_model_path + "model.pt")

        def load(self, compiled_model_path):
            self.traced_model = torch.jit.load(compiled_model_path + "model.pt")

        def forward(self, input_ids=None):
            logits, *states = self.traced_model(input_ids)
            if self.ranks > 1:  # sharded along the width
                states = [list(state.chunk(self.ranks, dim=-1)) for state in states]
            library.kept.layer_hidden_states = states
            return SimpleNamespace(logits=logits)

    return FakeForCausalLM


IDS = [torch.arange(5).view(1, 5), torch.arange(5, 10).view(1, 5)]


def expected(app, ids):
    with torch.no_grad():
        return app.source(ids)


def test_every_call_is_a_step_with_its_layers_and_logits(fake, tmp_path):
    (tmp_path / "compiled").mkdir()
    app = ready(fake(), tmp_path / "compiled")
    with application(app, to=tmp_path / "run") as recorded, torch.no_grad():
        for ids in IDS:
            app(input_ids=ids)
            assert torch.equal(ls.get_layer_hidden_states()[0], expected(app, ids)[1])
    assert len(recorded.ranks) == 1
    run = ls.open_run(tmp_path / "run")
    assert run.complete
    assert (run.manifest.mode, run.manifest.model["name"]) == ("neuron", "FakeForCausalLM")
    names = ["embedding", *(f"layers.{n}" for n in range(LAYERS)), "logits"]
    assert [point.name for point in run.points] == names
    for step, ids in enumerate(IDS):
        logits, *states = expected(app, ids)
        for name, value in zip(names, [*states, logits], strict=True):
            assert torch.equal(run.tensor(name, step=step), value)
    assert not app._forward_hooks
    assert not app._forward_pre_hooks


def test_tensors_of_several_ranks_go_to_folders_of_theirs(fake, tmp_path):
    (tmp_path / "compiled").mkdir()
    app = ready(fake(ranks=2), tmp_path / "compiled")
    with application(app, to=tmp_path / "run"), torch.no_grad():
        app(input_ids=IDS[0])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank-00000", "rank-00001", "run.json"]
    run = ls.open_run(tmp_path / "run")
    assert run.complete
    logits, *states = expected(app, IDS[0])
    for rank in range(2):
        assert torch.equal(run.tensor("layers.1", rank=rank), states[2].chunk(2, dim=-1)[rank])
    assert torch.equal(run.tensor("logits"), logits)
    assert run.manifest.settings["tp_degree"] == 2


def test_it_compiles_once_and_again_where_that_is_asked_for(fake, tmp_path):
    (tmp_path / "compiled").mkdir()
    app = fake()
    for _ in range(2):
        ready(app, tmp_path / "compiled")
    assert app.compiled == 1
    ready(app, f"{tmp_path}/compiled/", compile=True)
    assert app.compiled == 2
    assert app.traced_model is not None


def test_an_application_that_hands_no_layer_out_is_refused_before_it_is_compiled(fake, tmp_path):
    app = fake(recorded=False)
    with pytest.raises(Unsupported, match=r"has no record_layer_outputs=True.*compile again"):
        ready(app, tmp_path)
    assert app.compiled == 0
    with pytest.raises(Unsupported, match="a Linear is no application model"), application(nn.Linear(1, 1)):
        pass


@pytest.mark.parametrize("left", ["nothing", "tracing"])
def test_what_tracing_left_in_the_thread_is_not_taken_for_a_call(fake, library, tmp_path, left):
    (tmp_path / "compiled").mkdir()
    app = ready(fake(), tmp_path / "compiled")
    stale = [torch.zeros(1)] * 4 if left == "tracing" else None
    library.kept.layer_hidden_states = stale
    app.forward = lambda input_ids=None: SimpleNamespace(logits=None)
    said = "what was there before it" if left == "tracing" else "nothing"
    with pytest.raises(NothingRecorded, match=f"had {said} after a call"), application(app, to=tmp_path / "run"):
        app(input_ids=IDS[0])
    assert not (tmp_path / "run").exists()


def test_an_exception_in_the_model_leaves_no_hook_and_an_interrupted_run(fake, tmp_path):
    (tmp_path / "compiled").mkdir()
    app = ready(fake(), tmp_path / "compiled")

    def fails():
        app(input_ids=IDS[0])
        raise IndexError

    with pytest.raises(IndexError), application(app, to=tmp_path / "run"), torch.no_grad():
        fails()
    assert not app._forward_hooks
    run = ls.open_run(tmp_path / "run")
    assert (run.state, len(run)) == ("interrupted", 5)


def test_without_the_library_the_way_to_it_is_said(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, MODEL_BASE, None)
    with pytest.raises(MissingExtra, match="comes with the AWS Neuron SDK"), application(fake()):
        pass
