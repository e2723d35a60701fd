"""Forwards that a listener lets pass leave no gap in the count; what is taken is a run, and let go of."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import zoo
from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.errors import NothingRecorded
from layerscope.recorder import RecordOptions, Tap, record
from layerscope.recorder.host_memory import Arena
from layerscope.schedules import when
from layerscope.store import open_run

LARGE = 1 << 16  # floats: a copy that lies in a chunk with others


class Ear:
    """A listener that hears everything, but does not want every forward."""

    def __init__(self, wanted):
        self.wanted = iter(wanted)
        self.heard = []

    def wants(self):
        return next(self.wanted)

    def seen(self, point, moment, tensor, summary):
        told = summary() if callable(summary) else summary
        self.heard.append((str(point), moment.step, tensor.item(), told.mean))


def heard(wanted):
    return RecordOptions(listener=Ear(wanted))


def test_forwards_that_a_listener_does_not_want_are_neither_recorded_nor_counted():
    model = torch.nn.Sequential(torch.nn.Identity())
    with record(model, "0", keep="both", options=heard(value not in (0, 2, 3) for value in range(6))) as rec:
        for value in range(6):
            model(torch.tensor([float(value)]))
    assert [(m.step, rec.run.tensor("0", step=m.step).item()) for m in rec.run.moments] == [
        (0, 1.0),
        (1, 4.0),
        (2, 5.0),
    ]
    assert rec.completeness.forwards == 3


def test_a_gradient_of_a_forward_that_was_wanted_arrives_after_one_that_was_not():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    ear = Ear([True, False])
    ear.seen = lambda *heard: None
    with record(model, "0:grad_output", options=RecordOptions(listener=ear)) as rec:
        out = model(torch.ones(1, 2))
        model(torch.zeros(1, 2)).sum().backward()
        out.sum().backward()
    assert torch.equal(rec["0:grad_output"], torch.ones(1, 2))


def test_a_listener_is_told_each_record_as_it_is_made():
    model = torch.nn.Sequential(torch.nn.Identity())
    ear = Ear([True, False, True])
    with record(model, "0", keep="summary", options=RecordOptions(listener=ear)) as rec:
        for value in range(3):
            model(torch.tensor([float(value)]))
            assert len(ear.heard) == (1, 1, 2)[value]
    assert ear.heard == [("0:output", 0, 0.0, 0.0), ("0:output", 1, 2.0, 2.0)]
    assert rec.completeness.forwards == 2


def test_with_a_listener_memory_keeps_tensors_and_no_summaries_alone():
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with record(model, [Tap("0", keep="summary"), Tap("1", keep="both")], options=heard([True])) as rec:
        model(torch.ones(1))
    assert [str(point) for point in rec.run.points] == ["1:output"]


def test_a_listener_that_raises_is_listed_and_the_forward_goes_on():
    class Deaf(Ear):
        def seen(self, point, moment, tensor, summary):
            raise RuntimeError("what?")

    model = torch.nn.Sequential(torch.nn.Identity())
    with (
        pytest.raises(NothingRecorded, match=r"RuntimeError: what\?"),
        record(model, "0", options=RecordOptions(listener=Deaf([True]))),
    ):
        assert model(torch.ones(1)).item() == 1.0


# Taking -------------------------------------------------------------------------------------------


def listed(run):
    return [(str(each.point), each.moment.step, each.moment.call) for each in run.records()]


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).requires_grad_(False)


def test_each_step_is_taken_with_its_own_tensors_and_nothing_else():
    model, inputs = layers(), torch.randn(3, 2, 3)
    expected = [(hidden := model[0](x), model[1](hidden), model(x)) for x in inputs]
    with record(model, "**", keep="both", on_error="raise") as rec:
        for step, (first, second, last) in enumerate(expected):
            model(inputs[step])
            run = rec.take()
            assert listed(run) == [(f"{name}:output", step, 0) for name in ("0", "1", "2", ".")]
            for name, tensor in {"0": first, "1": second, "2": last, ".": last}.items():
                assert_same_bits(run.tensor(name), tensor)
            assert run.summary("2").mean == pytest.approx(last.double().mean().item())
            assert listed(rec.run) == []
    assert rec.completeness.forwards == 3


def test_records_are_counted_to_the_end_whoever_took_them():
    model = layers()
    with record(model, "**") as rec:
        for _ in range(3):
            model(torch.ones(1, 3))
            rec.take()
        model(torch.ones(1, 3))
        assert listed(rec.run) == [(f"{name}:output", 3, 0) for name in ("0", "1", "2", ".")]
    done = rec.completeness
    assert (done.records, done.forwards, done.state) == (16, 4, "complete")
    assert len(rec.run) == 4
    assert rec.run.complete


@pytest.mark.parametrize("leave", [1, 2])
def test_the_last_steps_can_be_left_for_the_next_time(leave):
    model = layers()
    taken = []
    with record(model, ["0", "2"]) as rec:
        for step in range(4):
            model(torch.full((1, 3), float(step)))
            taken.append([each[1] for each in listed(rec.take(leave=leave))])
        rest = rec.take()
    assert taken == {1: [[], [0, 0], [1, 1], [2, 2]], 2: [[], [], [0, 0], [1, 1]]}[leave]
    assert [each[1] for each in listed(rest)] == [step for step in range(4 - leave, 4) for _ in range(2)]
    assert_same_bits(rest.tensor("0", step=3), model[0](torch.full((1, 3), 3.0)))


def test_a_step_of_several_calls_that_the_caller_named_is_left_whole():
    model = layers()
    with record(model, "0") as rec:
        for step in (10, 11):
            rec.moment(epoch=2, step=step)
            for _ in range(3):
                model(torch.ones(1, 3))
        first, second = rec.take(leave=1), rec.take()
    assert listed(first) == [("0:output", 10, call) for call in range(3)]
    assert listed(second) == [("0:output", 11, call) for call in range(3)]
    assert {m.epoch for m in (*first.moments, *second.moments)} == {2}
    assert rec.completeness.records == 6


def test_more_steps_than_there_are_can_be_left():
    model = layers()
    with record(model, "0") as rec:
        assert listed(rec.take(leave=5)) == []
        model(torch.ones(1, 3))
        assert listed(rec.take(leave=5)) == []
        assert listed(rec.take()) == [("0:output", 0, 0)]


def test_what_was_taken_can_be_read_after_the_block_and_what_was_not_is_there_too():
    model = layers()
    with record(model, "0") as rec:
        model(torch.zeros(1, 3))
        run = rec.take()
        model(torch.ones(1, 3))
    assert_same_bits(run.tensor("0"), model[0](torch.zeros(1, 3)))
    assert_same_bits(rec["0"], model[0](torch.ones(1, 3)))
    assert listed(rec.take()) == [("0:output", 1, 0)]
    assert listed(rec.run) == []
    assert rec.completeness.records == 2


def test_a_recording_of_which_everything_was_taken_did_record():
    model = layers()
    with record(model, "0", on_error="raise") as rec:
        model(torch.ones(1, 3))
        rec.take()
    assert (rec.completeness.records, len(rec.run)) == (1, 0)


@pytest.mark.parametrize("size", [4, LARGE])
def test_what_was_taken_and_dropped_is_free(size):
    model, gone = nn.Sequential(nn.Identity(), nn.ReLU()), []
    with record(model, "*") as rec:
        for _ in range(3):
            model(torch.ones(size))
            run = rec.take()
            gone += [weakref.ref(each.tensor().untyped_storage()) for each in run.records()]
            assert None not in [storage() for storage in gone[-2:]]
            del run
            gc.collect()
        assert [storage() for storage in gone] == [None] * 6
    assert rec.completeness.records == 6


def test_memory_is_used_again_when_each_step_is_taken_and_dropped():
    model, places = nn.Sequential(nn.ReLU()), set()
    with record(model, "0") as rec:
        for _ in range(50):
            model(torch.ones(LARGE << 4))
            places.add(rec.take().tensor("0").data_ptr())
    assert len(places) < 25  # of 4 MiB each: all fifty would be 200


def test_gradients_are_taken_with_the_step_in_which_they_arrived():
    model = nn.Sequential(nn.Linear(3, 3))
    with record(model, ["0", "0:grad_output"]) as rec:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            assert {each[0] for each in listed(rec.take())} == {"0:output", "0:grad_output"}
    assert rec.completeness.records == 4


@pytest.mark.parametrize("on_disk", [True, False])
def test_there_is_nothing_to_take_on_disk_or_before_the_block(tmp_path, on_disk):
    model = layers()
    rec = record(model, "0", to=tmp_path / "run" if on_disk else None)
    sentence = "there is nothing to take: the recording is not in memory, or has not begun"
    with pytest.raises(RuntimeError, match=sentence):
        rec.take()
    with rec:
        model(torch.ones(1, 3))
        if on_disk:
            with pytest.raises(RuntimeError, match=sentence):
                rec.take()
        else:
            assert len(rec.take()) == 1
    assert rec.completeness.records == 1


def test_steps_can_be_taken_while_another_thread_records():
    model = nn.Sequential(*(nn.Identity() for _ in range(20)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with record(model, "**") as rec:
            thread = threading.Thread(target=lambda: [model(torch.ones(1)) for _ in range(200)])
            thread.start()
            taken = 0
            while thread.is_alive():
                taken += len(rec.take(leave=50))
            taken += len(rec.take())
    finally:
        sys.setswitchinterval(before)
    assert taken == rec.completeness.records == 200 * 21


def test_the_last_step_is_left_whole_when_an_earlier_ones_gradients_come_after_it():
    model = nn.Sequential(nn.Linear(2, 2))
    with record(model, ["0", "0:grad_output"]) as rec:
        first, second = model(torch.ones(1, 2)), model(torch.ones(1, 2))
        first.sum().backward()
        assert {each.moment.step for each in rec.take(leave=1).records()} == {0}
        second.sum().backward()
        assert {each.moment.step for each in rec.take().records()} == {1}


def test_steps_that_are_numbered_anew_in_every_epoch_are_left_in_the_order_they_came():
    model = nn.Identity()
    with record(model, ".") as rec:
        for epoch in range(2):
            for batch in range(2):
                rec.moment(epoch=epoch, step=batch, batch=batch)
                model(torch.full((1,), 2.0 * epoch + batch))
                taken = rec.take(leave=1)
                assert [each.tensor().item() for each in taken.records()] == [2.0 * epoch + batch - 1][: epoch or batch]


@pytest.mark.parametrize("leave", [-1, 1.5, True, "x", None])
def test_what_is_no_number_of_steps_is_refused_and_nothing_is_lost(leave):
    model = nn.Identity()
    with record(model, ".") as rec:
        model(torch.ones(1))
        with pytest.raises(ValueError, match="is not a number of steps; give how many of the last"):
            rec.take(leave=leave)
        assert len(rec.take()) == 1


def test_an_interrupt_while_a_copy_is_waited_for_loses_nothing():
    model = nn.Sequential(*(nn.Identity() for _ in range(4)))
    with record(model, "*") as rec:
        model(torch.ones(1))
        point, moment, copy, *rest = rec._sink.pending.records[2]
        asked = []

        def interrupted():
            asked.append(point)
            if len(asked) == 1:
                raise KeyboardInterrupt
            return copy()

        rec._sink.pending.records[2] = (point, moment, interrupted, *rest)
        with pytest.raises(KeyboardInterrupt):
            rec.take()
        assert len(rec._sink.pending.records) == 2
        model(torch.ones(1))
        assert [each.point.name for each in rec.take().records()] == [*"0123", *"0123"]
    assert rec.completeness.records == 8


def test_what_is_left_is_asked_to_leave_so_that_the_next_call_need_not_wait_for_later_steps():
    class Slow:
        left = 0

        def __call__(self):
            return torch.ones(1)

        def leave(self):
            self.left += 1

    model, slow = nn.Identity(), Slow()
    with record(model, ".") as rec:
        model(torch.ones(1))
        point, moment, _, *rest = rec._sink.pending.records[0]
        rec._sink.pending.records[0] = (point, moment, slow, *rest)
        assert len(rec.take(leave=1)) == 0
        assert slow.left == 1
        assert len(rec.take()) == 1
        assert slow.left == 1


def test_a_moment_is_named_while_a_schedule_is_asked_on_another_thread():
    asked, named = threading.Event(), threading.Event()

    def wanted(moment):
        asked.set()
        return named.wait(5)

    model = nn.Identity()
    with record(model, ".", when=when(wanted, name="wanted")) as rec:
        thread = threading.Thread(target=lambda: model(torch.ones(1)))
        thread.start()
        assert asked.wait(5)
        rec.moment(epoch=3)
        named.set()
        thread.join()
    assert len(rec.run.moments) == 1


def test_a_forward_that_a_schedule_broke_off_did_not_run():
    def wanted(moment):
        if moment.step == 1:
            raise KeyboardInterrupt
        return True

    model = nn.Identity()
    with record(model, ".", when=when(wanted, name="wanted")) as rec:
        model(torch.ones(1))
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1))
    assert rec.completeness.forwards == 1


def test_a_schedule_may_run_the_model():
    model = nn.Identity()

    def wanted(moment):
        if moment.step == 0:
            model(torch.ones(1))
        return True

    with record(model, ".", when=when(wanted, name="wanted")) as rec:
        model(torch.zeros(1))
    assert sorted(rec.run.tensor("", step=step).item() for step in (0, 1)) == [0, 1]


# Without memory, and without an end ---------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(12, "no memory")]
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_copy_that_finds_no_memory_is_counted_and_named_and_only_that_one(error, on_disk, tmp_path, monkeypatch):
    model, args = zoo.plain()
    copy, calls = Arena.copy, []

    def failing(self, tensor):
        calls.append(tensor)
        if len(calls) == 2:
            raise error
        return copy(self, tensor)

    monkeypatch.setattr(Arena, "copy", failing)
    with record(model, ["0", "2"], to=tmp_path / "run" if on_disk else None, keep="tensor") as rec:
        for _ in range(3):
            model(*args)
    assert [(d.point, d.count) for d in rec.completeness.dropped] == [("2:output", 1)]
    assert "memory" in rec.completeness.dropped[0].reason
    assert rec.missing == []
    assert [(str(e.point), e.moment.step) for e in rec.run.records()] == [
        ("0:output", 0), ("0:output", 1), ("2:output", 1), ("0:output", 2), ("2:output", 2)
    ]  # fmt: skip


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_recording_that_nobody_holds_any_more_takes_its_hooks_with_it(on_disk, tmp_path, caplog):
    model, args = zoo.plain()
    rec = record(model, ["**", "**:grad_output", "op:aten.relu"], to=tmp_path / "run" if on_disk else None).__enter__()
    model(*args).sum().backward()
    ended = weakref.ref(rec)
    del rec
    gc.collect()
    assert ended() is None
    assert_no_hooks_left(model)
    model(*args).sum().backward()
    assert "let go before its block ended" in caplog.text
    if on_disk:
        run = open_run(tmp_path / "run")
        assert run.state == "interrupted"
        assert len(list(run.records())) == 9
