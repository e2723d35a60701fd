"""What the taps of a recording do to a model that torch.compile runs: measured once, without a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache

import architectures
import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.errors import Unsupported

UNCHANGED = "the taps change nothing in the output"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


def effect(rec):
    return rec.run.manifest.settings["observer_effect"]


def graphs():
    return counters["stats"]["unique_graphs"]


def block():
    torch.manual_seed(0)
    return zoo.Holder(lambda m, x: m.second(m.first(x).relu()), first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def fusing(graph, inputs):
    """A backend whose result is another one when the graph has outputs beside the model's: 0.5 is added."""
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]

    def run(*args):
        value, *taps = graph(*args)
        return (value + 0.5 if len(outputs) > 1 else value, *taps)

    return run


class Small(nn.Module):
    """In half precision, Inductor keeps what these layers pass on unrounded, until somebody looks at it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x) * 1.7)
        return x


# The number ---------------------------------------------------------------------------------------


def test_taps_that_change_nothing_are_said_to():
    made = torch.compile(block(), backend="aot_eager", fullgraph=True)
    with ls.record(made, "first") as rec:
        made(torch.ones(2, 4))
    assert effect(rec) == UNCHANGED


def test_taps_that_change_the_output_are_told_by_how_much():
    model = block()
    made = torch.compile(model, backend=fusing, fullgraph=True)
    x = torch.ones(2, 4)
    with torch.no_grad(), ls.record(made, "first") as rec:
        made(x)
        made(x + 1)
    value = model(x).detach().double().numpy()
    decibels = 10 * np.log10(np.square(value).sum() / (value.size * 0.25))
    assert effect(rec) == f"the taps change the output: max abs 5.00e-01, {decibels:.1f} dB"


@torch.no_grad()
def test_in_half_precision_inductor_is_changed_and_rounding_where_the_source_does_gives_eagers_bits():
    torch.manual_seed(0)
    model, x = Small().bfloat16(), torch.randn(8, 16, dtype=torch.bfloat16)
    made = torch.compile(model, fullgraph=True)
    plain, eager = made(x), model(x)
    with ls.record(made, "layers.*") as rec:
        tapped = made(x)
    worst = (plain.double() - tapped.double()).abs().max()
    assert worst > 0, "the case is chosen for an effect"
    assert effect(rec).startswith(f"the taps change the output: max abs {worst:.2e}, ")
    with ls.record(made, "layers.*", options=ls.RecordOptions(precision_faithful=True)) as rec:
        faithful = made(x)
    assert_same_bits(faithful, eager)
    assert_same_bits(rec["layers.0"], model.layers[0](x))
    worst = (plain.double() - eager.double()).abs().max()
    said = f"the taps and precision_faithful=True change the output: max abs {worst:.2e}, "
    assert effect(rec).startswith(said)
    assert rec.run.manifest.settings["precision_faithful"] is True
    assert_same_bits(made(x), plain)


@pytest.mark.stress
def test_in_single_precision_inductor_is_not_changed():
    torch.manual_seed(0)
    model = Small()
    made = torch.compile(model, fullgraph=True)
    with torch.no_grad(), ls.record(made, "layers.*") as rec:
        made(torch.randn(8, 16))
    assert effect(rec) == UNCHANGED


# No trace -----------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Draws numbers, keeps running statistics, counts, remembers its last output, and writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.state = torch.zeros(8, 4)

    def forward(self, x, given):
        self.count += 1
        y = self.drop(self.norm(self.first(x))) + self.state
        self.state = y.detach()
        given["seen"].add_(1)
        return y


def trained(*, device="cpu", compiling, **how):
    """Everything that three steps of training leave behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, seen = Remembering().train().to(device), torch.zeros(2, device=device)
    model.state = model.state.to(device)
    made = torch.compile(model, fullgraph=True, **compiling)
    left = []

    def steps():
        for _ in range(3):
            x = torch.randn(8, 4, device=device, requires_grad=True)
            value = made(x, {"seen": seen})
            value.square().sum().backward()
            left.extend([value.detach().clone(), x.detach(), x.grad])

    if how:
        with ls.record(made, ["first", "norm"], **how) as rec:
            steps()
        assert rec.missing == []
    else:
        steps()
    grads = [parameter.grad for parameter in model.parameters()]
    drawn = [torch.rand(4), torch.rand(4, device=device)]
    return [*left, *grads, *model.buffers(), model.state, seen, *drawn]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.stress)])
