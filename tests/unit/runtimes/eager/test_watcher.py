"""Hooks are there when something is due and not there when nothing is, and nobody's forward notices."""

from __future__ import annotations

import copy
import gc
import io
import logging
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits, hooks_on
from layerscope.points import Moment
from layerscope.runtimes import eager
from layerscope.runtimes.eager.watcher import Watcher
from layerscope.runtimes.sink import Step
from seen import Seen

OURS = 2  # hooks on each watched module


class Scheduled(Seen):
    """A sink whose steps are due where `due(step)` says so."""

    def __init__(self, due):
        super().__init__()
        self.due = due

    def begin(self):
        step = super().begin()
        return Step(step.moment, idle=not self.due(step.moment.step))


def deep():
    """Two parts of three layers each: nine modules in all."""
    part = lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))  # noqa: E731
    return nn.Sequential(part(), part()), torch.ones(2, 3)


def everything(model):
    return {name: {"input", "output"} for name, _ in model.named_modules()}


def run(model, x, times):
    for _ in range(times):
        model(x)


def test_while_nothing_is_due_only_the_models_own_hooks_are_there():
    model, x = deep()
    with eager.watch(model, everything(model), Scheduled(lambda step: False)):
        assert hooks_on(model) == 9 * OURS
        run(model, x, 2)
        assert hooks_on(model) == OURS
        assert hooks_on(model[0]) == 0
        run(model, x, 1000)
        assert hooks_on(model) == OURS
    assert_no_hooks_left(model)


def test_a_due_step_after_a_thousand_idle_ones_sees_what_it_would_have_seen_at_first():
    model, x = deep()
    late, first = Scheduled(lambda step: step == 1000), Seen()
    with eager.watch(model, everything(model), late):
        run(model, x, 1001)
        assert hooks_on(model) == 9 * OURS
        run(model, x, 3)
        assert hooks_on(model) == OURS
    with eager.watch(model, everything(model), first):
        model(x)
    assert [p for _, p, _ in late.records] == [p for _, p, _ in first.records]
    assert {m.step for m, _, _ in late.records} == {1000}
    assert len(late.records) == 18
    for (_, _, found), (_, _, expected) in zip(late.records, first.records, strict=True):
        assert_same_bits(found, expected)
    assert late.forwards == [False] * 1004


def test_one_idle_step_between_two_due_ones_leaves_the_hooks_where_they_are():
    model, x = deep()
    with eager.watch(model, everything(model), Scheduled(lambda step: step % 2 == 0)) as watched:
        for _ in range(6):
            watched(x)
            assert hooks_on(model) == 9 * OURS


@pytest.mark.parametrize("when", ["steps(7)", "every(7, offset=7)"])
def test_a_recording_has_the_steps_of_its_schedule_and_is_complete(when):
    model, x = deep()
    inputs = [x * step for step in range(20)]
    with ls.record(model, ["**", "**:input"], when=when, on_error="raise") as rec, torch.no_grad():
        for each in inputs:
            model(each)
    steps = [7] if "steps" in when else [7, 14]
    assert sorted({m.step for m in rec.run.moments}) == steps
    for step in steps:
        torch.testing.assert_close(rec.run.tensor("1.2", step=step), model(inputs[step]).detach(), rtol=0, atol=0)
    assert rec.completeness.forwards == 20


def test_a_listener_that_wants_nothing_for_a_while_has_no_hooks_for_as_long():
    model, x = deep()

    class Ear:
        wanted = False
        heard = 0

        def wants(self):
            return self.wanted

        def seen(self, point, moment, tensor, summary):
            self.heard += 1

    ear = Ear()
    with ls.record(model, "**", keep="summary", options=ls.RecordOptions(listener=ear)):
        run(model, x, 3)
        assert (hooks_on(model), ear.heard) == (OURS, 0)
        ear.wanted = True
        model(x)
        assert (hooks_on(model), ear.heard) == (9 * OURS, 9)


# Calls from outside -----------------------------------------------------------------------------


