"""What a lane does with its memory, its flights and its thread; the device is played.

Copies themselves need a device (tests/runtimes/test_cuda.py).
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layerscope.recorder import cargo, ferrying, lanes, pinned
from layerscope.recorder.cargo import Arrival
from layerscope.recorder.pinned import Pinned

CHUNK = 1 << 16
LARGE = lanes._SMALL + 4


class Stream:
    """Work is counted as it is queued; the test says how much of it is done."""

    def __init__(self, device=None, *, number=0):
        self.cuda_stream = number
        self.queued = self.done = 0

    def wait_event(self, event):
        pass


class Event:
    """A mark in a stream, which may be set again; how many were made, and how often one was asked, is counted."""

    made = asked = 0

    def __init__(self):
        type(self).made += 1

    def record(self, stream):
        stream.queued += 1
        self.stream, self.at = stream, stream.queued

    def query(self):
        type(self).asked += 1
        return self.stream.done >= self.at

    def synchronize(self):
        self.stream.done = max(self.stream.done, self.at)


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
        self.launched = []
        self.lane = None
        kind = type("Event", (Event,), {})  # with a count of its own
        self.events = kind
        monkeypatch.setattr(pinned, "_CHUNK", CHUNK)
        monkeypatch.setattr(ferrying, "ferrying", lambda device: lambda raw: lambda *numbers: self.launched.append(raw))
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
            "why_not": lambda: "",
            "copying": lambda place: lambda *numbers: None,
            "allow_captures": lambda: None,
            "is_alone": lambda: True,
            "current_stream": lambda place: self.current,
            "is_capturing": lambda: self.is_capturing,
            "SimpleQueue": Queue,
            "Pinned": lambda **told: Pinned(budget, allocate=self.allocate, **told),
        }.items():
            monkeypatch.setattr(lanes, name, value)
        monkeypatch.setattr(cargo, "Event", kind)
        with monkeypatch.context() as patched:
            patched.setattr(lanes.threading, "Thread", lambda **told: SimpleNamespace(start=lambda: None))
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
        return arrival if self.lane.let_fly(arrival, 0, size) else None

    def ferry(self, *sizes):
        """Bring tensors together; return what each was told."""
        held = [SimpleNamespace(items=size, got=None) for size in sizes]
        self.lane.ferry(held, 1, unwanted, GATES)
        return [one.got for one in held]


def unwanted(size):
    raise AssertionError("what flies needs no room of the caller's")


def _ferried(held, width, address, landed):
    for one in held:
        one.got = landed
    return max(one.items for one in held)


GATES = SimpleNamespace(
    room_for=lambda held, width: (sum(one.items for one in held), max(one.items for one in held)), ferried=_ferried
)


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
    kept = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(lanes.threading, "Thread", lambda **told: started.append(told["name"]) or kept)
    one, other = (lanes.lane_of(torch.device("cuda", place)) for place in (0, 1))
    assert lanes.lane_of(torch.device("cuda", 1)) is other
    assert started == ["layerscope-cuda:0", "layerscope-cuda:1"]
    assert len({id(stream) for lane in (one, other) for stream in (lane._stream, lane._side)}) == 4
    one.prepare()
    assert one.pinned.total == 2 * CHUNK
    assert other.pinned.total == 0
    assert other.room(100) is None  # what is free for one is not for the other


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
    assert (ready.lane._flight is None) is not capturing
    assert ready.events.asked == 0
    assert ready.streams[1].queued == (not capturing)


def test_the_end_of_a_step_on_another_device_that_captures_is_not_heard(ready, monkeypatch):
    monkeypatch.setattr(lanes, "is_alone", lambda: False)
    ready.fly()
    ready.is_capturing = True  # a stream of the device that is current, and not the lane's
    lanes.rest()
    assert ready.lane._flight is not None


class Told:
    """A flight that notes what it is asked."""

    def __init__(self):
        self.asked = []

    def depart(self, side):
        raise RuntimeError("no event could be made")

    def finish(self, error=None):
        self.asked.append(error)


def test_a_flight_whose_end_cannot_be_marked_is_not_waited_for():
    lane, flight = lanes.Lane.__new__(lanes.Lane), Told()
    lane._flight, lane._flying, lane._side = flight, deque(), None
    with pytest.raises(RuntimeError, match="no event could be made"):
        lane._depart()
    assert [str(error) for error in flight.asked] == ["no event could be made"]
    assert (lane._flight, list(lane._flying)) == (None, [])


# Memory ------------------------------------------------------------------------------------------


def test_the_first_tensors_of_a_prepared_lane_fly(ready):
    assert ready.lane.pinned.total == 2 * CHUNK
    assert all(got is not None for got in ready.ferry(1000, 2000))
    assert ready.launched == [0]
    ready.lane.prepare()
    assert ready.lane.pinned.total == 2 * CHUNK


def test_a_lane_that_was_not_prepared_gets_memory_though_nothing_was_carried(device):
    assert device.ferry(1000) == [None]
    assert device.fly() is None
    device.work()
    assert device.ferry(1000) != [None]
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
    device.lane.copy = lambda pairs: [np.copyto(octets, clone.numpy()) for clone, octets in pairs]
    device.lane.board(arrival, torch.arange(4, dtype=torch.uint8))
    arrival.leave()
    device.work()
    assert arrival().tolist() == [0, 1, 2, 3]


# Flights -----------------------------------------------------------------------------------------


def test_small_flights_are_seldom_asked_about_and_their_events_are_used_again(ready):
    made = ready.events.made
    for _ in range(800):
        ready.ferry(10, 20)
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


@pytest.mark.parametrize("occasion", ["when the next flight begins", "when it departs"])
def test_clones_beside_are_let_go_of_at_the_next_occasion(occasion, monkeypatch):
    device = Device(monkeypatch, 4 * LARGE)
    lane = device.lane
    monkeypatch.setattr(pinned, "_CHUNK", 2 * LARGE)  # so that the next one needs no other chunk
    lane.prepare()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    arrival = Arrival(torch.uint8, torch.Size([LARGE]), unwanted)
    lane.board(arrival, torch.zeros(LARGE, dtype=torch.uint8))
    lanes.rest()
    device.land()
    assert (lane._held, arrival.has_arrived) == (LARGE, False)  # the side stream has not come so far
    if occasion == "when it departs":
        device.fly(10)
        assert lane._held == LARGE
    lane._side.done = lane._side.queued
    if occasion == "when it departs":
        lanes.rest()
    else:
        device.fly(10)
    assert (lane._held, arrival.has_arrived, len(lane.spare)) == (0, True, 2)
