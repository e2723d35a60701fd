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
from layerscope.recorder.gpu import batches
from layerscope.recorder.gpu import statistics as device_statistics
from layerscope.recorder.gpu import transfer as transfers
from layerscope.recorder.taps import Want
from layerscope.stats import summarize

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here to test with")

PLACE = -1  # what torch calls the host


class Host:
    """A transfer to nowhere: what is sent has arrived."""

    place = PLACE

    def __init__(self):
        self.rooms = True

    def room(self, size):
        chunk = np.zeros(size, np.uint8)
        return (chunk, 0, chunk.ctypes.data) if self.rooms else None

    def send(self, batch):
        batch.unload()
        batch.finish()


@pytest.fixture
def host(monkeypatch):
    host = Host()
    for module in (transfers, device_statistics):
        monkeypatch.setattr(module, "current_stream", lambda place: 0)
    for module in (transfers, device_statistics):
        monkeypatch.setattr(module, "is_capturing", lambda: False)
    monkeypatch.setattr(transfers, "is_alone", lambda: True)
    monkeypatch.setattr(device_statistics, "transfer_of", lambda where: host)
    monkeypatch.setattr(device_statistics, "_why_not", lambda: "")
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(batches, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda where: nullcontext())
    return host


def statistics_of(*first, level):
    """Statistics that have seen a tensor of each kind, and so know where to take the next."""
    statistics = device_statistics.DeviceStatistics()
    for tensor in first:
        assert_like_the_cpu(statistics._anyhow(tensor, level)(), tensor, level=level)
    for queue in statistics._queues.values():
        queue.place = PLACE
        queue.key = (PLACE, *queue.key[1:])
    statistics._queues = {queue.key: queue for queue in statistics._queues.values()}
    return statistics