def test_a_part_that_is_called_from_outside_keeps_its_hooks_and_its_calls_are_steps():
    model, x = deep()
    sink = Scheduled(lambda step: step == 8)
    with eager.watch(model, everything(model), sink):
        for _ in range(3):
            model[1](x)
            model(x)
        assert hooks_on(model) == 2 * OURS
        assert sink.begun == 6
        model(x)
        model(x)
        model[1](x)
    assert [str(p) for m, p, _ in sink.records] == [
        "1:input[0]", "1.0:input[0]", "1.0:output", "1.1:input[0]", "1.1:output", "1.2:input[0]", "1.2:output",
        "1:output",
    ]  # fmt: skip
    assert {m for m, _, _ in sink.records} == {Moment(step=8, batch=8)}


def test_a_part_that_was_never_called_is_seen_when_it_is():
    model = zoo.Holder(lambda m, x: m.used(x), used=nn.Identity(), spare=nn.Sequential(nn.Identity()))
    sink = Scheduled(lambda step: step == 3)
    with eager.watch(model, {name: {"output"} for name in ("", "used", "spare", "spare.0")}, sink):
        run(model, torch.ones(1), 3)
        assert hooks_on(model) == 3 * OURS
        model.spare(torch.ones(1))
    assert [f"{p} {m}" for m, p, _ in sink.records] == ["spare.0:output step=3", "spare:output step=3"]


def test_a_part_that_was_only_called_inside_is_no_step_on_its_own_while_nothing_is_due_and_that_is_said(caplog):
    model, x = deep()
    sink = Scheduled(lambda step: step in (3, 4))
    with eager.watch(model, everything(model), sink), caplog.at_level(logging.WARNING, "layerscope"):
        run(model, x, 3)
        model[0](x)
        assert sink.begun == 3
        model(x)
        assert caplog.records == []
        model[0](x)
        assert sink.begun == 5
        model[0](x)
    assert [record.getMessage() for record in caplog.records] == [
        "0 is called on its own; while no tap was due, such calls were not seen as steps"
    ]
    assert {m.step for m, p, _ in sink.records if p.name == "0"} == {3, 4}
    assert {m.step for m, p, _ in sink.records if p.name == ""} == {3}


# Threads ----------------------------------------------------------------------------------------


def waiting():
    """A model whose forward waits in its middle, in those threads that are told to."""
    gates: dict[int, tuple[threading.Event, threading.Event]] = {}

    def forward(m, x):
        x = m.first(x)
        if threading.get_ident() in gates:
            here, go_on = gates.pop(threading.get_ident())
            here.set()
            assert go_on.wait(10)
        return m.last(x)

    return zoo.Holder(forward, first=nn.Identity(), last=nn.Identity()), gates


def test_an_idle_forward_of_another_thread_stays_idle_when_hooks_appear_in_its_middle():
    model, gates = waiting()
    sink = Scheduled(lambda step: step == 4)
    here, go_on = threading.Event(), threading.Event()

    def idle():
        gates[threading.get_ident()] = here, go_on
        model(torch.zeros(1))

    with eager.watch(model, everything(model), sink):
        run(model, torch.zeros(1), 3)
        thread = threading.Thread(target=idle)
        thread.start()
        assert here.wait(10)
        model(torch.ones(1))
        assert hooks_on(model) == 3 * OURS
        go_on.set()
        thread.join()
    assert len(sink.records) == 6
    assert all(tensor.item() == 1 for _, _, tensor in sink.records)
    assert sink.forwards == [False] * 5


def test_a_due_forward_keeps_its_hooks_while_other_threads_are_idle():
    model, gates = waiting()
    sink = Scheduled(lambda step: step == 0)
    here, go_on = threading.Event(), threading.Event()

    def due():
        gates[threading.get_ident()] = here, go_on
        model(torch.ones(1))

    with eager.watch(model, everything(model), sink):
        thread = threading.Thread(target=due)
        thread.start()
        assert here.wait(10)
        run(model, torch.zeros(1), 10)
        assert hooks_on(model) == 3 * OURS
        go_on.set()
        thread.join()
        assert len(sink.records) == 6
        run(model, torch.zeros(1), 1)
        assert hooks_on(model) == OURS


