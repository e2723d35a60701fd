"""What waits for a cargo is told when it is there, and a flight holds on to memory until its copies have landed."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layerscope.recorder import cargo
from layerscope.recorder.cargo import Carried, Flight


class Event:
    """A mark that has been passed when the test says so."""

    def __init__(self):
        self.passed, self.recorded = False, []

    def record(self, stream):
        self.recorded.append(stream)

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


@pytest.fixture(autouse=True)
def played(monkeypatch):
    monkeypatch.setattr(cargo, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Event", Event)


class Lane:
    """Lets a flight go when it is told to leave."""

    def __init__(self):
        self.spare = []

    def leave(self, flight):
        if not flight.over:
            flight.depart("side")


def flight_to(*chunks):
    flight = Flight(Lane(), "origin", 0, chunks[0])
    for chunk in chunks[1:]:
        flight.hold(chunk)
    return flight


def test_a_flight_holds_on_to_every_chunk_until_it_has_landed():
    chunks = [np.zeros(8, np.uint8) for _ in range(3)]
    alive = [weakref.ref(chunk) for chunk in chunks]
    flight = flight_to(*chunks)
    del chunks
    flight.depart("side")
    assert not flight.has_arrived
    assert all(chunk() is not None for chunk in alive)
    flight.wait()
    assert flight.has_arrived
    assert all(chunk() is None for chunk in alive)


def test_a_flight_on_two_streams_has_arrived_when_both_have_come_so_far():
    flight = flight_to(np.zeros(8, np.uint8))
    flight.depart("origin", "side")
    here, there = flight._landed
    assert (here.recorded, there.recorded) == (["origin"], ["side"])
    here.passed = True
    assert not flight.has_arrived
    there.passed = True
    assert flight.has_arrived


def test_a_flight_that_is_over_does_not_look_at_the_events_it_gave_back():
    flight = flight_to(np.zeros(8, np.uint8))
    flight.depart("side")
    flight.wait()
    [event] = flight.give_back()
    event.passed = False  # it marks another flight now
    assert flight.has_landed()
    assert flight.has_arrived
    flight.wait()
    flight.arrive()
    assert not event.passed
    assert flight.give_back() == ()


def test_a_flight_departs_when_it_is_waited_for_and_no_more_comes_aboard(monkeypatch):
    flight, pauses = flight_to(np.zeros(8, np.uint8)), []

    def sleep(seconds):
        pauses.append(seconds)
        flight.aboard += len(pauses) < 3

    monkeypatch.setattr(cargo, "time", SimpleNamespace(sleep=sleep))
    flight.wait()
    assert len(pauses) == 3
    assert flight.has_arrived
    flight.wait()
    assert len(pauses) == 3


def test_a_flight_that_never_lands_says_why():
    flight = flight_to(np.zeros(8, np.uint8))
    flight.finish(RuntimeError("no event could be made"))
    with pytest.raises(RuntimeError, match="did not arrive from the device: no event could be made"):
        flight.wait()


class Sack(Carried):
    """One that leaves by itself."""

    def leave(self):
        """Wait for the thread."""

    def unload(self):
        """Bring nothing."""


def test_those_who_wait_for_what_is_carried_are_told_and_so_are_those_who_come_later():
    sack, told = Sack(None, None), []
    sack.then(lambda: told.append("first"))
    assert (told, sack.has_arrived) == ([], False)
    waiting = threading.Thread(target=lambda: (sack.wait(), told.append("waited")))
    waiting.start()
    sack.finish()
    waiting.join(10)
    sack.then(lambda: told.append("later"))
    assert sorted(told) == ["first", "later", "waited"]
    assert told[-1] == "later"
    assert sack.has_arrived


def test_what_could_not_be_carried_says_why():
    sack = Sack(None, None)
    sack.finish(ValueError("no such address"))
    with pytest.raises(RuntimeError, match="did not arrive from the device: no such address"):
        sack.wait()
