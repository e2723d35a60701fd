"""What a transfer does with its memory, its batches and its thread; the device is played.

Copies themselves need a device (tests/runtimes/test_cuda.py).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layerscope.recorder.gpu import batches, pinned_pool
from layerscope.recorder.gpu import transfer as transfers
from layerscope.recorder.gpu.batches import Arrival, ThreadBatch
from layerscope.recorder.gpu.pinned_pool import PinnedPool

CHUNK = 1 << 16
LARGE = CHUNK + 4


class Stream:
    """Work is counted as it is queued; the test says how much of it is done."""

    def __init__(self, device=None, *, number=None):
        self.cuda_stream = id(self) if number is None else number
        self.queued = self.done = 0

    def wait_event(self, event):
        pass


class Event:
    """A mark in a stream, which may be set again; how many were made, and how often one was asked, is counted."""

    made = asked = 0

    def __init__(self):
        type(self).made += 1
        self.cuda_event = id(self)

    def record(self, stream):
        stream.queued += 1
        self.stream, self.at = stream, stream.queued

    def query(self):
        type(self).asked += 1
        return self.stream.done >= self.at

    def synchronize(self):
        self.stream.done = max(self.stream.done, self.at)

    def wait(self, stream):
        pass


class Queue(SimpleQueue):
    """Raises Empty where the transfer's thread would wait."""

    def get(self):
        return super().get_nowait()


