"""Each compiler by its name: the quick ones here; all of them, on real models, in stories/test_compiled.py."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.compile_taps.backends import NAMES, named
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


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_exported_graph_has_free_sizes_or_the_examples(model, dynamic):
    compiled = ls.compile(model, (IDS,), backend="export", dynamic=dynamic, observer="skip")
    longer = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert_same_bits(compiled(IDS + 1), model(IDS + 1))
        if dynamic:
            assert_same_bits(compiled(longer), model(longer))
            assert_same_bits(compiled.taps()["model.layers.1"], hidden(model, longer))
        else:
            says = r"compiled this for input_ids int64 \(2, 5\); it was given input_ids int64 \(2, 7\)"
            with pytest.raises(Unsupported, match=says):
                compiled(longer)


def test_a_size_that_an_export_fixed_though_the_model_takes_others_is_noted_and_told(caplog):
    loop = zoo.Holder(
        lambda m, x: torch.stack([m.inner(x[:, at]) for at in range(x.shape[1])], 1), inner=nn.Linear(4, 4)
    )
    model, x = loop, torch.ones(2, 3, 4)
    compiled = ls.compile(model, (x,), backend="export", record_layer_outputs="inner", observer="skip")
    said = "the graph takes sizes as the example has them alone: dimension 1 of argument 0 at 3"
    assert compiled.notes == [said]  # that the last dimension is 4 is the model's own affair
    assert said in caplog.text
    longer = torch.ones(5, 3, 4)
    with torch.no_grad():
        assert_same_bits(compiled(longer), model(longer))
    with pytest.raises(
        Unsupported, match=r"compiled this for argument 0 float32 \(any, 3, 4\); it was given.*\(2, 7, 4\)"
    ):
        compiled(torch.ones(2, 7, 4))


def test_a_refused_export_prints_no_graph(capfd):
    with pytest.raises(Unsupported, match="export cannot compile Holder"):
        ls.compile(branching(), (torch.ones(2, 4),), backend="export", record_layer_outputs="inner")
    assert capfd.readouterr().err == ""


def branching():
    return zoo.Holder(lambda m, x: m.inner(x) if x.sum() > 0 else m.inner(-x), inner=nn.Linear(4, 4))


def test_a_branch_that_tracing_took_for_good_is_warned_of_with_its_line(caplog):
    model, x = branching(), torch.ones(2, 4)
    compiled = ls.compile(model, (x,), backend="torchscript", record_layer_outputs="inner")
    [note] = compiled.notes
    assert re.search(r"takes the same branch for any input: test_backends\.py:\d+$", note)
    assert note in [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_what_inductor_cannot_compile_is_told_in_a_sentence_at_the_first_call():
    compiled = ls.compile(
        branching(), (torch.ones(2, 4),), backend="inductor", record_layer_outputs="inner", observer="skip"
    )
    with pytest.raises(
        Unsupported, match=r"^inductor cannot compile the model as one graph for these inputs: .*\.$"
    ) as told:
        compiled(torch.ones(2, 4))
    assert "\n" not in str(told.value)
    assert isinstance(told.value.__cause__, torch._dynamo.exc.TorchDynamoException)


# ONNX ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(),
            r"its buffer 1\.running_mean.*Call model\.eval\(\)",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), r"training mode and draws random.*model\.eval\(\)"),
        (Counting().eval(), r"its buffer calls, and an ONNX graph keeps nothing.*torchscript or export"),
        (
            zoo.Holder(lambda m, x: torch.fft.fft(m.inner(x)), inner=nn.Linear(4, 4)),
            r"no complex numbers.*view_as_real",
        ),
    ],
    ids=["batch norm", "dropout", "counter", "complex"],
)
def test_what_onnx_would_compute_otherwise_is_refused(model, says):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with pytest.raises(Unsupported, match=says):
        ls.compile(model, (torch.ones(3, 4),), backend="onnx", record_layer_outputs="**")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_random_numbers_of_onnx_are_its_own_and_the_taps_are_not_blamed_for_them(caplog):
    model = zoo.Holder(lambda m, x: m.inner(x) + torch.rand_like(x), inner=nn.Linear(4, 4)).eval()
    compiled = ls.compile(model, (torch.ones(2, 4),), backend="onnx", record_layer_outputs="inner")
    compiled(torch.ones(2, 4))
    [note] = compiled.notes
    assert "does not take from torch's generator" in note
    assert note in caplog.text
    assert str(compiled.observer_effect) == "not measured: the model draws other random numbers at each call"


def test_a_model_in_training_mode_that_does_not_train_is_compiled_to_onnx_and_another_dtype_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    compiled = ls.compile(model, (torch.ones(2, 4),), backend="onnx", record_layer_outputs="0", observer="skip")
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(5, 4)), model(torch.ones(5, 4)))
    says = r"onnx compiled this for input float32 \(any, .*\); it was given input float64 \(2, 4\)"
    with pytest.raises(Unsupported, match=says):
        compiled(torch.ones(2, 4).double())


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
