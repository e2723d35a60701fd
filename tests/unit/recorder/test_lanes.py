"""What a lane does with its memory, its flights and its thread; the device is played.

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

from layerscope.recorder import cargo, lanes, pinned
from layerscope.recorder.cargo import Arrival, Carried
from layerscope.recorder.pinned import Pinned

CHUNK = 1 << 16
LARGE = lanes._SMALL + 4


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
    """Raises Empty where the lane's thread would wait."""

    def get(self):
        return super().get_nowait()


class Device:
    """A device whose lane's thread works when told to."""

    def __init__(self, monkeypatch, budget):
        self.streams = {number: Stream(number=number) for number in range(3)}
        self.current, self.is_capturing = 0, False
        self.fails = False
        self.lane = None
        kind = type("Event", (Event,), {})  # with a count of its own
        self.events = kind
        monkeypatch.setattr(pinned, "_CHUNK", CHUNK)
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
            "Pinned": lambda **told: Pinned(budget, allocate=self.allocate, **told),
        }.items():
            monkeypatch.setattr(lanes, name, value)
        for module in (cargo, lanes):
            monkeypatch.setattr(module, "Event", kind)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        with monkeypatch.context() as patched:
            patched.setattr(
                lanes.threading, "Thread", lambda **told: SimpleNamespace(start=lambda: None, join=lambda: None)
            )
            self.lane = lanes.Lane(torch.device("cuda", 0))
        monkeypatch.setattr(lanes, "_lanes", {0: self.lane})

    def allocate(self, size):
        if self.fails:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(size, dtype=torch.uint8)

    def work(self):
        """Have the lane's thread do all that it was given."""
        with suppress(Empty):
            self.lane._carry()

    def land(self, stream=0):
        """Have all copies of a stream land."""
        self.streams[stream].done = self.streams[stream].queued

    def fly(self, size=1000):
        """Bring a tensor of so many bytes; None where there is no room."""
        arrival = Arrival(torch.uint8, torch.Size([size]), unwanted)
        return arrival if self.lane._let_fly(arrival, 0, size) else None

    def send(self, *sizes):
        """Bring what was staged together; return what each was told."""
        staged = [Piece(size) for size in sizes]
        self.lane.send_all(torch.zeros(sum(sizes), dtype=torch.uint8), staged, self.current)
        return [one.arrival for one in staged]


class Piece:
    """A tensor of bytes in a staging buffer."""

    dtype, at, arrival = torch.uint8, 0, None

    def __init__(self, size):
        self.shape, self.values = torch.Size([size]), torch.zeros(size, dtype=torch.uint8)


def unwanted(size):
    raise AssertionError("what flies needs no room of the caller's")


@pytest.fixture
def device(monkeypatch):
    """One with memory for eight chunks."""
    return Device(monkeypatch, 8 * CHUNK)


@pytest.fixture
def ready(device):
    """One whose lane has been prepared."""
    device.lane.prepare()
    return device


# Several devices ---------------------------------------------------------------------------------


def test_each_device_has_streams_memory_and_a_thread_of_its_own(device, monkeypatch):
    started = []
    monkeypatch.setattr(lanes, "_lanes", {})
    kept = SimpleNamespace(start=lambda: None, join=lambda: None)
    monkeypatch.setattr(lanes.threading, "Thread", lambda **told: started.append(told["name"]) or kept)
    one, other = (lanes.lane_of(torch.device("cuda", place)) for place in (0, 1))
    assert lanes.lane_of(torch.device("cuda", 1)) is other
    assert started == ["layerscope-cuda:0", "layerscope-cuda:1"]
    assert len({id(stream) for lane in (one, other) for stream in (lane._stream, lane.side)}) == 4
    one.prepare()
    assert one.pinned.total == 2 * CHUNK
    assert other.pinned.total == 0
    assert other.pinned.room(100) is None  # what is free for one is not for the other


