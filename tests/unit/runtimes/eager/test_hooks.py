"""What is wanted of a module has two hooks on it, and what they tell is what ran, whoever called it."""

from __future__ import annotations

import copy
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.runtimes import eager
from seen import Seen

ONE, TWO = {"output"}, {"input", "output"}


def own_hooks(module):
    """Count the hooks on a module itself."""
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def seen(model, wanted, run, **options):
    sink = Seen()
    with eager.watch(model, wanted, sink, **options):
        run(model)
    assert_no_hooks_left(model)
    assert sink.failures == []
    return sink


def outputs(sink):
    return [(str(p), m, t) for m, p, t in sink.records if p.side == "output"]


# Which modules have hooks -----------------------------------------------------------------------


def nested():
    """A part that holds two, one that holds none, and a layer alone."""
    layer = lambda: nn.Linear(2, 2)  # noqa: E731
    return nn.Sequential(nn.Sequential(layer(), nn.Tanh()), nn.Sequential(), layer())


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"2": ONE}, {"": 2, "0": 0, "1": 0, "2": 2}),
        ({"": ONE}, {"": 2, "2": 0}),
        ({"0.1": ONE}, {"": 2, "0": 2, "0.0": 0, "0.1": 2}),
    ],
)
def test_what_is_asked_for_has_hooks_and_what_is_around_it_and_nothing_else(wanted, expected):
    model = nested()
    with eager.watch(model, wanted, Seen()):
        modules = dict(model.named_modules())
        assert {name: own_hooks(modules[name]) for name in expected} == expected
    assert_no_hooks_left(model)


def test_where_operations_are_watched_every_call_is_seen_begin():
    model = nested()
    with eager.watch(model, {"2": ONE}, Seen(), ops=lambda name: None):
        assert {own_hooks(module) for module in model.modules()} == {2}


def test_a_shared_module_counts_as_held_under_whichever_name_it_is_watched():
    layer = nn.Linear(2, 2)
    model = zoo.Holder(lambda m, x: m.block(m.first(x)), first=layer, block=nn.Sequential(layer))
    with eager.watch(model, {"first": ONE, "block": ONE}, Seen()):
        assert (own_hooks(layer), own_hooks(model.block)) == (2, 2)
    with eager.watch(model, {"block": ONE}, Seen()):
        assert (own_hooks(layer), own_hooks(model.block)) == (0, 2)


def test_a_wrapper_without_a_name_is_the_root_and_what_it_wraps_is_a_part():
    inner = nn.Linear(2, 2)
    model = zoo.Holder(lambda m, x: m.module(x), module=inner)
    with eager.watch(model, {"": ONE}, Seen()):
        assert (own_hooks(model), own_hooks(inner)) == (2, 2)


# Calls ------------------------------------------------------------------------------------------


def test_calls_from_different_depths_are_counted_alike():
    def through(call, depth, x):
        return call(x) if not depth else through(call, depth - 1, x)

    def forward(m, x):
        for depth in (0, 3, 3, 0, 1, 0):
            x = through(m.part, depth, x)
        return x

    model = zoo.Holder(forward, part=zoo.Holder(lambda m, x: x + 1))
    sink = seen(model, {"part": ONE}, lambda m: m(torch.zeros(1)))
    assert [(m.call, t.item()) for m, _, t in sink.records] == [(call, call + 1) for call in range(6)]


@pytest.mark.parametrize("sides", [ONE, TWO], ids=["one", "two"])
def test_a_call_that_raises_is_a_call_and_has_no_record(sides):
    def forward(m, x):
        if x.item() < 0:
            raise ValueError
        return x + 1

    def around(m, x):
        with suppress(ValueError):
            m.part(-x)
        return m.part(x)

    model = zoo.Holder(around, part=zoo.Holder(forward))
    sink = seen(model, {"part": sides}, lambda m: m(torch.ones(1)))
    assert [(m.call, t.item()) for _, m, t in outputs(sink)] == [(1, 2)]
    assert (sink.forwards, sink.empties) == ([False], [])


@pytest.mark.parametrize("alone", [False, True], ids=["inside", "on its own"])
def test_what_raised_did_run_and_that_is_why_it_has_no_record(alone):
    def forward(m, x):
        raise ZeroDivisionError

    model = zoo.Holder(lambda m, x: m.bad(m.good(x)), good=nn.Identity(), bad=zoo.Holder(forward), last=nn.Identity())
    with ls.record(model, ["good", "bad", "last"]) as rec:
        model.good(torch.ones(1))
        with pytest.raises(ZeroDivisionError):
            (model.bad if alone else model)(torch.ones(1))
    assert {m.point: m.reason for m in rec.missing} == {
        "bad:output": "its forward did not finish",
        "last:output": "never called",
    }
    assert (rec.completeness.forwards, rec.completeness.failed) == (2, 1)


@pytest.mark.parametrize("alone", [False, True], ids=["inside", "on its own"])
def test_an_interrupt_in_the_middle_leaves_the_next_forward_a_new_step(alone):
    def forward(m, x):
        if x.item() == 0:
            raise KeyboardInterrupt
        return x + 1

    def run(model):
        with pytest.raises(KeyboardInterrupt):
            (model.part if alone else model)(torch.zeros(1))
        model(torch.ones(1))

    model = zoo.Holder(lambda m, x: m.part(m.first(x)), first=nn.Identity(), part=zoo.Holder(forward))
    sink = seen(model, {"first": ONE, "part": ONE}, run)
    last = sink.begun - 1
    assert [(p.name, m.call) for m, p, _ in sink.records if m.step == last] == [("first", 0), ("part", 0)]
    assert sink.forwards == [False]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sides", [ONE, TWO], ids=["one", "two"])
