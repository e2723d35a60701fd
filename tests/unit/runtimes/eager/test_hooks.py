"""What is wanted of a module has two hooks on it, and what they tell is what ran, whoever called it."""

from __future__ import annotations

import copy
import io
import logging
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


def assert_alike(sink, other):
    """The same points at the same moments with the same bits, and the same account of the rest."""
    found, expected = outputs(sink), outputs(other)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for (_, _, a), (_, _, b) in zip(found, expected, strict=True):
        assert_same_bits(a, b)
    assert (sink.begun, sink.forwards, sink.repeats) == (other.begun, other.forwards, other.repeats)
    assert sink.empties == [each for each in other.empties if each[0].side == "output"]


# Which modules have one -------------------------------------------------------------------------


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


def test_two_recordings_have_the_hooks_that_each_of_them_needs():
    model = nested()
    with eager.watch(model, {"2": ONE}, Seen()), eager.watch(model, {"2": TWO}, Seen()):
        assert own_hooks(model[2]) == 4
    assert_no_hooks_left(model)


# What is seen is the same -----------------------------------------------------------------------


def test_three_calls_are_three_numbers_and_what_torchs_own_hook_sees():
    model, (x,) = zoo.called_thrice()
    taken = []
    handle = model.layer.register_forward_hook(lambda module, args, out: taken.append(out.clone()))
    model(x)
    handle.remove()
    sink = seen(model, {"layer": ONE}, lambda m: [m(x), m(x)])
    assert [(m.step, m.call) for m, _, _ in sink.records] == [(step, call) for step in (0, 1) for call in (0, 1, 2)]
    for (_, _, found), expected in zip(sink.records, taken + taken, strict=True):
        assert_same_bits(found, expected)


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


def test_deep_copies_and_pickles_are_silent_and_work():
    model, x, file = nested(), torch.ones(1, 2), io.BytesIO()
    sink = Seen()
    with eager.watch(model, {"0.0": ONE, "2": ONE}, sink):
        twin = copy.deepcopy(model)
        torch.save(model, file)
        during = twin(x)
        twin[2](x)
    assert b"layerscope" not in file.getvalue()
    file.seek(0)
    for out in (during, twin(x), torch.load(file, weights_only=False)(x)):
        assert_same_bits(out, model(x))
    assert (sink.records, sink.begun) == ([], 0)


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
    expected = seen(model, {"part": TWO}, run)
    assert_alike(sink, expected)
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


def both(make, wanted, run):
    """What is told of outputs alone, and of inputs and outputs."""
    return [seen(make(), dict.fromkeys(wanted, sides), run) for sides in (ONE, TWO)]


def test_a_part_that_calls_itself_on_its_own_is_one_step():
    part, (x,) = zoo.recursive()
    one, two = both(lambda: zoo.Holder(lambda m, x: m.part(x), part=part), ["part"], lambda m: m.part(x))
    assert_alike(one, two)


def test_another_threads_call_is_seen_when_the_module_calls_itself_meanwhile():
    main = threading.get_ident()

    def run(model):
        here, go_on = threading.Event(), threading.Event()

        def forward(m, x):
            if threading.get_ident() != main:
                here.set()
                assert go_on.wait(10)
                return x + 5
            return m(x[1:]) if len(x) > 1 else x + 0

        model.part._forward = forward
        thread = threading.Thread(target=model, args=(torch.zeros(1),))
        thread.start()
        assert here.wait(10)
        model(torch.zeros(2))
        go_on.set()
        thread.join()

    one, two = both(lambda: zoo.Holder(lambda m, x: m.part(x), part=zoo.Holder(None)), ["part"], run)
    assert_alike(one, two)


def test_a_module_that_called_itself_is_not_said_to_have_been_without_hooks(caplog):
    part, (x,) = zoo.recursive()
    model = zoo.Holder(lambda m, x: m.part(x), part=part)
    with eager.watch(model, {"part": ONE}, Seen()), caplog.at_level(logging.WARNING, "layerscope"):
        model(x)
        model.part(x[:1])
    assert caplog.records == []


def test_a_users_hook_that_came_later_comes_later_after_the_module_called_itself():
    part, (x,) = zoo.recursive()
    model, sink = zoo.Holder(lambda m, x: m.part(x), part=part), Seen()
    with eager.watch(model, {"part": ONE}, sink):
        part.register_forward_hook(lambda module, args, out: torch.full_like(out, 1e6))
        model(x)
        model(x[:1])
    assert sink.records[-1][2].abs().max() < 1e3


def test_a_repeated_call_that_checkpointing_breaks_off_counts_alike():
    def forward(m, x):
        return checkpoint(m.layer, x, use_reentrant=False)

    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    names = ["layer.0", "layer.1"]
    one, two = both(lambda: zoo.Holder(forward, layer=layer), names, lambda m: m(x).sum().backward())
    assert_alike(one, two)


def test_a_part_that_calls_itself_while_nothing_is_due_is_one_step_each_time():
    def forward(m, x, depth=0):
        return m(x, depth + 1) * 2 if depth < 2 else x

    found = []
    for sides in (":output", ":input"):
        model = zoo.Holder(lambda m, x: m.a(x), a=zoo.Holder(forward))
        with ls.record(model, ["a:output", f"a{sides}"], when="every(3)") as rec:
            for _ in range(7):
                model.a(torch.ones(1))
        outputs = [r for r in rec.run.records() if r.point.side == "output"]
        found.append((rec.completeness.forwards, [(r.moment.step, r.moment.call) for r in outputs]))
    assert found[0] == found[1]
    assert found[0][0] == 7
