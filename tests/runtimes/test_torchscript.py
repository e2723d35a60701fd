"""TorchScript keeps the contract, traced and scripted, from its file alone."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import Tensor, nn

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.runtimes import find, torchscript
from runtimes.contract import Contract
from seen import Seen


def reloaded(module):
    """What somebody who has only the file loads."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


class TestTraced(Contract):
    def prepare(self, model, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            return reloaded(torch.jit.trace(model, (x,), check_trace=False))


class TestScripted(Contract):
    def prepare(self, model, x):
        return reloaded(torch.jit.script(model))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
        self.calls += 1
        return self.lin(x), [x, x + 1], None


class Branches(nn.Module):
    """Control flow, a type used for several modules, a module called in a loop, a helper method, a list of layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Inner(), Inner(), Inner()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def helped(self, x: Tensor) -> Tensor:
        return self.third(x)[0]

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)[0] if times > 1 else self.helped(x)
        for _ in range(times):
            x = self.second(x)[0]
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.jit.export
    def twice(self, x: Tensor) -> Tensor:
        return self.forward(self.forward(x, 1), 1)


@pytest.fixture
def branches():
    torch.manual_seed(0)
    source = Branches()
    return source, reloaded(torch.jit.script(source)), torch.randn(2, 4)


def texts(sink):
    return [f"{point} {moment}" for moment, point, _ in sink.records]


def seen(module, names, *args):
    sink = Seen()
    with torchscript.watch(module, {name: {"output"} for name in names}, sink):
        module(*args)
    assert sink.failures == []
    return sink


def test_the_branch_that_ran_is_recorded_and_the_loop_counts_its_calls(branches):
    source, module, x = branches
    names = ["first.lin", "second.lin", "third.lin", "layers.1"]
    assert texts(seen(module, names, x, 2)) == [
        "first.lin:output step=0",
        "second.lin:output step=0",
        "second.lin:output step=0 call=1",
        "layers.1:output step=0",
    ]
    sink = seen(module, names, x, 1)
    assert texts(sink) == ["third.lin:output step=0", "second.lin:output step=0", "layers.1:output step=0"]
    assert_same_bits(sink.records[0][2], source.third.lin(x))
    assert_same_bits(sink.records[2][2], source(x, 1))


def test_modules_of_one_type_are_told_apart(branches):
    source, module, x = branches
    assert str(module.first._c._type()) == str(module.second._c._type())
    sink = seen(module, ["second.lin"], x, 2)
    assert [point.name for _, point, _ in sink.records] == ["second.lin", "second.lin"]
    hidden = source.first.lin(x)
    assert_same_bits(sink.records[0][2], source.second.lin(hidden))


def test_tuples_and_lists_are_walked_with_the_names_of_the_source(branches):
    _, module, x = branches
    sink = seen(module, ["first"], x, 2)
    assert texts(sink) == ["first:output[0] step=0", "first:output[1][0] step=0", "first:output[1][1] step=0"]


def test_every_method_of_the_module_is_recorded_and_each_call_of_one_is_a_step(branches):
    source, module, x = branches
    sink = Seen()
    with torchscript.watch(module, {"second.lin": {"output"}}, sink):
        out = module.twice(x)
    assert texts(sink) == ["second.lin:output step=0", "second.lin:output step=0 call=1"]
    assert sink.begun == 1
    assert_same_bits(out, source.twice(x))


def test_what_the_code_assigns_is_the_modules_own(branches):
    _, module, x = branches
    module(x, 2)
    seen(module, ["first"], x, 3)
    assert (module.first.calls, module.second.calls) == (2, 5)
    module(x, 2)
    assert module.second.calls == 7


def test_buffers_that_a_run_changes_are_the_modules_own():
    torch.manual_seed(0)
    source = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
    module = reloaded(torch.jit.script(source))
    x = torch.randn(6, 4)
    seen(module, ["0"], x)
    source(x)
    assert_same_bits(dict(module.named_buffers())["0.running_mean"], source[0].running_mean)


def test_a_module_that_has_run_already_is_recorded_and_runs_on_as_before(branches):
    source, module, x = branches
    for _ in range(4):
        module(x, 2)
    graph = str(module.graph)
    assert len(seen(module, ["first.lin"], x, 2).records) == 1
    assert str(module.graph) == graph
    assert_same_bits(module(x, 2), source(x, 2))
    assert "layerscope::" not in str(module.inlined_graph)  # the operation that tells; a folder may be called so too


def test_gradients_flow_as_without_a_recording(branches):
    source, module, x = branches
    sink = Seen()
    with torchscript.watch(module, {"second.lin": {"output"}}, sink):
        for _ in range(3):  # the second and third run are what the profiler made of the first
            module.zero_grad()
            module(x, 2).square().sum().backward()
    source(x, 2).square().sum().backward()
    torch.testing.assert_close(module.second.lin.weight.grad, source.second.lin.weight.grad)
    assert len(sink.records) == 6


def test_the_file_is_not_touched(branches, tmp_path):
    _, module, x = branches
    path = tmp_path / "model.pt"
    torch.jit.save(module, path)
    before = path.read_bytes()
    with ls.record(path, "layers.*", to=tmp_path / "run") as rec:
        rec.model(x, 2)
    assert path.read_bytes() == before
    assert [str(p) for p in ls.open_run(tmp_path / "run").points] == ["layers.0:output", "layers.1:output"]


def test_weights_have_the_fingerprints_of_the_source(branches, tmp_path):
    source, module, x = branches
    runs = {}
    for name, model in (("source", source), ("script", module)):
        with ls.record(model, "layers.0", to=tmp_path / name) as rec:
            rec.model(x, 2)
        runs[name] = ls.open_run(tmp_path / name).manifest.weights
    assert runs["source"] == runs["script"]


def test_a_shared_layer_that_was_traced_has_one_name():
    model, (x,) = zoo.shared()
    module = reloaded(torch.jit.trace(model, (x,)))
    assert torchscript.shared(module) == {"b": "a"}
    with ls.record(module, "b") as rec:
        module(x)
    assert [m.call for m in rec.run.moments] == [0, 1]
    assert_same_bits(rec.run.tensor("a", call=1), model.a(model.a(x)))


# What stays silent ------------------------------------------------------------------------------


def test_a_dead_output_is_missing_with_the_reason():
    model, (x,) = zoo.never_called()
    model._forward = lambda m, x: (m.unused(x), m.used(x))[1]
    module = reloaded(torch.jit.trace(model, (x,)))
    with ls.record(module, ["used", "unused"]) as rec:
        module(x)
    [missing] = rec.missing
    assert missing.point == "unused:output"
    assert "tracing leaves out what nothing uses (a dead output)" in missing.reason


def test_a_branch_that_did_not_run_is_missing_with_the_reason(branches):
    _, module, x = branches
    with ls.record(module, ["first", "second"]) as rec:
        module(x, 1)
    assert [(m.point, m.reason) for m in rec.missing] == [("first:output", "never called: no branch that calls it ran")]


def test_if_nothing_fires_the_end_of_the_block_raises(branches):
    _, module, x = branches
    with (
        pytest.raises(RuntimeError, match="no tap saw a tensor: first:output: never called"),
        ls.record(module, "first"),
    ):
        module(x, 1)


# Frozen -----------------------------------------------------------------------------------------


@pytest.fixture
def frozen():
    model, (x,) = zoo.plain()
    return model.eval(), reloaded(torch.jit.freeze(torch.jit.trace(model.eval(), (x,)))), x


def test_operations_are_the_points_of_a_frozen_module(frozen):
    model, module, x = frozen
    places = torchscript.points(module)
    assert [place.types[0] for place in places] == ["Sequential", "linear", "relu", "linear"]
    with ls.record(module, [place.name for place in places[1:]]) as rec, torch.no_grad():
        module(x)
    first = model[0](x)
    for place, value in zip(places[1:], (first, first.relu(), model(x)), strict=True):
        assert_same_bits(rec[place.name], value)
    with ls.record(module, "type:relu") as rec:
        module(x)
    assert_same_bits(rec[places[2].name], first.relu())


def test_a_layer_of_a_frozen_module_is_refused_with_the_way_that_works(frozen):
    _, module, _ = frozen
    with pytest.raises(LookupError, match=r"torch\.jit\.freeze.*record_layer_outputs=True"):
        ls.record(module, "0")


# Operations and refusals ------------------------------------------------------------------------


def test_operations_are_recorded_where_they_run(frozen):
    model, (x,) = zoo.plain()
    for module in (reloaded(torch.jit.trace(model, (x,))), frozen[1]):
        with ls.record(module, "op:aten.linear") as rec:
            module(x)
        assert [m.call for m in rec.run.moments] == [0, 1]
        assert_same_bits(rec.run.tensor("op:aten.linear", call=1), model(x))


def test_gradients_are_refused(branches):
    with pytest.raises(TypeError, match="gradients are not seen inside TorchScript"):
        ls.record(branches[1], "first:grad_output")


def test_an_engine_is_refused_with_the_way_that_works():
    """As torch_neuronx leaves it: one operation that hands everything to a NEFF."""
    library = torch.library.Library("neuron", "DEF")
    library.define("forward_v2_1(Tensor x) -> Tensor")
    library.impl("forward_v2_1", lambda x: x + 1, "CompositeExplicitAutograd")
    engine = zoo.Holder(lambda m, x: torch.ops.neuron.forward_v2_1(x), inner=nn.Identity())
    module = reloaded(torch.jit.trace(engine, (torch.ones(2),)))
    with pytest.raises(TypeError, match=r"a Neuron NEFF \(neuron::forward_v2_1\).*record_layer_outputs=True"):
        ls.record(module, "inner")
    assert "nothing inside can be recorded, only its inputs and outputs" in torchscript.remark(module)
    with ls.record(module, ".:input,output") as rec:
        module(torch.ones(2))
    assert torch.equal(rec["."], torch.full((2,), 2.0))
    library._destroy()


def test_a_second_recording_at_the_same_time_is_refused(branches):
    _, module, x = branches
    with ls.record(module, "first") as rec:
        with pytest.raises(TypeError, match=r"give one record\(\) all the taps"), ls.record(module, "second"):
            pass
        module(x, 2)
    assert rec.missing == []


def test_it_is_found(branches):
    assert find(branches[1]) is torchscript
    assert find(torch.jit.script(branches[0])) is torchscript
