"""What a lane does with its memory, its flights and its thread; the device is played.

Copies themselves need a device (tests/runtimes/test_cuda.py).
"""

from __future__ import annotations

import ctypes
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

from asserts import assert_same_bits
from layerscope import native
from layerscope.recorder import berths, cargo, ferrying, lanes, pinned
from layerscope.recorder.berths import Berths
from layerscope.recorder.cargo import Arrival, Carried
from layerscope.recorder.ferrying import CARRIERS
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
        self.launched, self.crossed = [], []
        self.gates = SimpleNamespace(room_for=_room_for, ferried=_ferried, fly_on=self.fly_on)
        self.lane, self.berths = None, Berths(torch.device("cpu"))
        kind = type("Event", (Event,), {})  # with a count of its own
        self.events = kind
        monkeypatch.setattr(pinned, "_CHUNK", CHUNK)
        monkeypatch.setattr(ferrying, "ferrying", lambda device: lambda raw: lambda *numbers: self.launched.append(raw))
        monkeypatch.setattr(ferrying, "carrying", lambda device: lambda raw: raw)
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
        monkeypatch.setattr(berths, "crossing", lambda: (1, 2))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
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
        self.lane.ferry(held, 1, self.gates, self.berths)
        return [one.got for one in held]

    def fly_on(self, launch, address, programs, everywhere, carry, to, size, told):
        self.crossed.append((size, carry, told))


def unwanted(size):
    raise AssertionError("what flies needs no room of the caller's")


def _ferried(held, width, address, target, flight):
    for one in held:
        one.got = flight
    return max(one.items for one in held)


def _room_for(held, width):
    return 24 * len(held), sum(one.items for one in held), max(one.items for one in held)


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
    lane.flight, lane._flying, lane._side = flight, deque(), None
    with pytest.raises(RuntimeError, match="no event could be made"):
        lane._depart()
    assert [str(error) for error in flight.asked] == ["no event could be made"]
    assert (lane.flight, list(lane._flying)) == (None, [])


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


@pytest.mark.parametrize("occasion", ["when the next flight begins", "when it departs", "when others are ferried"])
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
    lane._side.done = lane._side.queued
    if occasion == "when it departs":
        lanes.rest()
    elif occasion == "when others are ferried":
        device.ferry(10)
    else:
        device.fly(10)
    assert (lane._held, arrival.has_arrived, len(lane.spare)) == (0, True, 2)


# Berths ------------------------------------------------------------------------------------------


@pytest.fixture
def berthed(ready, monkeypatch):
    """A device whose kernel takes up to 10 bytes to the host, and whose berths take 200."""
    monkeypatch.setattr(berths, "_PAGE", 100)
    ready.lane._tiny, ready.berths.share = 10, 200
    return ready


def test_what_is_not_tiny_is_put_together_and_carried_beside(berthed):
    flights = berthed.ferry(5, 40, 150, 7, 30)
    assert [flights.index(one) for one in flights] == [0, 1, 2, 0, 1]
    one, other = berthed.berths._berths
    side, (filled, left) = berthed.lane._side, other.events
    assert (berthed.launched, berthed.crossed) == (
        [0],
        [(70, side.cuda_stream, one.told), (150, side.cuda_stream, other.told)],
    )
    assert other.told == (1, 2, 0, side.cuda_stream, filled.cuda_event, left.cuda_event, other.address, CARRIERS)


def test_one_large_tensor_among_many_takes_no_room_from_the_others(berthed):
    berthed.ferry(*[20] * 12, 180)
    assert [size for size, _, _ in berthed.crossed] == [60, 60, 60, 60, 180]  # 20 bytes take 64


def test_a_berth_is_used_again_on_its_stream_and_for_what_fits(berthed):
    berthed.ferry(40, 50)
    [first] = berthed.berths._berths
    berthed.ferry(45, 45)
    assert berthed.berths._berths == [first]
    berthed.current = 1
    berthed.ferry(40, 50)
    [second] = berthed.berths._berths
    assert (second.raw, second.memory.numel()) == (1, 100)
    berthed.ferry(390)
    [third] = berthed.berths._berths
    assert third.memory.numel() == 400


