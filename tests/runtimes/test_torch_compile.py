"""Models that torch.compile runs keep the contract, and are compiled once more for a recording and never again.

The backend is aot_eager, which traces as Inductor does and generates no code; the Inductor itself is checked once here
and in the long form. CUDA graphs are checked in test_cuda.py, where there is a device.
"""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import layerscope as ls
import zoo
from asserts import assert_same_bits, hooks_on
from layerscope.runtimes import find
from layerscope.runtimes.torch_compile import TorchCompile
from runtimes.contract import Contract, Given, Plain, Prepared
from seen import Seen


@pytest.fixture(autouse=True)
def _fresh():
    """Compiled code is kept by code object, for the whole process, and only so much of it."""
    torch._dynamo.reset()
    counters.clear()


class Compiled(Prepared):
    """A model of each test's own, made after Dynamo has forgotten the others: what has run has run in this test."""

    raises = "reduction dim"

    def given(self, kind, *shape):
        torch.manual_seed(0)
        source, x = kind().eval(), torch.randn(shape or (5, 4))
        return Given(self.prepare(source, x), source, x)


class TestWrapped(Compiled, Contract):
    def prepare(self, model, x):
        made = torch.compile(model, backend="aot_eager", fullgraph=True)
        made(x)
        return made


class TestNeverCalledBefore(Compiled):
    test_values_are_those_of_each_input = (
        Contract.test_values_are_those_of_each_input_and_not_of_the_one_it_was_made_with
    )
    test_batch_and_length_may_change = Contract.test_batch_and_length_may_change
    test_nothing_is_left_behind = Contract.test_nothing_is_left_behind

    def prepare(self, model, x):
        return torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)


class TestInPlace(Compiled):
    """`model.compile()`, which torch itself refuses for a bare nn.Sequential with fullgraph=True."""

    test_it_sees_the_values_that_the_layers_compute = Contract.test_it_sees_the_values_that_the_layers_compute
    test_nothing_is_left_behind = Contract.test_nothing_is_left_behind
    test_exceptions_pass_through = Contract.test_exceptions_pass_through

    def prepare(self, model, x):
        model.compile(backend="aot_eager")
        model(x)
        return model


def test_what_has_run_before_the_contract_begins_has_compiled_code():
    """Else the promises would be kept for models that were never called, and for no others."""
    before = graphs()
    given = TestWrapped().given(Plain)
    assert graphs() == before + 1
    given.watched(given.x + 1)
    assert graphs() == before + 1


@pytest.mark.stress
class TestInductor(Compiled, Contract):
    rtol = 1e-5

    def prepare(self, model, x):
        return torch.compile(model, fullgraph=True)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def block():
    torch.manual_seed(0)
    model = zoo.Holder(
        lambda m, x: m.second(m.first(x).relu()), first=nn.Linear(4, 4), second=nn.Linear(4, 4), unused=nn.Linear(4, 4)
    )
    return model, torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(2, 4)


def test_the_inductor_sees_the_values_of_eager():
    model, _, x = block()
    made = torch.compile(model, fullgraph=True)
    with ls.record(made, ["first", "second:input"]) as rec, torch.no_grad():
        made(x)
        made(-x)
    for step, value in enumerate((x, -x)):
        torch.testing.assert_close(rec.run.tensor("first", step=step), model.first(value), rtol=0, atol=1e-6)
        found = rec.run.tensor("second:input[0]", step=step)
        torch.testing.assert_close(found, model.first(value).relu(), rtol=0, atol=1e-6)


def test_a_model_that_has_run_is_compiled_once_more_and_that_is_said(caplog):
    _, made, x = block()
    made(x)
    assert graphs() == 1
    with caplog.at_level(logging.WARNING), ls.record(made, "first"):
        made(x)
        made(x + 1)
    assert graphs() == 2
    assert caplog.text.count("is compiled once more") == 1
    assert counters["graph_break"] == {}


def test_to_stop_and_to_record_again_compiles_nothing():
    _, made, x = block()
    made(x)
    with ls.record(made, "first"):
        made(x)
    before = graphs()
    for _ in range(10):
        made(x)
        with ls.record(made, "first") as rec:
            made(x)
        assert rec.missing == []
    assert graphs() == before == 2
    assert counters["graph_break"] == {}


def test_forwards_that_are_not_due_run_in_the_first_compilation():
    _, made, x = block()
    with ls.record(made, "first", when="every(3)") as rec:
        for _ in range(7):
            made(x)
    assert [m.step for m in rec.run.moments] == [0, 3, 6]
    assert graphs() == 2
    made(x)
    assert graphs() == 2