def test_threads_that_are_due_and_idle_at_random_record_every_due_step_whole():
    model, _ = deep()
    sink = Scheduled(lambda step: step % 7 == 3)
    start = threading.Barrier(4)

    def loop():
        start.wait()
        for _ in range(60):
            model(torch.ones(1, 3))

    with eager.watch(model, everything(model), sink):
        threads = [threading.Thread(target=loop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sink.failures == []
    per_step: dict[int, int] = {}
    for moment, _, _ in sink.records:
        per_step[moment.step] = per_step.get(moment.step, 0) + 1
    assert per_step == dict.fromkeys(range(3, 240, 7), 18)
    assert_no_hooks_left(model)


def test_a_thread_that_dies_in_a_due_forward_does_not_keep_the_hooks_on():
    def forward(m, x):
        if x.item() == 0:
            raise SystemExit
        return m.layer(x)

    model = zoo.Holder(forward, layer=nn.Identity())
    with eager.watch(model, everything(model), Scheduled(lambda step: step == 0)):

        def dies():
            with suppress(SystemExit):
                model(torch.zeros(1))

        thread = threading.Thread(target=dies)
        thread.start()
        thread.join()
        run(model, torch.ones(1), 3)
        assert hooks_on(model) == OURS


# Checkpointing ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("idle", [0, 1, 5])
def test_gradients_of_a_due_step_arrive_however_many_idle_forwards_lie_before_its_backward(reentrant, idle):
    torch.manual_seed(0)
    plain, model = Checkpointed(reentrant=None), Checkpointed(reentrant=reentrant)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, requires_grad=True)
    wanted = {"layer.0": {"output", "grad_output", "grad_input"}}
    expected, sink = Seen(), Scheduled(lambda step: step == 4)
    with eager.watch(plain, wanted, expected):
        plain(x).square().sum().backward()
    with eager.watch(model, wanted, sink):
        for _ in range(4):
            model(x).sum().backward()
        assert hooks_on(model) == OURS
        loss = model(x).square().sum()
        for _ in range(idle):
            model(x)
        loss.backward()
    found = {p: t for _, p, t in sink.records}
    assert {m for m, _, _ in sink.records} == {Moment(step=4, batch=4)}
    assert sorted(map(str, found)) == sorted(str(p) for _, p, _ in expected.records)
    for _, point, tensor in expected.records:
        torch.testing.assert_close(found[point], tensor)


@pytest.mark.parametrize("reentrant", [True, False])
def test_repeated_calls_count_where_something_was_due(reentrant):
    model, x = Checkpointed(reentrant=reentrant), torch.randn(2, 3, requires_grad=True)
    sink = Scheduled(lambda step: step in (1, 6))
    with eager.watch(model, {"layer": {"output"}, "layer.0": {"output"}}, sink):
        for step in range(10):
            model(x).sum().backward()
            # Without reentrance the repeated forward is broken off as soon as everything is there again.
            assert len(sink.repeats) == (2 if reentrant else 1) * sum(due <= step for due in (1, 6))
    assert len(sink.records) == 4


def test_a_frozen_part_does_not_keep_the_hooks_on_for_ever():
    def forward(m, x):
        with torch.no_grad():
            x = m.frozen(x)
        return m.layer(x)

    model = zoo.Holder(forward, frozen=nn.Linear(3, 3), layer=nn.Linear(3, 3))
    wanted = {name: {"grad_output"} for name in ("frozen", "layer")}
    with eager.watch(model, wanted, Scheduled(lambda step: step == 0)):
        for _ in range(70):
            model(torch.ones(1, 3)).sum().backward()
        assert hooks_on(model) == OURS


# Other people's hooks ---------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [0, 5])
def test_a_users_hook_comes_before_or_after_ours_as_it_was_registered(idle):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_forward_hook(lambda module, args, out: out + 10)
    sink = Scheduled(lambda step: step == idle)
    with eager.watch(model, {"0": {"output"}, "1": {"input", "output"}}, sink):
        run(model, torch.zeros(1), idle)
        model[0].register_forward_hook(lambda module, args, out: out + 100)
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1000,))
        model[1].register_forward_hook(lambda module, args, out: out + 10000)
        assert model(torch.zeros(1)).item() == 11110
    assert [(str(p), t.item()) for _, p, t in sink.records] == [
        ("0:output", 10), ("1:input[0]", 110), ("1:output", 1110),
    ]  # fmt: skip
    assert hooks_on(model) == 4