def staged(tensors, level, axis=None):
    """Tensors as they lie in a staging buffer."""
    want = Want(summary=True, level=level, axis=axis)
    return [
        SimpleNamespace(
            address=x.data_ptr(),
            device=SimpleNamespace(index=PLACE),
            dtype=x.dtype,
            shape=x.shape,
            want=want,
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
    launches, start = [], device_statistics.DeviceStatistics._channels.fget(statistics).start
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
    """A transfer on which nothing arrives before somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.under_way = []

    def send(self, batch):
        self.under_way.append(batch)

    def arrive(self, batch, seconds):
        assert seconds == device_statistics._BOUND
        assert self.under_way.pop(0) is batch
        super().send(batch)
        return True


@pytest.fixture
def slow(host, monkeypatch):
    """Statistics of batches of two tensors, of which two are under way at most; and their transfer."""
    slow, tensors = Slow(), [values(torch.float32, 9 + size) for size in range(12)]
    statistics = statistics_of(tensors[0], level="moments")
    [queue] = statistics._queues.values()
    queue.transfer, queue.slots.size = slow, 2
    queue.ahead = 2
    monkeypatch.setattr(device_statistics._SlotBatch, "arrive", lambda batch, seconds=None: slow.arrive(batch, seconds))
    return SimpleNamespace(transfer=slow, statistics=statistics, queue=queue, tensors=tensors)


def starting(slow, tensors):
    """Start tensors, and tell how many batches were under way after each."""
    found = []
    for tensor in tensors:
        later = slow.statistics.start(tensor, "moments")
        found.append((later, len(slow.transfer.under_way)))
    return found


def test_the_device_holds_so_many_pages_and_the_next_waits_for_the_first(slow):
    found = starting(slow, slow.tensors)
    assert [batches for _, batches in found] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    for (later, _), tensor in zip(found[:6], slow.tensors, strict=False):
        assert_like_the_cpu(later(), tensor, level="moments")
    slow.queue.ahead = float("inf")
    assert [batches for _, batches in starting(slow, slow.tensors[:4])] == [3, 3, 4, 4]  # nobody else holds them back


def test_pages_that_have_left_are_not_waited_for(slow):
    starting(slow, slow.tensors[:6])
    for batch in slow.transfer.under_way:
        Host.send(slow.transfer, batch)
    slow.transfer.under_way = []
    starting(slow, slow.tensors[:1])
    assert [len(slow.queue.sent), len(slow.transfer.under_way)] == [1, 1]


def test_a_page_that_is_asked_for_waits_like_a_full_one(slow):
    found = starting(slow, slow.tensors[:5])
    found[-1][0].leave()
    assert len(slow.transfer.under_way) == 2
    found[-1][0].leave()  # which has left
    assert len(slow.transfer.under_way) == 2


def test_pages_that_never_fill_are_forgotten_and_their_memory_is_used_again(slow, monkeypatch):
    written, gather = set(), slow.queue.slots.gather
    monkeypatch.setattr(
        slow.queue.slots, "gather", lambda buffer: (written.add(buffer.words.data_ptr()), gather(buffer))
    )
    monkeypatch.setattr(slow.transfer, "send", lambda batch: Host.send(slow.transfer, batch))
    for tensor in slow.tensors:
        later = slow.statistics.start(tensor, "moments")
        later.leave()
        assert_like_the_cpu(later(), tensor, level="moments")
    assert (len(slow.queue.sent), len(written), len(slow.queue.unused)) == (1, 1, 2)


def test_a_sheet_is_read_when_the_device_has_written_it(slow, monkeypatch):
    launched, gather = [], slow.queue.slots.gather
    monkeypatch.setattr(slow.queue.slots, "gather", launched.append)
    later = slow.statistics.start(slow.tensors[0], "moments")
    later.leave()
    [batch] = slow.transfer.under_way
    batch.ready = SimpleNamespace(synchronize=lambda: gather(launched.pop()))
    Host.send(slow.transfer, batch)
    assert_like_the_cpu(later(), slow.tensors[0], level="moments")
    assert (batch.buffer, launched) == (None, [])


def test_memory_that_a_device_may_still_write_to_is_never_given_back(slow, monkeypatch):
    monkeypatch.setattr(device_statistics, "_abandoned", [])
    gathered, gather = [], slow.queue.slots.gather
    monkeypatch.setattr(slow.queue.slots, "gather", lambda buffer: (gathered.append(buffer), gather(buffer)))
    monkeypatch.setattr(slow.transfer, "send", lambda batch: signal.raise_signal(signal.SIGINT))
    later = slow.statistics.start(slow.tensors[0], "moments")
    with pytest.raises(KeyboardInterrupt):
        later.leave()
    [kept], [written] = device_statistics._abandoned, gathered
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
    [queue] = statistics._queues.values()
    gather = queue.slots._gather  # which is made of torch's operations here
    monkeypatch.setattr(queue.slots, "_gather", lambda *numbers: launched.append(numbers))
    monkeypatch.setattr(host, "send", sent.append)
    first, second = (statistics.start(x, "moments") for _ in range(2))
    del queue.unused[unused:]
    with Refuses(), Notes():
        first.leave()
        statistics.close()
    assert seen == []
    gather(*launched.pop())
    Host.send(host, sent.pop())
    for later in (first, second):
        assert_like_the_cpu(later(), x, level="moments")


def test_who_has_the_numbers_holds_nothing_else(slow, monkeypatch):
    monkeypatch.setattr(slow.transfer, "send", lambda batch: Host.send(slow.transfer, batch))
    later = slow.statistics.start(slow.tensors[0], "moments")
    queue = weakref.ref(slow.queue)
    later.leave()
    slow.statistics.close()
    del slow.queue
    gc.collect()
    assert queue() is None
    later.leave()  # once more
    assert_like_the_cpu(later(), slow.tensors[0], level="moments")


def test_a_sheet_of_a_device_that_has_failed_is_never_given_back(slow, monkeypatch):
    monkeypatch.setattr(device_statistics, "_abandoned", [])
    slow.statistics.start(slow.tensors[0], "moments").leave()
    [batch] = slow.transfer.under_way
    batch.ready = SimpleNamespace(synchronize=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.unload()
    assert device_statistics._abandoned == [batch.buffer]
    assert batch.buffer.words.data_ptr() not in {words.data_ptr() for words, *_ in slow.queue.unused}


def test_while_one_waits_the_others_go_on(slow, monkeypatch):
    arrive, locked = slow.transfer.arrive, []

    def watched(batch, seconds):
        locked.append(slow.statistics._lock.locked())
        return arrive(batch, seconds)

    monkeypatch.setattr(slow.transfer, "arrive", watched)
    starting(slow, slow.tensors)
    together(slow.statistics, slow.tensors, "moments")
    assert locked == [False] * 9


def test_statistics_that_never_leave_are_waited_for_once_and_none_is_lost(slow, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(slow.transfer, "arrive", lambda batch, seconds: asked.append(batch))
    found = starting(slow, slow.tensors)
    assert [batches for _, batches in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert len(asked) == 1
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "device -1 did not write its statistics for 10 s: more than 8 batches are under way from now on"
    for batch in slow.transfer.under_way:
        Host.send(slow.transfer, batch)
    for (later, _), tensor in zip(found[:10], slow.tensors, strict=False):
        assert_like_the_cpu(later(), tensor, level="moments")


def test_an_interrupt_while_a_page_waits_loses_nothing(slow, monkeypatch):
    found = starting(slow, slow.tensors[:6])
    with monkeypatch.context() as patched:
        patched.setattr(slow.transfer, "arrive", lambda batch, seconds: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            slow.statistics.start(slow.tensors[6], "moments")
    found += starting(slow, slow.tensors[6:])
    slow.statistics.close()
    for batch in slow.transfer.under_way:
        Host.send(slow.transfer, batch)
    for (later, _), tensor in zip(found, slow.tensors, strict=True):
        assert_like_the_cpu(later(), tensor, level="moments")


@pytest.fixture
def refused(host, monkeypatch):
    """Statistics of a tensor whose batch cannot be gathered, their queue, and what is waited for."""
    x = values(torch.float32, 8)
    statistics = statistics_of(x, level="moments")
    [queue] = statistics._queues.values()
    monkeypatch.setattr(queue.slots, "gather", lambda buffer: 1 / 0)
    return SimpleNamespace(x=x, statistics=statistics, queue=queue, later=statistics.start(x, "moments"))


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

    monkeypatch.setattr(refused.statistics, "_queues", Desks(refused.statistics._queues))
    with pytest.raises(KeyboardInterrupt):
        refused.later.leave()
    assert refused.later.has_arrived  # nobody would wait for ever
    with pytest.raises(RuntimeError, match="did not arrive from the device: division by zero"):
        refused.later()


def test_a_page_that_an_interrupt_took_off_the_desk_is_not_waited_for(refused, monkeypatch):
    def interrupted(queue, name, value):
        object.__setattr__(queue, name, value)
        if (name, value) == ("batch", None):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(device_statistics._Queue, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refused.later.leave()
    assert refused.later.has_arrived
    with pytest.raises(RuntimeError, match="did not arrive from the device"):
        refused.later()


def test_more_tensors_than_there_are_slots_are_taken_in_several_goes(host, monkeypatch):
    tensors = [values(torch.float32, 8) + number for number in range(7)]
    statistics = statistics_of(tensors[0], level="moments")
    [queue] = statistics._queues.values()
    queue.slots.size = 3
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

    [queue] = statistics._queues.values()
    monkeypatch.setattr(queue, "starting_all", lambda dtype: (interrupted, 8, 8, "float32"))
    held = staged([y], "moments")
    with pytest.raises(KeyboardInterrupt):
        statistics.start_all(held)
    assert held[0].later is None
    monkeypatch.undo()