def test_a_tensor_leaves_with_its_own_device_current_whichever_was(ready, monkeypatch):
    entered = []
    monkeypatch.setattr(lanes, "is_current", lambda place: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    arrival = Arrival(torch.uint8, torch.Size([100]), unwanted)
    ready.lane.board(arrival, torch.zeros(100, dtype=torch.uint8))
    assert entered == [torch.device("cuda", 0)]
    assert arrival.cargo is not None


# The end of a step -------------------------------------------------------------------------------


@pytest.mark.parametrize("capturing", [False, True])
def test_lanes_hear_that_a_step_has_ended_unless_a_graph_is_captured(capturing, ready):
    ready.current = 1
    arrival = ready.fly()
    ready.is_capturing = capturing
    lanes.rest()
    assert arrival.cargo.over is not capturing
    assert (ready.lane.flight is None) is not capturing
    assert ready.events.asked == 0
    assert ready.streams[1].queued == (not capturing)


def test_the_end_of_a_step_on_another_device_that_captures_is_not_heard(ready, monkeypatch):
    monkeypatch.setattr(lanes, "is_alone", lambda: False)
    ready.fly()
    ready.is_capturing = True  # a stream of the device that is current, and not the lane's
    lanes.rest()
    assert ready.lane.flight is not None


class Told:
    """A flight that notes what it is asked."""

    origin, beside = None, False

    def __init__(self):
        self.asked = []

    def depart(self, *streams):
        raise RuntimeError("no event could be made")

    def finish(self, error=None):
        self.asked.append(error)


def test_a_flight_whose_end_cannot_be_marked_is_not_waited_for():
    lane, flight = lanes.Lane.__new__(lanes.Lane), Told()
    lane.flight, lane._flying, lane.side = flight, deque(), None
    with pytest.raises(RuntimeError, match="no event could be made"):
        lane._depart()
    assert [str(error) for error in flight.asked] == ["no event could be made"]
    assert (lane.flight, list(lane._flying)) == (None, [])


# Memory ------------------------------------------------------------------------------------------


def test_the_first_tensors_of_a_prepared_lane_fly(ready):
    assert ready.lane.pinned.total == 2 * CHUNK
    assert all(arrival.landing is not None for arrival in ready.send(1000, 2000))
    ready.lane.prepare()
    assert ready.lane.pinned.total == 2 * CHUNK


def test_a_lane_that_was_not_prepared_gets_memory_though_nothing_was_carried(device):
    [arrival] = device.send(1000)
    assert (arrival.landing, arrival.clone.nbytes) == (None, 1000)  # the thread brings it
    assert device.fly() is None
    device.work()
    assert device.send(1000)[0].landing is not None
    assert device.fly() is not None


def test_a_chunk_that_runs_out_has_a_successor_by_then_up_to_the_budget(ready):
    kept = []
    for _ in range(8 * 4):  # four to a chunk
        kept.append(ready.fly(CHUNK // 4))
        ready.work()
        assert ready.lane.pinned.total <= 8 * CHUNK
    assert all(arrival is not None for arrival in kept)
    assert ready.fly(CHUNK // 4) is None
    assert ready.lane._queue.empty()  # nothing is asked for that cannot be had


@pytest.mark.parametrize("behind", [0, 1, 5, 30])
def test_steps_whose_values_are_let_go_of_use_the_same_memory_again(ready, behind):
    flown, totals = [], []
    for step in range(300):
        flown.append(ready.fly(CHUNK // 10) is not None)
        lanes.rest()
        ready.streams[0].done = max(0, ready.streams[0].queued - behind)
        ready.work()
        gc.collect(0)
        if step >= 100:
            totals.append(ready.lane.pinned.total)
    assert all(flown)
    assert len(set(totals)) == 1
    assert totals[0] <= (3 + behind // 10) * CHUNK


def test_memory_is_not_used_again_before_the_copies_have_landed(monkeypatch):
    device = Device(monkeypatch, 2 * CHUNK)
    device.lane.prepare()
    for _ in range(2):
        assert device.fly(CHUNK) is not None  # and let go of at once
        lanes.rest()
    assert device.fly(CHUNK) is None
    device.land()
    assert device.fly(CHUNK) is not None


def test_a_small_copy_before_a_large_one_in_every_step_needs_no_more_memory(ready):
    for _ in range(300):
        assert ready.fly(64) is not None
        assert ready.fly(CHUNK // 5) is not None
        lanes.rest()
        ready.land()
        ready.work()
    assert ready.lane.pinned.total <= 3 * CHUNK


@pytest.mark.parametrize("prepared", [False, True])
def test_memory_that_cannot_be_had_is_said_once_and_leaves_the_lane_alive(device, prepared, caplog):
    device.fails = True
    with caplog.at_level(logging.WARNING, "layerscope"):
        if prepared:
            device.lane.prepare()
        for _ in range(3):
            assert device.fly() is None
            device.work()
    assert [r.getMessage() for r in caplog.records] == [
        "no more page-locked memory for copies from cuda:0, which are slower without: "
        "RuntimeError: CUDA error: out of memory"
    ]
    arrival = Arrival(torch.uint8, torch.Size([4]), lambda size: np.empty(size, np.uint8))
    device.lane.copy = lambda pairs, after: [np.copyto(octets, clone.numpy()) for clone, octets in pairs]
    device.lane.board(arrival, torch.arange(4, dtype=torch.uint8))
    arrival.leave()
    device.work()
    assert arrival().tolist() == [0, 1, 2, 3]


# Flights -----------------------------------------------------------------------------------------


def test_what_an_earlier_step_left_does_not_wait_for_a_later_one(ready):
    arrivals, ends = [], []
    for _ in range(5):
        arrivals.append(ready.fly(100))
        lanes.rest()
        ends.append(ready.streams[0].queued)
    ready.streams[0].done = ends[3]
    for arrival in arrivals[:4]:
        arrival()
    assert ready.streams[0].done == ends[3]
    arrivals[4]()
    assert ready.streams[0].done == ends[4]


def test_small_flights_are_seldom_asked_about_and_their_events_are_used_again(ready):
    made = ready.events.made
    for _ in range(800):
        ready.fly(10)
        lanes.rest()
        ready.land()
        ready.work()
    assert ready.events.asked <= 800 / 4
    assert ready.events.made - made <= lanes._FEW + 1
    assert len(ready.lane._flying) <= lanes._FEW


def test_what_has_arrived_stays_so_when_its_event_marks_another_flight(ready):
    arrivals = []
    for _ in range(lanes._FEW + 1):
        arrivals.append(ready.fly(10))
        lanes.rest()
        ready.land()
    assert ready.lane.spare
    for _ in range(lanes._FEW):
        arrivals.append(ready.fly(10))
        lanes.rest()  # and does not land
    done = ready.streams[0].done
    assert [arrival.has_arrived for arrival in arrivals] == [True] * (lanes._FEW + 1) + [False] * lanes._FEW
    assert arrivals[0]().shape == (10,)
    assert ready.streams[0].done == done  # nobody has waited
    arrivals[-1]()
    assert ready.streams[0].done == ready.streams[0].queued
    assert all(arrival.has_arrived for arrival in arrivals)


def test_one_stream_does_not_speak_for_another(ready):
    ready.current = 1
    first = ready.fly(10)
    for _ in range(3 * lanes._FEW):
        ready.current = 2
        ready.fly(10)
        lanes.rest()
        ready.land(2)
    assert not first.has_arrived
    assert ready.lane._flying[0] is first.cargo
    ready.land(1)
    ready.fly(10)
    lanes.rest()
    assert first.has_arrived
    assert first.cargo not in ready.lane._flying


@pytest.mark.parametrize("occasion", ["when the next flight begins", "when it departs", "when others are sent"])
def test_clones_beside_are_let_go_of_at_the_next_occasion(occasion, monkeypatch):
    device = Device(monkeypatch, 4 * LARGE)
    lane = device.lane
    monkeypatch.setattr(pinned, "_CHUNK", 2 * LARGE)  # so that the next one needs no other chunk
    lane.prepare()
    arrival = Arrival(torch.uint8, torch.Size([LARGE]), unwanted)
    lane.board(arrival, torch.zeros(LARGE, dtype=torch.uint8))
    lanes.rest()
    device.land()
    assert (lane._held, arrival.has_arrived) == (LARGE, False)  # the side stream has not come so far
    if occasion == "when it departs":
        device.fly(10)
        assert lane._held == LARGE
    lane.side.done = lane.side.queued
    if occasion == "when it departs":
        lanes.rest()
    elif occasion == "when others are sent":
        device.send(10)
    else:
        device.fly(10)
    assert (lane._held, arrival.has_arrived) == (0, True)
    assert occasion == "when others are sent" or len(lane.spare) == 2  # those take them at once


# The thread --------------------------------------------------------------------------------------


class Sack(Carried):
    """Something that the thread unloads by a call of its own; it takes up no room on the device."""

    def __init__(self, device, unload=lambda: None):
        super().__init__(device.lane, device.streams[1])
        self.unload = unload

    leave = unload = None


def test_a_cargo_is_ready_when_its_stream_has_come_as_far_as_it_is_now(device):
    sack = Sack(device)
    device.lane.send(sack)
    assert (sack.ready.stream, sack.ready.at) == (device.streams[1], 1)
    device.work()
    assert sack.is_finished


@pytest.fixture
def carrying(device, monkeypatch):
    """What the thread asks of the device for two tensors of six and five bytes, four at a time."""
    asked = []
    monkeypatch.setattr(lanes, "_STAGE", 4)
    monkeypatch.setattr(device.events, "wait", lambda event, stream: asked.append((event, stream)))

    def land(staged):
        asked.append([part[1].tolist() for part in staged])
        staged.clear()

    monkeypatch.setattr(device.lane, "_land", land)
    device.current = 1
    arrivals = [Arrival(torch.uint8, torch.Size([size]), lambda size: np.empty(size, np.uint8)) for size in (6, 5)]
    for arrival in arrivals:
        device.lane.board(arrival, torch.arange(arrival.shape[0], dtype=torch.uint8))
    trip = device.lane.trip
    arrivals[0].leave()
    return SimpleNamespace(asked=asked, arrivals=arrivals, trip=trip)


def test_clones_are_copied_behind_the_work_that_made_them(device, carrying):
    device.work()
    began = carrying.trip.ready, device.lane._stream
    assert carrying.asked == [began, [[0, 1, 2, 3]], [[4, 5], [0, 1]], [[2, 3, 4]]]
    assert carrying.trip.ready.stream is device.streams[1]


def test_nothing_is_copied_where_the_stream_cannot_wait_for_that_work(device, carrying, monkeypatch):
    def refuse(event, stream):
        raise RuntimeError("CUDA error 400")

    monkeypatch.setattr(device.events, "wait", refuse)
    device.work()
    for arrival in carrying.arrivals:
        with pytest.raises(RuntimeError, match="did not arrive from the device: CUDA error 400"):
            arrival()
    assert (carrying.asked, device.lane._held) == ([], 0)


def test_a_trip_that_cannot_be_sent_is_not_waited_for(device, monkeypatch):
    arrival = Arrival(torch.uint8, torch.Size([4]), lambda size: np.empty(size, np.uint8))
    device.lane.board(arrival, torch.arange(4, dtype=torch.uint8))

    def refuse(event, stream):
        raise RuntimeError("CUDA error 2")

    with monkeypatch.context() as patched:
        patched.setattr(device.events, "record", refuse)
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            arrival.leave()
    with pytest.raises(RuntimeError, match="did not arrive from the device: CUDA error 2"):
        arrival()
    assert device.lane._held == 0


def test_what_goes_wrong_in_the_thread_is_told_to_who_waits_and_the_next_is_unloaded(device):
    def fail():
        raise RuntimeError("CUDA error 400")

    sack = Sack(device, fail)
    device.lane.send(sack)
    device.work()
    with pytest.raises(RuntimeError, match="did not arrive from the device: CUDA error 400"):
        sack.wait()
    after = Sack(device)
    device.lane.send(after)
    device.work()
    after.wait()


def test_what_went_wrong_in_the_thread_is_known_and_holds_nothing(device):
    held = []

    def fail():
        sheet = np.zeros(4)
        held.append(weakref.ref(sheet))
        raise RuntimeError("CUDA error 400")

    sack = Sack(device, fail)
    device.lane.send(sack)
    device.work()
    assert str(sack._error) == "CUDA error 400"
    assert held[0]() is None


def test_a_cargo_without_clones_does_not_ask_for_the_lock_that_a_model_may_hold(device, monkeypatch):
    monkeypatch.setattr(device.lane, "_changed", None)
    sack = Sack(device)
    device.lane.send(sack)
    device.work()
    assert sack.is_finished
