"""What the recorder does with the kernels, one tensor at a time and many together; the device is played by the host.

On a GPU the same is tested with real streams, in tests/runtimes/test_cuda.py.
"""

from __future__ import annotations

import gc
import signal
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.laws import assert_like_the_cpu, values
from layerscope.recorder import cargo, devices, lanes
from layerscope.recorder.taps import Wish
from layerscope.stats import summarize

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


@pytest.fixture
def host(monkeypatch):
    host = Host()
    for module in (lanes, devices):
        monkeypatch.setattr(module, "current_stream", lambda place: 0)
    for module in (lanes, devices):
        monkeypatch.setattr(module, "is_capturing", lambda: False)
    monkeypatch.setattr(lanes, "is_alone", lambda: True)
    monkeypatch.setattr(devices, "lane_of", lambda where: host)
    monkeypatch.setattr(devices, "_why_not", lambda: "")
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(cargo, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where=None: None)
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


def staged(tensors, level, axis=None):
    """Tensors as they lie in a staging buffer."""
    wish = Wish(summary=True, level=level, axis=axis)
    return [
        SimpleNamespace(
            address=x.data_ptr(),
            device=SimpleNamespace(index=PLACE),
            dtype=x.dtype,
            shape=x.shape,
            wish=wish,
            values=x,
            later=None,
        )
        for x in tensors
    ]


def together(statistics, tensors, level, axis=None):
    """What is taken of tensors all at once."""
    held = staged(tensors, level, axis)
    statistics.start_all(held)
    return [one.later for one in held]


@pytest.mark.parametrize("level", ["moments", "full"])
def test_tensors_are_started_one_by_one_and_together_and_give_the_numbers_of_the_cpu(host, level):
    tensors = [values(dtype, size) for dtype in (torch.bfloat16, torch.int32) for size in (9, 3000)]
    statistics = statistics_of(tensors[0], tensors[2], level=level)
    alone = [statistics.start(tensor, level) for tensor in tensors]
    at_once = together(statistics, tensors, level)
    for one, other, tensor in zip(alone, at_once, tensors, strict=True):
        one.leave()
        assert_like_the_cpu(one(), tensor, level=level)
        assert_like_the_cpu(other(), tensor, level=level)


@pytest.mark.parametrize("axis", [-1, 0])
def test_channels_of_many_tensors_are_counted_together_and_each_gets_its_own(host, axis):
    tensors = [values(dtype, 9 * n).view(9, n) for dtype in (torch.bfloat16, torch.int32) for n in (3, 40, 200)]
    statistics = statistics_of(tensors[0], tensors[3], level="full")
    launches, start = [], devices.Statistics._channels.fget(statistics).start
    statistics._launches.start = lambda dtype, laid: launches.append(dtype) or start(dtype, laid)
    for later, tensor in zip(together(statistics, tensors, "full", axis), tensors, strict=True):
        later.leave()
        assert later.has_arrived
        assert_like_the_cpu(later(), tensor)
        expected = summarize(tensor, channels=axis).channels
        assert later().channels.axis == axis
        np.testing.assert_allclose(later().channels.table, expected.table, rtol=1e-12)
    assert launches == [torch.bfloat16, torch.int32]


def test_channels_that_cannot_be_counted_on_the_device_are_counted_on_the_host(host, monkeypatch, caplog):
    x = values(torch.float32, 300).view(30, 10)
    statistics = statistics_of(x, level="full")
    monkeypatch.setattr(
        "layerscope.stats.device.ChannelSums.start", lambda *a: (_ for _ in ()).throw(RuntimeError("no ptxas"))
    )
    [later] = together(statistics, [x], "full", -1)
    assert later().channels == summarize(x, channels=-1).channels
    assert "no ptxas" in caplog.text


