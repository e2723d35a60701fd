"""What the recorder does with the kernels, one tensor at a time and many together; the device is played by the host.

On a GPU the same is tested with real streams, in tests/runtimes/test_cuda.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.laws import assert_like_the_cpu, values
from layerscope.points import Point
from layerscope.recorder import devices, gathering, lanes
from layerscope.recorder.gathering import Gathering
from layerscope.recorder.taps import Request, Wish

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here to test with")

PLACE = -1  # what torch calls the host


class Host:
    """A lane to nowhere: what is sent has arrived."""

    place = PLACE

    def __init__(self):
        self.rooms = True

    def room(self, size):
        chunk = np.zeros(size, np.uint8)
        return (chunk, 0, chunk.ctypes.data) if self.rooms else None

    def send(self, cargo):
        cargo.unload()
        cargo.finish()

    def bring(self, *tensors):
        return [tensor.clone().numpy() for tensor in tensors]


@pytest.fixture
def host(monkeypatch):
    host = Host()
    for module in (lanes, devices, gathering):
        monkeypatch.setattr(module, "current_stream", lambda place: 0)
    for module in (lanes, devices, gathering):
        monkeypatch.setattr(module, "is_capturing", lambda: False)
    monkeypatch.setattr(lanes, "_alone", lambda: True)
    monkeypatch.setattr(devices, "lane_of", lambda where: host)
    monkeypatch.setattr(devices, "_why_not", lambda: "")
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where=None: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda where: nullcontext())
    return host


def statistics_of(*first, level):
    """Statistics that have seen a tensor of each kind, and so know where to take the next."""
    statistics = devices.Statistics()
    for tensor in first:
        assert_like_the_cpu(statistics._anyhow(tensor, level)(), tensor, level=level)
    for desk in statistics._desks.values():
        desk.place = PLACE
        desk.key = (PLACE, *desk.key[1:])
    statistics._desks = {desk.key: desk for desk in statistics._desks.values()}
    return statistics


@pytest.mark.parametrize("level", ["moments", "full"])
def test_tensors_are_started_one_by_one_and_together_and_give_the_same_numbers(host, level):
    tensors = [values(dtype, size) for dtype in (torch.bfloat16, torch.int32) for size in (9, 3000)]
    statistics = statistics_of(tensors[0], tensors[2], level=level)
    alone = [statistics.start(tensor, level) for tensor in tensors]
    together = statistics.start_all(tensors, level)
    for one, other, tensor in zip(alone, together, tensors, strict=True):
        one.leave()
        assert one.has_arrived
        assert other.has_arrived
        assert one.same_as(other)
        assert_like_the_cpu(other(), tensor, level=level)
    assert not together[0].same_as(together[1])


def test_what_cannot_be_taken_together_is_left_for_another_way(host, monkeypatch):
    x = values(torch.float32, 3000)
    statistics = statistics_of(x, level="moments")
    odd = [x[::2], x[1:], x[:0], torch._neg_view(x), x.to(torch.complex64), torch.nn.Parameter(x)]
    assert [statistics.start(tensor, "moments") for tensor in odd] == [None] * len(odd)
    found = statistics.start_all([*odd, x], "moments")
    assert found[:-1] == [None] * len(odd)
    assert_like_the_cpu(found[-1](), x, level="moments")
    assert statistics.start_all([x], "full") == [None]  # nobody has asked for that yet
    host.rooms = False
    assert statistics.start_all([x], "moments") == [None]
    host.rooms = True
    monkeypatch.setattr(devices, "current_stream", lambda place: 7)
    assert statistics.start_all([x], "moments") == [None]


def test_what_was_taken_of_a_float64_tensor_does_not_change_how_others_are_taken(host):
    x, y = values(torch.float32, 300), values(torch.float64, 300)
    statistics = statistics_of(x, y, level="full")
    assert statistics.start(y, "full") is None
    alone, [together] = statistics.start(x, "full"), statistics.start_all([x], "full")
    assert_like_the_cpu(alone(), x)
    assert_like_the_cpu(together(), x)


def test_a_page_that_cannot_be_gathered_is_not_waited_for(host, monkeypatch):
    x = values(torch.float32, 8)
    statistics = statistics_of(x, level="moments")
    [desk] = statistics._desks.values()
    later = statistics.start(x, "moments")
    monkeypatch.setattr(desk.slots, "gather", lambda used: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        later.leave()
    with pytest.raises(RuntimeError, match="did not arrive from the device: division by zero"):
        later()
    assert statistics.start(x, "moments") is None  # whose slots nobody knows the contents of
    assert_like_the_cpu(statistics._anyhow(x, "moments")(), x, level="moments")


def test_more_tensors_than_there_are_slots_are_taken_in_several_goes(host, monkeypatch):
    tensors = [values(torch.float32, 8) + number for number in range(7)]
    statistics = statistics_of(tensors[0], level="moments")
    [desk] = statistics._desks.values()
    desk.slots.size = 3
    found = statistics.start_all(tensors, "moments")
    statistics.close()
    for later, tensor in zip(found, tensors, strict=True):
        assert_like_the_cpu(later(), tensor, level="moments")


def test_a_trial_is_lost_where_the_values_change_and_won_where_they_do_not(host):
    x, y = values(torch.bfloat16, 100), values(torch.bfloat16, 100)
    statistics = statistics_of(x, level="moments")
    gathered = Gathering(PLACE, lambda only, tensors: statistics.start_all(tensors, only), lambda point: None)
    wish = Wish(summary=True, level="moments")
    calm, restless = Request(Point("calm"), wish), Request(Point("restless"), wish)
    gathered.begin()
    for request, tensor in ((calm, x), (restless, y)):
        gathered.doubt(request, "moments", tensor, statistics.start(tensor, "moments"))
    y.data[7] += 1  # which torch does not count
    gathered.end()
    gathered.begin()
    assert (list(calm.standing.proofs), restless.standing.never) == ([100], True)
    held = gathered.hold(calm, "moments", x)
    gathered.end()
    assert_like_the_cpu(held(), x, level="moments")