def test_a_users_handle_removes_the_users_hook_and_no_other():
    model = nn.Sequential(nn.Identity())
    sink = Scheduled(lambda step: step in (5, 6))
    with eager.watch(model, {"0": {"output"}}, sink):
        run(model, torch.zeros(1), 5)
        handle = model[0].register_forward_hook(lambda module, args, out: out + 1)
        assert model(torch.zeros(1)).item() == 1
        handle.remove()
        assert model(torch.zeros(1)).item() == 0
    assert len(sink.records) == 2
    assert_no_hooks_left(model)


def test_two_recordings_of_one_model_do_not_hold_each_other_up():
    model, x = deep()
    seldom, once = Scheduled(lambda step: step == 5), Scheduled(lambda step: step == 3)
    with eager.watch(model, everything(model), seldom), eager.watch(model, everything(model), once):
        run(model, x, 3)
        assert hooks_on(model) == 2 * OURS
        run(model, x, 3)
    assert [len(sink.records) for sink in (seldom, once)] == [18, 18]
    assert_no_hooks_left(model)


# What becomes of the model ----------------------------------------------------------------------


@pytest.mark.parametrize("idle", [0, 5])
def test_copies_and_pickles_are_silent_whether_hooks_are_there_or_not(idle):
    model, x = deep()
    sink = Scheduled(lambda step: step > 100)
    file = io.BytesIO()
    with eager.watch(model, everything(model), sink):
        run(model, x, idle)
        twin = copy.deepcopy(model)
        torch.save(model, file)
        sink.due = lambda step: True
        out = twin(x)
    assert b"layerscope" not in file.getvalue()
    file.seek(0)
    for each in (out, twin(x), torch.load(file, weights_only=False)(x)):
        assert_same_bits(each, model(x))
    assert sink.records == []


@pytest.mark.parametrize("idle", [0, 5])
def test_the_model_is_let_go_at_the_end_of_the_block(idle):
    model, x = deep()
    gone = weakref.ref(model)
    gc.disable()
    try:
        with torch.no_grad(), eager.watch(model, everything(model), Scheduled(lambda step: step == 7)):
            run(model, x, idle)
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_due_forward_that_ends_in_an_exception_leaves_the_next_ones_right(error):
    def forward(m, x):
        if x.item() == 0:
            raise error
        return m.layer(x)

    model = zoo.Holder(forward, layer=nn.Identity())
    sink = Scheduled(lambda step: step in (3, 4, 9))
    with eager.watch(model, everything(model), sink):
        run(model, torch.ones(1), 3)
        with pytest.raises(error):
            model(torch.zeros(1))
        run(model, torch.ones(1), 4)
        assert hooks_on(model) == OURS
        run(model, torch.ones(1), 2)
    assert [m.step for m, p, _ in sink.records if p.name == "layer"] == [4, 4, 9, 9]
    assert_no_hooks_left(model)


def test_a_part_traced_in_the_middle_of_a_forward_is_no_call():
    def forward(m, x):
        return torch.jit.trace(m.part, (x,), check_trace=False)(m.part(x))

    model = zoo.Holder(forward, part=nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    sink = Seen()
    with eager.watch(model, everything(model), sink):
        model(torch.ones(1, 3))
    assert [m.call for m, p, _ in sink.records if p.name.startswith("part")] == [0] * 6


def test_a_compiled_part_is_not_compiled_again_when_hooks_come_and_go():
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model, x = deep()
    model[0].compile(backend=counter, fullgraph=True)
    sink = Scheduled(lambda step: step % 5 == 4)
    with eager.watch(model, everything(model), sink), torch.no_grad():
        run(model, x, 20)
    assert counter.frame_count == 1
    assert {p.name for _, p, _ in sink.records} == {"", "1", "1.0", "1.1", "1.2"}
    torch._dynamo.reset()


def test_hooks_stay_where_something_is_due_again_by_the_time_they_would_come_off():
    layer, watcher = nn.Linear(2, 2), Watcher(Seen())
    watcher.hook(layer, "layer", frozenset({"output"}))
    watcher._inside.add("layer")
    watcher._idle = 1  # it was 2 when the lock was waited for, and a step that is due has begun since
    watcher._rest()
    assert layer._forward_hooks
    watcher._idle = 2
    watcher._rest()
    assert not layer._forward_hooks