def test_what_does_not_lie_plainly_is_not_started_the_quick_way(host):
    x = values(torch.float32, 3000)
    statistics = statistics_of(x, level="moments")
    odd = [x[::2], x[1:], x[:0], torch._neg_view(x), x.to(torch.complex64)]
    assert [statistics.start(tensor, "moments") for tensor in [*odd, torch.nn.Parameter(x)]] == [None] * 6


def test_what_was_taken_of_a_float64_tensor_does_not_change_how_others_are_taken(host):
    x, y = values(torch.float32, 300), values(torch.float64, 300)
    statistics = statistics_of(x, y, level="full")
    assert statistics.start(y, "full") is None
    alone, [at_once] = statistics.start(x, "full"), together(statistics, [x], "full")
    assert_like_the_cpu(alone(), x)
    assert_like_the_cpu(at_once(), x)


class Slow(Host):
    """A lane on which nothing arrives before somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.under_way = []

    def send(self, cargo):
        self.under_way.append(cargo)

    def arrive(self, cargo, seconds):
        assert seconds == devices._BOUND
        assert self.under_way.pop(0) is cargo
        super().send(cargo)
        return True


@pytest.fixture
def slow(host, monkeypatch):
    """Statistics of pages of two tensors, of which two are under way at most; and their lane."""
    slow, tensors = Slow(), [values(torch.float32, 9 + size) for size in range(12)]
    statistics = statistics_of(tensors[0], level="moments")
    [desk] = statistics._desks.values()
    desk.lane, desk.slots.size = slow, 2
    desk.ahead = 2
    monkeypatch.setattr(devices._Page, "arrive", lambda page, seconds=None: slow.arrive(page, seconds))
    return SimpleNamespace(lane=slow, statistics=statistics, desk=desk, tensors=tensors)


def starting(slow, tensors):
    """Start tensors, and tell how many pages were under way after each."""
    found = []
    for tensor in tensors:
        later = slow.statistics.start(tensor, "moments")
        found.append((later, len(slow.lane.under_way)))
    return found


def test_the_device_holds_so_many_pages_and_the_next_waits_for_the_first(slow):
    found = starting(slow, slow.tensors)
    assert [pages for _, pages in found] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    for (later, _), tensor in zip(found[:6], slow.tensors, strict=False):
        assert_like_the_cpu(later(), tensor, level="moments")
    slow.desk.ahead = float("inf")
    assert [pages for _, pages in starting(slow, slow.tensors[:4])] == [3, 3, 4, 4]  # nobody else holds them back


def test_pages_that_have_left_are_not_waited_for(slow):
    starting(slow, slow.tensors[:6])
    for page in slow.lane.under_way:
        Host.send(slow.lane, page)
    slow.lane.under_way = []
    starting(slow, slow.tensors[:1])
    assert [len(slow.desk.sent), len(slow.lane.under_way)] == [1, 1]


def test_a_page_that_is_asked_for_waits_like_a_full_one(slow):
    found = starting(slow, slow.tensors[:5])
    found[-1][0].leave()
    assert len(slow.lane.under_way) == 2
    found[-1][0].leave()  # which has left
    assert len(slow.lane.under_way) == 2


def test_pages_that_never_fill_are_forgotten_and_their_memory_is_used_again(slow, monkeypatch):
    written, gather = set(), slow.desk.slots.gather
    monkeypatch.setattr(slow.desk.slots, "gather", lambda sheet: (written.add(sheet.words.data_ptr()), gather(sheet)))
    monkeypatch.setattr(slow.lane, "send", lambda page: Host.send(slow.lane, page))
    for tensor in slow.tensors:
        later = slow.statistics.start(tensor, "moments")
        later.leave()
        assert_like_the_cpu(later(), tensor, level="moments")
    assert (len(slow.desk.sent), len(written), len(slow.desk.unused)) == (1, 1, 2)


def test_a_sheet_is_read_when_the_device_has_written_it(slow, monkeypatch):
    launched, gather = [], slow.desk.slots.gather
    monkeypatch.setattr(slow.desk.slots, "gather", launched.append)
    later = slow.statistics.start(slow.tensors[0], "moments")
    later.leave()
    [page] = slow.lane.under_way
    page.ready = SimpleNamespace(synchronize=lambda: gather(launched.pop()))
    Host.send(slow.lane, page)
    assert_like_the_cpu(later(), slow.tensors[0], level="moments")
    assert (page.sheet, launched) == (None, [])


def test_memory_that_a_device_may_still_write_to_is_never_given_back(slow, monkeypatch):
    monkeypatch.setattr(devices, "_abandoned", [])
    gathered, gather = [], slow.desk.slots.gather
    monkeypatch.setattr(slow.desk.slots, "gather", lambda sheet: (gathered.append(sheet), gather(sheet)))
    monkeypatch.setattr(slow.lane, "send", lambda page: signal.raise_signal(signal.SIGINT))
    later = slow.statistics.start(slow.tensors[0], "moments")
    with pytest.raises(KeyboardInterrupt):
        later.leave()
    [kept], [written] = devices._abandoned, gathered
    assert kept.words is written.words


@pytest.mark.parametrize("unused", [2, 0])
def test_a_page_is_sent_and_statistics_are_closed_unseen_by_anybodys_modes(host, unused, monkeypatch):
    class Refuses(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, seen, launched, sent = values(torch.float32, 30), [], [], []
    statistics = statistics_of(x, level="moments")
    [desk] = statistics._desks.values()
    gather = desk.slots._gather  # which is made of torch's operations here
    monkeypatch.setattr(desk.slots, "_gather", lambda *numbers: launched.append(numbers))
    monkeypatch.setattr(host, "send", sent.append)
    first, second = (statistics.start(x, "moments") for _ in range(2))
    del desk.unused[unused:]
    with Refuses(), Notes():
        first.leave()
        statistics.close()
    assert seen == []
    gather(*launched.pop())
    Host.send(host, sent.pop())
    for later in (first, second):
        assert_like_the_cpu(later(), x, level="moments")


def test_who_has_the_numbers_holds_nothing_else(slow, monkeypatch):
    monkeypatch.setattr(slow.lane, "send", lambda page: Host.send(slow.lane, page))
    later = slow.statistics.start(slow.tensors[0], "moments")
    desk = weakref.ref(slow.desk)
    later.leave()
    slow.statistics.close()
    del slow.desk
    gc.collect()
    assert desk() is None
    later.leave()  # once more
    assert_like_the_cpu(later(), slow.tensors[0], level="moments")


def test_a_sheet_of_a_device_that_has_failed_is_never_given_back(slow, monkeypatch):
    monkeypatch.setattr(devices, "_abandoned", [])
    slow.statistics.start(slow.tensors[0], "moments").leave()
    [page] = slow.lane.under_way
    page.ready = SimpleNamespace(synchronize=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.unload()
    assert devices._abandoned == [page.sheet]
    assert page.sheet.words.data_ptr() not in {words.data_ptr() for words, *_ in slow.desk.unused}


def test_while_one_waits_the_others_go_on(slow, monkeypatch):
    arrive, locked = slow.lane.arrive, []

    def watched(page, seconds):
        locked.append(slow.statistics._lock.locked())
        return arrive(page, seconds)

    monkeypatch.setattr(slow.lane, "arrive", watched)
    starting(slow, slow.tensors)
    together(slow.statistics, slow.tensors, "moments")
    assert locked == [False] * 9


def test_statistics_that_never_leave_are_waited_for_once_and_none_is_lost(slow, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(slow.lane, "arrive", lambda page, seconds: asked.append(page))
    found = starting(slow, slow.tensors)
    assert [pages for _, pages in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert len(asked) == 1
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "device -1 did not write its statistics for 10 s: more than 8 pages are under way from now on"
    for page in slow.lane.under_way:
        Host.send(slow.lane, page)
    for (later, _), tensor in zip(found[:10], slow.tensors, strict=False):
        assert_like_the_cpu(later(), tensor, level="moments")


def test_an_interrupt_while_a_page_waits_loses_nothing(slow, monkeypatch):
    found = starting(slow, slow.tensors[:6])
    with monkeypatch.context() as patched:
        patched.setattr(slow.lane, "arrive", lambda page, seconds: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            slow.statistics.start(slow.tensors[6], "moments")
    found += starting(slow, slow.tensors[6:])
    slow.statistics.close()
    for page in slow.lane.under_way:
        Host.send(slow.lane, page)
    for (later, _), tensor in zip(found, slow.tensors, strict=True):
        assert_like_the_cpu(later(), tensor, level="moments")


@pytest.fixture
def refused(host, monkeypatch):
    """Statistics of a tensor whose page cannot be gathered, their desk, and what is waited for."""
    x = values(torch.float32, 8)
    statistics = statistics_of(x, level="moments")
    [desk] = statistics._desks.values()
    monkeypatch.setattr(desk.slots, "gather", lambda sheet: 1 / 0)
    return SimpleNamespace(x=x, statistics=statistics, desk=desk, later=statistics.start(x, "moments"))


def test_a_page_that_cannot_be_gathered_is_not_waited_for(refused):
    statistics, x = refused.statistics, refused.x
    with pytest.raises(ZeroDivisionError):
        refused.later.leave()
    with pytest.raises(RuntimeError, match="did not arrive from the device: division by zero"):
        refused.later()
    assert statistics.start(x, "moments") is None  # whose slots nobody knows the contents of
    assert_like_the_cpu(statistics._anyhow(x, "moments")(), x, level="moments")


def test_whoever_waits_is_told_first_of_a_page_that_cannot_be_gathered(refused, monkeypatch):
    class Desks(dict):
        def pop(self, *key):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(refused.statistics, "_desks", Desks(refused.statistics._desks))
    with pytest.raises(KeyboardInterrupt):
        refused.later.leave()
    assert refused.later.has_arrived  # nobody would wait for ever
    with pytest.raises(RuntimeError, match="did not arrive from the device: division by zero"):
        refused.later()


def test_a_page_that_an_interrupt_took_off_the_desk_is_not_waited_for(refused, monkeypatch):
    def interrupted(desk, name, value):
        object.__setattr__(desk, name, value)
        if (name, value) == ("page", None):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(devices._Desk, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refused.later.leave()
    assert refused.later.has_arrived
    with pytest.raises(RuntimeError, match="did not arrive from the device"):
        refused.later()


def test_more_tensors_than_there_are_slots_are_taken_in_several_goes(host, monkeypatch):
    tensors = [values(torch.float32, 8) + number for number in range(7)]
    statistics = statistics_of(tensors[0], level="moments")
    [desk] = statistics._desks.values()
    desk.slots.size = 3
    found = together(statistics, tensors, "moments")
    statistics.close()
    for later, tensor in zip(found, tensors, strict=True):
        assert_like_the_cpu(later(), tensor, level="moments")


def test_an_interrupt_before_the_launch_leaves_nobody_another_tensors_numbers(host, monkeypatch):
    x, y = values(torch.float32, 300), values(torch.float32, 300) + 1
    statistics = statistics_of(x, level="moments")
    [before] = together(statistics, [x], "moments")
    assert_like_the_cpu(before(), x, level="moments")

    def interrupted(*numbers):
        raise KeyboardInterrupt

    [desk] = statistics._desks.values()
    monkeypatch.setattr(desk, "starting_all", lambda dtype: (interrupted, 8, 8, "float32"))
    held = staged([y], "moments")
    with pytest.raises(KeyboardInterrupt):
        statistics.start_all(held)
    assert held[0].later is None
    monkeypatch.undo()
