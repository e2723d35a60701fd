"""Each compiler by its name: the quick ones here; all of them, on real models, in stories/test_compiled.py."""

import sys
from types import SimpleNamespace

import pytest
import torch

import layerscope as ls
from asserts import assert_same_bits
from layerscope.compiled.backends import NAMES, named
from layerscope.errors import MissingExtra, Unsupported
from layerscope.models.tiny import tiny_transformer

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def model():
    return tiny_transformer(layers=2, hidden=16, heads=2)


def test_every_name_is_a_backend_with_the_same_verbs():
    for name in NAMES:
        backend = named(name)
        assert name == backend.NAME
        assert all(callable(getattr(backend, verb)) for verb in ("compile", "call", "save", "load"))
        assert isinstance(backend.LIVE, bool)


def test_torchs_own_compilers_are_known():
    assert named(torch.jit.trace).NAME == "torchscript"
    assert named(torch.compile).NAME == "inductor"
    assert named(sorted).NAME == "sorted"


def test_a_compiler_that_returns_nothing_to_call_is_refused(model):
    with pytest.raises(Unsupported, match="returned a NoneType, which cannot be called"):
        ls.compile(model, (IDS,), backend=lambda module, example_inputs: None)


def test_torch_compile_as_a_callers_own_compiler_gives_every_tap(model):
    """After an untapped compilation of the same class, whose code a tapped one must not share."""
    torch.compile(model, backend="aot_eager")(IDS)
    compiled = ls.compile(model, (IDS,), backend=lambda m, e: torch.compile(m, backend="aot_eager", fullgraph=True))
    with torch.no_grad():
        for ids in (IDS, IDS + 4):
            torch.testing.assert_close(compiled(ids), model(ids))
            torch.testing.assert_close(compiled.taps()["model.layers.1"], hidden(model, ids))


def hidden(model, ids):
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        x = layer(x)
    return x


# Neuron -------------------------------------------------------------------------------------------


@pytest.fixture
def neuronx(monkeypatch):
    """A stand-in with the signature of torch_neuronx.trace; it traces, and runs on the CPU."""
    calls = []

    def trace(
        func, example_inputs, *, input_output_aliases=None, compiler_workdir=None, compiler_args=None,
        partitioner_config=None, inline_weights_to_neff=True, cpu_backend=False,
    ):  # fmt: skip
        calls.append((func, example_inputs))
        return torch.jit.trace(func, example_inputs, check_trace=False)

    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(trace=trace))
    return calls


def test_neuron_traces_the_flat_form_and_its_file_is_read_back(model, neuronx, tmp_path):
    compiled = ls.compile(model, (IDS,), backend="neuron", observer="skip")
    [(func, example)] = neuronx
    assert isinstance(func, torch.nn.Module)
    assert [type(each) for each in example] == [torch.Tensor]
    assert "Neuron compiles for the sizes of the example alone" in compiled.notes
    loaded = ls.load_compiled(compiled.save(tmp_path / "neff"))
    assert loaded.backend == "neuron"
    with torch.no_grad():
        for each in (compiled, loaded):
            assert_same_bits(each(IDS + 3), model(IDS + 3))
            assert_same_bits(ls.get_layer_hidden_states()[-1], hidden(model, IDS + 3))


def test_neuron_without_its_sdk_says_where_it_comes_from(model):
    with pytest.raises(MissingExtra, match="AWS Neuron SDK"):
        ls.compile(model, (IDS,), backend="neuron")


def test_neurons_configuration_is_honoured(neuronx):
    model = tiny_transformer(layers=2, hidden=16, heads=2)
    model.config = SimpleNamespace(neuron_config=SimpleNamespace(record_layer_outputs=False))
    compiled = ls.compile(model, (IDS,), backend="neuron")
    compiled(IDS)
    assert ls.get_layer_hidden_states() is None
    model.config.neuron_config.record_layer_outputs = True
    compiled = ls.compile(model, (IDS,), backend="neuron", observer="skip")
    compiled(IDS)
    assert len(ls.get_layer_hidden_states()) == 3