def test_two_models_of_one_class_do_not_use_each_others_code():
    """The trap: compiled code is shared between instances, and a hook is not guarded."""
    plain, made_plain, x = block()
    made_plain(x)
    torch.manual_seed(1)
    other = zoo.Holder(plain._forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    made = torch.compile(other, backend="aot_eager", fullgraph=True)
    for model, source in ((made, other), (made_plain, plain)):
        with ls.record(model, "first") as rec:
            model(x)
        assert_same_bits(rec["first"], source.first(x))


def test_shapes_that_change_cost_the_graphs_that_they_cost_without_a_recording():
    _, made, _ = block()
    with ls.record(made, "first") as rec:
        for length in range(2, 9):
            made(torch.ones(length, 4))
    assert graphs() == 3  # one for the first shape, one for all others, and the untapped one
    assert [rec.run.tensor("first", step=step).shape[0] for step in range(7)] == list(range(2, 9))


def test_a_training_step_has_the_gradients_of_eager():
    model, made, x = block()
    with ls.record(made, "first") as rec:
        made(x).square().sum().backward()
    found = model.first.weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, model.first.weight.grad)
    assert_same_bits(rec["first"], model.first(x))


def test_nested_values_have_the_names_of_the_source():
    for make, points in (
        (zoo.tuple_outputs, ["block:output[0]", "block:output[2][0]"]),
        (zoo.named_outputs, ["first:output[hidden]", "first:output[weights]"]),
        (zoo.keyword_inputs, ["block:input[0]", "block:input[extras][bias]", "block:input[scale]"]),
    ):
        model, args = make()
        made = torch.compile(model, backend="aot_eager", fullgraph=True)
        pattern = points[0].split("[")[0]
        with ls.record(made, pattern) as rec:
            made(*args)
        assert sorted(map(str, rec.run.points)) == points


def test_the_module_itself_may_be_called_in_the_block_and_is_not_recorded():
    model, made, x = block()
    sink = Seen()
    with TorchCompile().watch(made, {"first": {"output"}}, sink):
        made(x)
        model(x)
    assert len(sink.records) == 1
    assert hooks_on(model) == 0


def test_threads_do_not_mix_up_what_they_see():
    model, made, x = block()
    inputs = [torch.full((2, 4), float(value)) for value in range(4)]
    with ls.record(made, ["first", ".:input"]) as rec, torch.no_grad():
        made(x)
        threads = [threading.Thread(target=lambda v=value: [made(v) for _ in range(5)]) for value in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for step in range(1, 21):
        torch.testing.assert_close(
            rec.run.tensor("first", step=step), model.first(rec.run.tensor(".:input[0]", step=step))
        )


# What stays silent, and what is refused ---------------------------------------------------------


def test_a_module_that_was_never_called_is_missing():
    _, made, x = block()
    with ls.record(made, ["first", "unused"]) as rec:
        made(x)
    assert [(m.point, m.reason) for m in rec.missing] == [("unused:output", "never called")]


@torch.no_grad()
def test_code_that_a_broken_graph_shares_is_missing_with_the_reason_and_the_way_out():
    torch.manual_seed(0)
    model = nn.Sequential(zoo.Broken(), zoo.Broken())
    made = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 4)
    made(x)
    with ls.record(made, ["0", "1.a"]) as rec:
        made(x)
    assert_same_bits(rec["0"], model[0](x))
    [missing] = rec.missing
    assert missing.point == "1.a:output"
    assert missing.reason.startswith("shared compiled code: ")
    with pytest.raises(RuntimeError, match=r"shared compiled code.*torch\._dynamo\.reset"), ls.record(made, "1.a"):
        made(x)
    torch._dynamo.reset()
    with ls.record(made, "1.a") as rec:
        made(x)
    assert_same_bits(rec["1.a"], model[1].a(model[0](x)))


def test_gradients_and_operations_are_refused():
    _, made, _ = block()
    with pytest.raises(TypeError, match=r"gradients are not seen inside a model that torch\.compile runs"):
        ls.record(made, "first:grad_output")
    with pytest.raises(TypeError, match=r"operations are not seen inside a model that torch\.compile runs"):
        ls.record(made, "op:aten.relu")


def test_a_second_recording_at_the_same_time_is_refused():
    _, made, x = block()
    with ls.record(made, "first") as rec:
        with pytest.raises(TypeError, match=r"give one record\(\) all the taps"), ls.record(made, "second"):
            pass
        made(x)
    assert rec.missing == []


def test_it_is_found():
    model, made, _ = block()
    assert isinstance(find(made), TorchCompile)
    model.compile(backend="aot_eager")
    assert isinstance(find(model), TorchCompile)