def test_a_call_that_checkpointing_repeats_is_counted_and_not_recorded_again(reentrant, sides):
    def forward(m, x):
        return checkpoint(lambda y: m.last(m.part(y)).sin(), x, use_reentrant=reentrant)

    model = zoo.Holder(forward, part=nn.Linear(3, 3), last=nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    sink = seen(model, {"part": sides, "last": sides}, lambda m: [m(x).sum().backward() for _ in range(2)])
    assert [(p, m.step, m.call) for p, m, _ in outputs(sink)] == [
        ("part:output", 0, 0), ("last:output", 0, 0), ("part:output", 1, 0), ("last:output", 1, 0),
    ]  # fmt: skip
    assert sink.repeats == ["part", "last"] * 2
    assert sink.begun == 2


def test_a_part_that_is_called_on_its_own_is_a_step_of_its_own():
    model = nested()
    x = torch.ones(1, 2)
    sink = seen(model, {"0.0": ONE, "2": ONE}, lambda m: [m[2](x), m(x), m[2](x), m[0](x)])
    assert [(str(p), m.step, m.batch, m.call) for m, p, _ in sink.records] == [
        ("2:output", 0, 0, 0), ("0.0:output", 1, 1, 0), ("2:output", 1, 1, 0), ("2:output", 2, 2, 0),
        ("0.0:output", 3, 3, 0),
    ]  # fmt: skip
    assert sink.forwards == [False] * 4


def test_threads_that_call_a_part_on_its_own_have_each_their_steps():
    model, start = nested(), threading.Barrier(3)

    def loop(value):
        start.wait()
        for _ in range(30):
            model[0][1](torch.full((1, 2), value))

    def run(model):
        threads = [threading.Thread(target=loop, args=(float(n),)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    sink = seen(model, {"0.1": ONE}, run)
    assert sorted(m.step for m, _, _ in sink.records) == list(range(90))
    assert {m.call for m, _, _ in sink.records} == {0}


# Copies and tracers -----------------------------------------------------------------------------


def test_a_shallow_copy_shares_the_hook_which_stays_silent_in_it():
    def forward(m, x):
        return copy.copy(m.part)(m.part(x))

    model = zoo.Holder(forward, part=nn.Linear(2, 2))
    x = torch.ones(1, 2)

    def run(model):
        copy.copy(model.part)(x)
        model(x)
        copy.copy(model)(x)

    sink = seen(model, {"part": ONE}, run)
    assert [str(p) for _, p, _ in sink.records] == ["part:output"] * 2  # a copy of the model calls the part itself
    assert_same_bits(sink.records[0][2], model.part(x))


@pytest.mark.parametrize("traced", ["part", "part.0", "function"])
def test_a_part_that_is_traced_in_the_middle_of_a_forward_is_no_call(traced):
    def forward(m, x):
        target = {"part": m.part, "part.0": m.part[0], "function": lambda y: m.part(y)}[traced]
        return torch.jit.trace(target, (x,), check_trace=False)(m.part(x))

    model = zoo.Holder(forward, part=nn.Sequential(nn.Linear(3, 3), nn.Tanh())).requires_grad_(False)
    x = torch.ones(1, 3)
    sink = seen(model, {"part.0": ONE, "part.1": ONE}, lambda m: [m(x), m(x)])
    assert [(p.name, m.step, m.call) for m, p, _ in sink.records] == [
        ("part.0", 0, 0), ("part.1", 0, 0), ("part.0", 1, 0), ("part.1", 1, 0),
    ]  # fmt: skip


def test_a_part_that_calls_itself_while_nothing_is_due_is_one_step_each_time():
    def forward(m, x, depth=0):
        return m(x, depth + 1) * 2 if depth < 2 else x

    model = zoo.Holder(lambda m, x: m.a(x), a=zoo.Holder(forward))
    with ls.record(model, "a", when="every(3)") as rec:
        for _ in range(7):
            model.a(torch.ones(1))
    assert rec.completeness.forwards == 7
    due = [(record.moment.step, record.moment.call) for record in rec.run.records()]
    assert due == [(step, call) for step in (0, 3, 6) for call in (2, 1, 0)]


def test_a_call_that_another_hook_ends_before_ours_is_no_end_of_the_one_around_it():
    def refuses(module, args):
        raise ValueError

    def forward(m, x):
        with suppress(ValueError):
            m.part(x)
        return m.last(x)

    model = zoo.Holder(forward, part=nn.Identity(), last=nn.Identity())
    handle = model.part.register_forward_pre_hook(refuses)
    sink = seen(model, {"part": TWO, "last": ONE, "": ONE}, lambda m: [m(torch.ones(1)), handle.remove()])
    assert [(str(p), m.step) for m, p, _ in sink.records] == [("last:output", 0), (".:output", 0)]
    assert (sink.forwards, sink.empties) == ([False], [])
