"""What waits for a batch is told when it is there, and copies hold on to memory until they have landed."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layerscope.recorder.gpu import batches
from layerscope.recorder.gpu.batches import PinnedBatch, ThreadBatch


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
    monkeypatch.setattr(batches, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Event", Event)


class Transfer:
    """Lets a batch go when it is told to leave."""

    def leave(self, batch):
        if not batch.step_over:
            batch.mark("side")


def copies_to(*chunks):
    batch = PinnedBatch(Transfer(), "origin")
    for chunk in chunks:
        batch.hold(chunk)
    return batch


def test_copies_hold_on_to_every_chunk_until_they_have_landed():
    chunks = [np.zeros(8, np.uint8) for _ in range(3)]
    alive = [weakref.ref(chunk) for chunk in chunks]
    batch = copies_to(*chunks)
    del chunks
    batch.mark("side")
    assert not batch.has_arrived
    assert all(chunk() is not None for chunk in alive)
    batch.wait()
    assert batch.has_arrived
    assert all(chunk() is None for chunk in alive)


def test_a_batch_leaves_when_it_is_waited_for_and_no_more_is_added(monkeypatch):
    batch, pauses = copies_to(np.zeros(8, np.uint8)), []

    def sleep(seconds):
        pauses.append(seconds)
        batch.count += len(pauses) < 3

    monkeypatch.setattr(batches, "time", SimpleNamespace(sleep=sleep))
    batch.wait()
    assert len(pauses) == 3
    assert batch.has_arrived
    batch.wait()
    assert len(pauses) == 3


def test_copies_that_never_land_say_why():
    batch = copies_to(np.zeros(8, np.uint8))
    batch.finish(RuntimeError("no event could be made"))
    with pytest.raises(RuntimeError, match="did not arrive from the device: no event could be made"):
        batch.wait()


class Call(ThreadBatch):
    """One that leaves by itself."""

    def leave(self):
        """Wait for the thread."""

    def unload(self):
        """Bring nothing."""


def test_those_who_wait_for_what_the_thread_brings_are_told():
    call, told = Call(None, None), []
    assert not call.has_arrived
    waiting = threading.Thread(target=lambda: (call.wait(), told.append("waited")))
    waiting.start()
    call.finish()
    waiting.join(10)
    call.wait()
    assert told == ["waited"]
    assert call.has_arrived


def test_what_the_thread_could_not_bring_says_why():
    call = Call(None, None)
    call.finish(ValueError("no such address"))
    with pytest.raises(RuntimeError, match="did not arrive from the device: no such address"):
        call.wait()