def test_a_new_berth_waits_for_nothing_that_others_carry(berthed):
    berthed.ferry(190, 190)
    for berth in berthed.berths._berths:
        assert all(event.stream is berthed.streams[0] for event in berth.events)


def test_what_goes_through_a_berth_has_arrived_when_the_side_stream_has_come_so_far(berthed):
    small, large = berthed.ferry(5, 50)
    berthed.land()
    assert (small.has_arrived, large.has_arrived) == (True, False)
    side = berthed.lane._side
    side.done = side.queued
    assert large.has_arrived


def test_the_models_stream_does_not_speak_for_what_goes_through_a_berth(berthed):
    [large] = berthed.ferry(50)
    for _ in range(3 * lanes._FEW):
        berthed.ferry(5)
        berthed.land()
    assert not large.has_arrived
    assert large in berthed.lane._flying


@pytest.mark.parametrize("size", [5, 50])
def test_memory_that_may_be_written_to_is_held_though_nobody_is_told_of_it(size, berthed, monkeypatch):
    def refuse(*numbers):
        raise RuntimeError("the driver refused")

    monkeypatch.setitem(berthed.lane._ferries, 0, (refuse, 1))
    monkeypatch.setattr(berthed.gates, "fly_on", refuse)
    held = [SimpleNamespace(items=size, got=None)]
    with pytest.raises(RuntimeError, match="refused"):
        berthed.lane.ferry(held, 1, berthed.gates, berthed.berths)
    assert held[0].got is None
    [flight] = berthed.lane._flying
    berthed.land()
    assert not flight.has_landed()
    berthed.lane._side.done = berthed.lane._side.queued
    assert flight.has_landed()


def test_no_stream_speaks_for_a_flight_that_was_broken_off(berthed, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(berthed.gates, "fly_on", lambda *numbers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            berthed.ferry(50)
    [flight], side = berthed.lane._flying, berthed.lane._side
    for _ in range(3 * lanes._FEW):
        berthed.ferry(50)
        side.done = side.queued
    assert flight in berthed.lane._flying
    berthed.land()
    berthed.ferry(50)
    assert flight not in berthed.lane._flying


@pytest.mark.skipif(bool(native.why_not()), reason=f"no gates: {native.why_not()}")
def test_the_copies_are_where_their_tensors_were_told(berthed, monkeypatch):
    def launch(words, octets, address, programs, everywhere):
        for number in range(everywhere // programs):
            source, target, size = (ctypes.c_int64 * 3).from_address(address + 24 * number)
            ctypes.memmove(target, source, size)

    def fly_on(launch, address, programs, everywhere, carry, to, size, told):
        launch(0, 0, address, programs, everywhere)
        ctypes.memmove(to, told[-2], size)

    monkeypatch.setitem(berthed.lane._ferries, 0, (launch, 4096))
    gates = native.load()
    basket = gates.Basket(-1, lambda held: None, lambda left: None, 1 << 20, lambda place: 0, lambda: False)
    leave = gates.Pass(basket, "point", "tensor", None, {})
    tensors = [torch.randn(count) for count in (2, 9, 12, 1, 8, 25)]
    held = [basket.make(leave, tensor) for tensor in tensors]
    gates.sorted(held, -1)
    played = SimpleNamespace(room_for=gates.room_for, ferried=gates.ferried, fly_on=fly_on)
    berthed.lane.ferry(held, 4, played, berthed.berths)
    for one, tensor in zip(held, tensors, strict=True):
        copy = one.got.part(one.place, torch.float32, tensor.shape)
        assert copy.landing[2] % 64 == 0
        copy.cargo.finish()
        assert_same_bits(copy(), tensor)


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