class Device:
    """A device whose transfer's thread works when told to."""

    def __init__(self, monkeypatch, budget):
        self.streams = {number: Stream(number=number) for number in range(3)}
        self.current, self.is_capturing = 0, False
        self.fails = False
        self.transfer = None
        kind = type("Event", (Event,), {})  # with a count of its own
        self.events = kind
        monkeypatch.setattr(pinned_pool, "_CHUNK", CHUNK)
        for name, value in {
            "mem_get_info": lambda device: (8 << 30, 8 << 30),
            "Stream": Stream,
            "Event": kind,
            "current_stream": lambda device=None: self.streams[self.current],
            "set_device": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        for name, value in {
            "why_no_driver": lambda: "",
            "copying": lambda place: lambda *numbers: None,
            "allow_captures": lambda: None,
            "is_alone": lambda: True,
            "current_stream": lambda place: self.current,
            "is_capturing": lambda: self.is_capturing,
            "SimpleQueue": Queue,
            "PinnedPool": lambda **told: PinnedPool(budget, allocate=self.allocate, **told),
        }.items():
            monkeypatch.setattr(transfers, name, value)
        for module in (batches, transfers):
            monkeypatch.setattr(module, "Event", kind)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        with monkeypatch.context() as patched:
            patched.setattr(
                transfers.threading, "Thread", lambda **told: SimpleNamespace(start=lambda: None, join=lambda: None)
            )
            self.transfer = transfers.Transfer(torch.device("cuda", 0))
        monkeypatch.setattr(transfers, "_transfers", {0: self.transfer})

    def allocate(self, size):
        if self.fails:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(size, dtype=torch.uint8)

    def work(self):
        """Have the transfer's thread do all that it was given."""
        with suppress(Empty):
            self.transfer._run()

    def land(self):
        """Have all copies land."""
        self.transfer.side.done = self.transfer.side.queued

    def copy(self, size=1000):
        """Bring a tensor of so many bytes; None where no page-locked memory is free."""
        arrival = Arrival(torch.uint8, torch.Size([size]), transfers.ordinary)
        self.transfer.add(arrival, torch.zeros(size, dtype=torch.uint8))
        return arrival if arrival.landing is not None else None

    def send(self, *sizes):
        """Bring what was staged together; return what each was told."""
        staged = [Piece(size) for size in sizes]
        self.transfer.send_all(torch.zeros(sum(sizes), dtype=torch.uint8), staged, self.current)
        return [one.arrival for one in staged]


class Piece:
    """A tensor of bytes in a staging buffer."""

    dtype, at, arrival = torch.uint8, 0, None

    def __init__(self, size):
        self.shape, self.values = torch.Size([size]), torch.zeros(size, dtype=torch.uint8)


def unwanted(size):
    raise AssertionError("what page-locked memory is free for needs no room of the caller's")


@pytest.fixture
def device(monkeypatch):
    """One with memory for eight chunks."""
    return Device(monkeypatch, 8 * CHUNK)


@pytest.fixture
def ready(device):
    """One whose transfer has been prepared."""
    device.transfer.prepare()
    return device


# Several devices ---------------------------------------------------------------------------------


def test_each_device_has_streams_memory_and_a_thread_of_its_own(device, monkeypatch):
    started = []
    monkeypatch.setattr(transfers, "_transfers", {})
    kept = SimpleNamespace(start=lambda: None, join=lambda: None)
    monkeypatch.setattr(transfers.threading, "Thread", lambda **told: started.append(told["name"]) or kept)
    one, other = (transfers.transfer_of(torch.device("cuda", place)) for place in (0, 1))
    assert transfers.transfer_of(torch.device("cuda", 1)) is other
    assert started == ["layerscope-cuda:0", "layerscope-cuda:1"]
    assert len({id(stream) for transfer in (one, other) for stream in (transfer._stream, transfer.side)}) == 4
    one.prepare()
    assert one.pinned.total == 2 * CHUNK
    assert other.pinned.total == 0
    assert other.pinned.room(100) is None  # what is free for one is not for the other


def test_a_tensor_leaves_with_its_own_device_current_whichever_was(ready, monkeypatch):
    entered = []
    monkeypatch.setattr(transfers, "is_current", lambda place: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    arrival = Arrival(torch.uint8, torch.Size([100]), unwanted)
    ready.transfer.add(arrival, torch.zeros(100, dtype=torch.uint8))
    assert entered == [torch.device("cuda", 0)]
    assert arrival.batch is not None


# The end of a step -------------------------------------------------------------------------------


@pytest.mark.parametrize("capturing", [False, True])
def test_transfers_hear_that_a_step_has_ended_unless_a_graph_is_captured(capturing, ready):
    ready.current = 1
    arrival = ready.copy()
    ready.is_capturing = capturing
    transfers.end_step()
    assert arrival.batch.step_over is not capturing
    assert (ready.transfer.loading is None) is not capturing
    assert ready.events.asked == (not capturing)


def test_the_end_of_a_step_on_another_device_that_captures_is_not_heard(ready, monkeypatch):
    ready.copy()
    monkeypatch.setattr(transfers, "is_alone", lambda: False)
    ready.is_capturing = True  # a stream of the device that is current, and not the transfer's
    transfers.end_step()
    assert ready.transfer.loading is not None


class Told:
    """A loading that notes what it is asked."""

    origin, beside = None, False

    def __init__(self):
        self.asked = []

    def mark(self, stream):
        raise RuntimeError("no event could be made")

    def finish(self, error=None):
        self.asked.append(error)


def test_a_batch_whose_end_cannot_be_marked_is_not_waited_for():
    transfer, loading = transfers.Transfer.__new__(transfers.Transfer), Told()
    transfer.loading, transfer._under_way, transfer.side = loading, deque(), None
    with pytest.raises(RuntimeError, match="no event could be made"):
        transfer._send_pinned()
    assert [str(error) for error in loading.asked] == ["no event could be made"]
    assert (transfer.loading, list(transfer._under_way)) == (None, [])


# Memory ------------------------------------------------------------------------------------------


def test_the_first_tensors_of_a_prepared_transfer_go_to_page_locked_memory(ready):
    assert ready.transfer.pinned.total == 2 * CHUNK
    assert all(arrival.landing is not None for arrival in ready.send(1000, 2000))
    ready.transfer.prepare()
    assert ready.transfer.pinned.total == 2 * CHUNK


def test_a_transfer_that_was_not_prepared_gets_memory_though_nothing_was_carried(device):
    [arrival] = device.send(1000)
    assert (arrival.landing, arrival.clone.nbytes) == (None, 1000)  # the thread brings it
    assert device.copy() is None
    device.work()
    assert device.send(1000)[0].landing is not None
    assert device.copy() is not None


def test_a_chunk_that_runs_out_has_a_successor_by_then_up_to_the_budget(ready):
    kept = []
    for _ in range(8 * 4):  # four to a chunk
        kept.append(ready.copy(CHUNK // 4))
        ready.work()
        assert ready.transfer.pinned.total <= 8 * CHUNK
    assert all(arrival is not None for arrival in kept)
    assert ready.copy(CHUNK // 4) is None
    assert ready.transfer._queue.empty()  # nothing is asked for that cannot be had


@pytest.mark.parametrize("behind", [0, 1, 5, 30])
def test_steps_whose_values_are_let_go_of_use_the_same_memory_again(ready, behind):
    flown, totals = [], []
    for step in range(300):
        flown.append(ready.copy(CHUNK // 10) is not None)
        transfers.end_step()
        ready.transfer.side.done = max(0, ready.transfer.side.queued - behind)
        ready.work()
        gc.collect(0)
        if step >= 100:
            totals.append(ready.transfer.pinned.total)
    assert all(flown)
    assert len(set(totals)) == 1
    assert totals[0] <= (3 + behind // 10) * CHUNK


def test_memory_is_not_used_again_before_the_copies_have_landed(monkeypatch):
    device = Device(monkeypatch, 2 * CHUNK)
    device.transfer.prepare()
    for _ in range(2):
        assert device.copy(CHUNK) is not None  # and let go of at once
        transfers.end_step()
    assert device.copy(CHUNK) is None
    device.land()
    assert device.copy(CHUNK) is not None


def test_a_small_copy_before_a_large_one_in_every_step_needs_no_more_memory(ready):
    for _ in range(300):
        assert ready.copy(64) is not None
        assert ready.copy(CHUNK // 5) is not None
        transfers.end_step()
        ready.land()
        ready.work()
    assert ready.transfer.pinned.total <= 3 * CHUNK


@pytest.mark.parametrize("prepared", [False, True])
def test_memory_that_cannot_be_had_is_said_once_and_leaves_the_transfer_alive(device, prepared, caplog):
    device.fails = True
    with caplog.at_level(logging.WARNING, "layerscope"):
        if prepared:
            device.transfer.prepare()
        for _ in range(3):
            assert device.copy() is None
            device.work()
    assert [r.getMessage() for r in caplog.records] == [
        "no more page-locked memory for copies from cuda:0, which are slower without: "
        "RuntimeError: CUDA error: out of memory"
    ]
    arrival = Arrival(torch.uint8, torch.Size([4]), lambda size: np.empty(size, np.uint8))
    device.transfer.copy = lambda pairs, after: [np.copyto(octets, clone.numpy()) for clone, octets in pairs]
    device.transfer.add(arrival, torch.arange(4, dtype=torch.uint8))
    arrival.leave()
    device.work()
    assert arrival().tolist() == [0, 1, 2, 3]


# Batches -----------------------------------------------------------------------------------------


def test_what_an_earlier_step_left_does_not_wait_for_a_later_one(ready):
    arrivals, ends, side = [], [], ready.transfer.side
    for _ in range(5):
        arrivals.append(ready.copy(100))
        transfers.end_step()
        ends.append(side.queued)
    side.done = ends[3]
    for arrival in arrivals[:4]:
        arrival()
    assert side.done == ends[3]
    arrivals[4]()
    assert side.done == ends[4]


def test_batches_that_have_landed_are_forgotten_and_stay_so(ready):
    arrivals = []
    for _ in range(100):
        arrivals.append(ready.copy(10))
        transfers.end_step()
        ready.land()
    late = ready.copy(10)
    transfers.end_step()  # and does not land
    done = ready.transfer.side.done
    assert len(ready.transfer._under_way) == 1
    assert [arrival.has_arrived for arrival in [*arrivals, late]] == [True] * 100 + [False]
    assert arrivals[0]().shape == (10,)
    assert ready.transfer.side.done == done  # nobody has waited
    late()
    assert ready.transfer.side.done == ready.transfer.side.queued


def test_a_batch_of_another_stream_begins_behind_that_stream(ready):
    ready.current = 1
    first = ready.copy(10)
    ready.current = 2
    second = ready.copy(10)
    assert first.batch is not second.batch
    assert (first.batch.step_over, first.batch.origin, second.batch.origin) == (True, *map(ready.streams.get, (1, 2)))
    assert [ready.streams[number].queued for number in (1, 2)] == [1, 1]  # a mark for the side stream to wait for


@pytest.mark.parametrize("occasion", ["when the next one is copied", "when the step ends", "when others are sent"])
def test_clones_are_let_go_of_at_the_next_occasion(occasion, monkeypatch):
    device = Device(monkeypatch, 4 * LARGE)
    transfer = device.transfer
    monkeypatch.setattr(pinned_pool, "_CHUNK", 2 * LARGE)  # so that the next one needs no other chunk
    transfer.prepare()
    arrival = Arrival(torch.uint8, torch.Size([LARGE]), unwanted)
    transfer.add(arrival, torch.zeros(LARGE, dtype=torch.uint8))
    transfers.end_step()
    device.streams[0].done = device.streams[0].queued
    assert (transfer._held, arrival.has_arrived) == (LARGE, False)  # the side stream has not come so far
    if occasion == "when the step ends":
        device.copy(10)
        assert transfer._held == LARGE + 10
    device.land()
    if occasion == "when the step ends":
        transfers.end_step()
    elif occasion == "when others are sent":
        device.send(10)
    else:
        device.copy(10)
    assert transfer._held == (0 if occasion == "when others are sent" else 10)
    assert arrival.has_arrived


# The thread --------------------------------------------------------------------------------------


class Call(ThreadBatch):
    """Something that the thread unloads by a call of its own; it takes up no room on the device."""

    def __init__(self, device, unload=lambda: None):
        super().__init__(device.transfer, device.streams[1])
        self.unload = unload

    leave = unload = None


def test_a_batch_is_ready_when_its_stream_has_come_as_far_as_it_is_now(device):
    batch = Call(device)
    device.transfer.send(batch)
    assert (batch.ready.stream, batch.ready.at) == (device.streams[1], 1)
    device.work()
    assert batch.is_finished


@pytest.fixture
def carrying(device, monkeypatch):
    """What the thread asks of the device for two tensors of six and five bytes, four at a time."""
    asked = []
    monkeypatch.setattr(transfers, "_STAGE", 4)
    monkeypatch.setattr(device.events, "wait", lambda event, stream: asked.append((event, stream)))

    def land(staged):
        asked.append([part[1].tolist() for part in staged])
        staged.clear()

    monkeypatch.setattr(device.transfer, "_land", land)
    device.current = 1
    arrivals = [Arrival(torch.uint8, torch.Size([size]), lambda size: np.empty(size, np.uint8)) for size in (6, 5)]
    for arrival in arrivals:
        device.transfer.add(arrival, torch.arange(arrival.shape[0], dtype=torch.uint8))
    clones = device.transfer.clones
    arrivals[0].leave()
    return SimpleNamespace(asked=asked, arrivals=arrivals, clones=clones)


def test_clones_are_copied_behind_the_work_that_made_them(device, carrying):
    device.work()
    began = carrying.clones.ready, device.transfer._stream
    assert carrying.asked == [began, [[0, 1, 2, 3]], [[4, 5], [0, 1]], [[2, 3, 4]]]
    assert carrying.clones.ready.stream is device.streams[1]


def test_nothing_is_copied_where_the_stream_cannot_wait_for_that_work(device, carrying, monkeypatch):
    def refuse(event, stream):
        raise RuntimeError("CUDA error 400")

    monkeypatch.setattr(device.events, "wait", refuse)
    device.work()
    for arrival in carrying.arrivals:
        with pytest.raises(RuntimeError, match="did not arrive from the device: CUDA error 400"):
            arrival()
    assert (carrying.asked, device.transfer._held) == ([], 0)


def test_clones_that_cannot_be_sent_is_not_waited_for(device, monkeypatch):
    arrival = Arrival(torch.uint8, torch.Size([4]), lambda size: np.empty(size, np.uint8))
    device.transfer.add(arrival, torch.arange(4, dtype=torch.uint8))

    def refuse(event, stream):
        raise RuntimeError("CUDA error 2")

    with monkeypatch.context() as patched:
        patched.setattr(device.events, "record", refuse)
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            arrival.leave()
    with pytest.raises(RuntimeError, match="did not arrive from the device: CUDA error 2"):
        arrival()
    assert device.transfer._held == 0


def test_what_goes_wrong_in_the_thread_is_told_to_who_waits_and_the_next_is_unloaded(device):
    def fail():
        raise RuntimeError("CUDA error 400")

    batch = Call(device, fail)
    device.transfer.send(batch)
    device.work()
    with pytest.raises(RuntimeError, match="did not arrive from the device: CUDA error 400"):
        batch.wait()
    after = Call(device)
    device.transfer.send(after)
    device.work()
    after.wait()


def test_what_went_wrong_in_the_thread_is_known_and_holds_nothing(device):
    held = []

    def fail():
        buffer = np.zeros(4)
        held.append(weakref.ref(buffer))
        raise RuntimeError("CUDA error 400")

    batch = Call(device, fail)
    device.transfer.send(batch)
    device.work()
    assert str(batch._error) == "CUDA error 400"
    assert held[0]() is None


def test_a_batch_without_clones_does_not_ask_for_the_lock_that_a_model_may_hold(device, monkeypatch):
    monkeypatch.setattr(device.transfer, "_changed", None)
    batch = Call(device)
    device.transfer.send(batch)
    device.work()
    assert batch.is_finished