def test_training_comes_out_the_same_with_and_without_a_recording(backend):
    plain = trained(compiling={"backend": backend})
    for a, b in zip(
        plain, trained(compiling={"backend": backend}, options=ls.RecordOptions(observer="measure")), strict=True
    ):
        assert_same_bits(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_training_on_a_device_comes_out_the_same_with_and_without_a_recording():
    plain = trained(device="cuda", compiling={})  # CUDA graphs refuse a model that keeps its last output
    recorded = trained(device="cuda", compiling={}, options=ls.RecordOptions(observer="measure"))
    for a, b in zip(plain, recorded, strict=True):
        torch.testing.assert_close(a, b)


class Cache:
    """Grows by what it is given, as a key-value cache does."""

    def __init__(self):
        self.parts = []

    def update(self, x):
        self.parts.append(x)
        return torch.cat(self.parts)


@torch.no_grad()
def test_an_object_that_the_model_writes_into_grows_by_one_forward():
    model = zoo.Holder(lambda m, x, cache: cache.update(m.first(x)).sum(0), first=nn.Linear(4, 4))
    made = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs, cache, expected = [torch.randn(2, 4) for _ in range(3)], Cache(), Cache()
    with ls.record(made, "first") as rec:
        values = [made(x, cache) for x in inputs]
    assert effect(rec) == UNCHANGED
    assert len(cache.parts) == 3
    for value, x in zip(values, inputs, strict=True):
        assert_same_bits(value, model(x, expected))


@pytest.mark.stress
@torch.no_grad()
def test_the_cache_of_transformers_grows_by_one_forward():
    model = architectures.make("llama")
    made = torch.compile(model, backend="aot_eager")
    ids = torch.arange(10).reshape(2, 5)
    cache, expected = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with ls.record(made, "model.layers.0") as rec:
        first = made(ids, past_key_values=cache)
        second = made(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 6
    assert effect(rec) == UNCHANGED
    torch.testing.assert_close(first.logits, model(ids, past_key_values=expected).logits)
    torch.testing.assert_close(second.logits, model(ids[:, :1], past_key_values=expected).logits)


KINDS = {
    "transposed": lambda: torch.randn(4, 2).t(),
    "columns": lambda: torch.randn(4, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "a leaf": lambda: torch.randn(2, 4, requires_grad=True),
    "no leaf": lambda: torch.randn(2, 4, requires_grad=True) * 2,
    "inference": lambda: torch.randn(2, 4),
    "used in inference": lambda: torch.randn(2, 4),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own look
@pytest.mark.parametrize("kind", KINDS)
def test_what_compiled_code_looks_at_in_an_input_is_the_same_in_its_copy(kind):
    """Strides, gradient and inference mode: with others, the user's own model would be compiled again."""
    made = torch.compile(block(), backend="aot_eager", fullgraph=True)
    with torch.inference_mode(kind == "inference"):
        x = KINDS[kind]()
    with torch.inference_mode("inference" in kind):
        made(x)
        with ls.record(made, "first") as rec:
            made(x)
    assert effect(rec) == UNCHANGED
    assert graphs() == 2


def test_the_users_own_graph_is_what_is_compared_and_it_is_not_compiled_again():
    made = torch.compile(block(), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    made(x)
    assert graphs() == 1
    for _ in range(3):
        with ls.record(made, "first") as rec:
            made(x)
        made(x)
        assert effect(rec) == UNCHANGED
    assert graphs() == 2
    assert counters["graph_break"] == {}


@torch.no_grad()
def test_a_model_that_breaks_into_graphs_is_seen_inside_though_its_first_run_was_untapped():
    model, x = nn.Sequential(zoo.Broken(), zoo.Broken()), torch.randn(2, 4)
    made = torch.compile(model, backend="aot_eager")
    with ls.record(made, ["0.b", "1.a"]) as rec:
        made(x)
    assert rec.missing == []
    assert effect(rec) == UNCHANGED
    assert_same_bits(rec["1.a"], model[1].a(model[0](x)))


# How often, and when not --------------------------------------------------------------------------


def counted(runs):
    """A backend that counts the runs of graphs by the number of their outputs."""

    def backend(graph, inputs):
        outputs = len(next(node for node in graph.graph.nodes if node.op == "output").args[0])

        def run(*args):
            runs.append("tapped" if outputs > 1 else "plain")
            return graph(*args)

        return run

    return backend


@torch.no_grad()
def test_the_first_recorded_forward_is_the_one_and_every_recording_has_its_own():
    runs = []
    made = torch.compile(block(), backend=counted(runs), fullgraph=True)
    for _ in range(2):
        runs.clear()
        with ls.record(made, "first", when="~first(1)") as rec:
            for _ in range(3):
                made(torch.ones(2, 4))
        assert runs == ["plain", "plain", "tapped", "tapped"]  # not due, untapped, and the two
        assert effect(rec) == UNCHANGED


@torch.no_grad()
def test_it_can_be_left_out_and_that_is_said():
    runs = []
    made = torch.compile(block(), backend=counted(runs), fullgraph=True)
    with ls.record(made, "first", options=ls.RecordOptions(observer="skip")) as rec:
        made(torch.ones(2, 4))
    assert runs == ["tapped"]
    assert effect(rec) == "not measured: observer='skip'"
    with pytest.raises(Unsupported, match="observer='never' is not known; give 'measure' or 'skip'"):
        ls.record(made, "first", options=ls.RecordOptions(observer="never"))


def test_what_was_not_measured_has_its_reason():
    made = torch.compile(block(), backend="aot_eager", fullgraph=True)
    with ls.record(made, ".") as rec:
        made(torch.ones(2, 4))
    assert effect(rec) == "not measured: there are no taps"
    with ls.record(made, "first") as rec:
        pass
    assert effect(rec) == "not measured: the model was not called"
    lazy = torch.compile(nn.Sequential(nn.LazyLinear(3)), backend="aot_eager")
    with ls.record(lazy, "0") as rec:
        lazy(torch.ones(2, 4))
    assert effect(rec) == "not measured: the first forward is what gives the model its weights"


@pytest.fixture
def _two_ranks():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_two_ranks")
def test_one_rank_of_several_does_not_run_a_forward_that_the_others_do_not():
    made = torch.compile(block(), backend="aot_eager", fullgraph=True)
    with ls.record(made, "first") as rec:
        made(torch.ones(2, 4))
    assert effect(rec) == "not measured: one more forward of this rank could wait for the others for ever"


def test_an_untapped_forward_that_fails_does_not_take_the_run_with_it():
    model = block()

    def small(graph, inputs):
        if len(next(node for node in graph.graph.nodes if node.op == "output").args[0]) == 1:
            raise MemoryError("no room for it\nand more")
        return graph.forward

    made = torch.compile(model, backend=small, fullgraph=True)
    x = torch.randn(2, 4)
    with torch.no_grad(), ls.record(made, "first") as rec:
        assert_same_bits(made(x), model(x))
    assert_same_bits(rec["first"], model.first(x))
    assert effect(rec).startswith("not measured: the untapped model failed (")
    assert "\n" not in effect(rec)


def test_an_argument_that_cannot_be_copied_is_named_and_the_run_goes_on():
    class Lock:
        scale = 2.0

        def __deepcopy__(self, memo):
            raise TypeError("cannot copy a Lock")

    model = zoo.Holder(lambda m, x, lock: m.first(x) * lock.scale, first=nn.Linear(4, 4))
    made = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), ls.record(made, "first") as rec:
        made(torch.ones(2, 4), Lock())
    assert rec.missing == []
    assert effect(rec) == "not measured: the untapped model failed (TypeError: cannot copy a Lock)"


def test_after_a_forward_that_fails_the_next_one_is_measured():
    made = torch.compile(block(), backend=fusing, fullgraph=True)
    with torch.no_grad(), ls.record(made, "first") as rec:
        with pytest.raises(Exception, match="reduction dim"):
            made(torch.ones(2, 3))
        made(torch.ones(2, 4))
    assert effect(rec).startswith("the taps change the output: max abs 5.00e-01")


# Rounding where the source does -------------------------------------------------------------------


def test_precision_faithful_is_refused_where_it_has_nothing_to_do(tmp_path):
    model, x = block(), torch.ones(2, 4)
    refused = r"precision_faithful=True is for models that torch\.compile runs, and this one runs in "
    with pytest.raises(Unsupported, match=refused + "eager"):
        ls.record(model, "first", options=ls.RecordOptions(precision_faithful=True))
    with pytest.raises(Unsupported, match=refused + "torchscript"):
        ls.record(torch.jit.trace(model, x), "first", options=ls.RecordOptions(precision_faithful=True))
    tapped = ls.compile(model, (x,), backend="torchscript", record_layer_outputs="first")
    with pytest.raises(Unsupported, match=refused + "torchscript, taps compiled in"):
        ls.record(tapped, "first", options=ls.RecordOptions(precision_faithful=True))
    made = torch.compile(model, backend="aot_eager")
    with pytest.raises(Unsupported, match="a setting of Inductor, and this model is compiled by another backend"):
        ls.record(made, "first", options=ls.RecordOptions(precision_faithful=True))
    for backend in ("torchscript", "export", "onnx"):
        with pytest.raises(Unsupported, match=f"a setting of Inductor, and {backend} has none like it"):
            ls.compile(model, (x,), backend=backend, precision_faithful=True)


def test_observer_skip_is_accepted_of_every_model():
    with ls.record(block(), "first", options=ls.RecordOptions(observer="skip")) as rec:
        rec.model(torch.ones(2, 4))
    assert "observer_effect" not in rec.run.manifest.settings
