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
from layerscope import native
from layerscope.points import Moment, Point
from layerscope.recorder import cargo, devices, gathering, lanes
from layerscope.recorder.gathering import Gathering, values_of
from layerscope.recorder.recording import _Step
from layerscope.recorder.taps import Request, Wish

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here to test with")
GATES = native.load()

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
    for module in (lanes, devices, gathering):
        monkeypatch.setattr(module, "current_stream", lambda place: 0)
    for module in (lanes, devices, gathering):
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
    statistics.taken[PLACE] = statistics.taken.pop(None)
    return statistics


def together(statistics, tensors, level):
    """What is taken of tensors all at once, None of those that cannot be; and the way for the next."""
    basket = GATES.Basket(PLACE, list, list, 1 << 30, lanes.current_stream, lanes.is_capturing)
    held = [basket.make(GATES.Pass(basket, Point("a"), level, None, {}), tensor) for tensor in tensors]
    groups, odd, changed = GATES.sorted(held, PLACE)
    ways = [statistics.start_all(level, dtype, group, GATES) for (_, dtype), group in groups.items()]
    assert changed == []
    assert {id(one) for one in odd} <= {id(one) for one in held if one.got is None}
    return [one.got and one.got.part(one.place, one.dtype, one.shape) for one in held], ways


@pytest.mark.parametrize("level", ["moments", "full"])
def test_tensors_are_started_one_by_one_and_together_and_give_the_same_numbers(host, level):
    tensors = [values(dtype, size) for dtype in (torch.bfloat16, torch.int32) for size in (9, 3000)]
    statistics = statistics_of(tensors[0], tensors[2], level=level)
    alone = [statistics.start(tensor, level) for tensor in tensors]
    at_once, _ = together(statistics, tensors, level)
    for one, other, tensor in zip(alone, at_once, tensors, strict=True):
        one.leave()
        assert one.has_arrived
        assert other.has_arrived
        assert one.same_as(other)
        assert_like_the_cpu(other(), tensor, level=level)
    assert not at_once[0].same_as(at_once[1])


def test_what_cannot_be_taken_together_is_left_for_another_way(host, monkeypatch):
    x = values(torch.float32, 3000)
    statistics = statistics_of(x, level="moments")
    odd = [x[::2], x[1:], x[:0], torch._neg_view(x), x.to(torch.complex64)]
    assert [statistics.start(tensor, "moments") for tensor in [*odd, torch.nn.Parameter(x)]] == [None] * 6
    found, _ = together(statistics, [*odd, x], "moments")
    assert found[:-1] == [None] * len(odd)
    assert_like_the_cpu(found[-1](), x, level="moments")
    assert together(statistics, [x], "full") == ([None], [None])  # nobody has asked for that yet
    statistics.close()
    host.rooms = False
    statistics = statistics_of(x, level="moments")
    assert together(statistics, [x], "moments")[0] == [None]
    monkeypatch.setattr(devices, "current_stream", lambda place: 7)
    assert together(statistics, [x], "moments")[0] == [None]


def test_what_was_taken_of_a_float64_tensor_does_not_change_how_others_are_taken(host):
    x, y = values(torch.float32, 300), values(torch.float64, 300)
    statistics = statistics_of(x, y, level="full")
    assert statistics.start(y, "full") is None
    alone, ([at_once], _) = statistics.start(x, "full"), together(statistics, [x], "full")
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


def test_an_interrupt_while_a_desk_is_made_leaves_its_memory_counted(host):
    class Desks(dict):
        def __setitem__(self, key, desk):
            signal.raise_signal(signal.SIGINT)

    statistics, x = devices.Statistics(), values(torch.float32, 8)
    statistics._desks = Desks()
    with pytest.raises(KeyboardInterrupt):
        statistics._anyhow(x, "moments")
    [taken] = statistics.taken.values()
    assert taken > 0


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
    assert not any(statistics.taken.values())
    assert_like_the_cpu(statistics._anyhow(x, "moments")(), x, level="moments")


def test_whoever_waits_is_told_first_of_a_page_that_cannot_be_gathered(refused, monkeypatch):
    monkeypatch.setattr(refused.statistics, "_close", lambda desk: signal.raise_signal(signal.SIGINT))
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
    found, _ = together(statistics, tensors, "moments")
    statistics.close()
    for later, tensor in zip(found, tensors, strict=True):
        assert_like_the_cpu(later(), tensor, level="moments")


@pytest.fixture
def gathered(host):
    """A gathering over real kernels, and what a hook does with it."""
    x = values(torch.bfloat16, 100)
    statistics = statistics_of(x, level="moments")
    kept = []

    def take_all(only, dtype, held):
        way = statistics.start_all(only, dtype, held, GATES)
        if way is not None:
            gathered.basket.aim(way)

    gathered = Gathering(GATES, PLACE, take_all=take_all, alone=None, keep=kept.append, doubtful=lambda point: None)
    gathered.statistics, gathered.due, gathered.kept = statistics, {}, kept
    return gathered


MOMENTS = Wish(summary=True, level="moments")


def test_a_trial_is_lost_where_the_values_change_and_won_where_they_do_not(gathered):
    x, y = values(torch.bfloat16, 100), values(torch.bfloat16, 100)
    calm, restless = Request(Point("calm"), MOMENTS), Request(Point("restless"), MOMENTS)
    gathered.begin(_Step(Moment(), requests=gathered.due))
    for request, tensor in ((calm, x), (restless, y)):
        gathered.doubt(request, "moments", tensor, gathered.statistics.start(tensor, "moments"))
    y.data[7] += 1  # which torch does not count
    gathered.end()
    gathered.begin(_Step(Moment(), requests=gathered.due))
    assert (list(calm.standing.proofs), restless.standing.never) == ([(100, torch.bfloat16)], True)
    held = gathered.hold(calm, x, Moment())
    assert gathered.hold(restless, y, Moment()) is None
    gathered.end()
    assert_like_the_cpu(values_of(held), x, level="moments")


def test_what_waits_goes_its_way_in_c_from_the_second_time_on_over_as_many_pages_as_it_takes(gathered, monkeypatch):
    [desk] = gathered.statistics._desks.values()
    desk.slots.size = 3
    points = [Request(Point(f"p{number}"), MOMENTS) for number in range(7)]
    rest = []
    monkeypatch.setattr(gathered, "_take_all", lambda *a, take=gathered._take_all: (rest.append(a), take(*a)))
    for step in range(5):
        tensors = [values(torch.bfloat16, 100 + number) * (1 + step) for number in range(7)]
        gathered.begin(_Step(Moment(step=step), requests=gathered.due))
        for request, tensor in zip(points, tensors, strict=True):
            if gathered.hold(request, tensor, Moment(step=step)) is None:
                gathered.doubt(request, "moments", tensor, gathered.statistics.start(tensor, "moments"))
        gathered.end()
        if step:
            held = gathered.kept[-7:]
            gathered.statistics.close()
            for one, tensor in zip(held, tensors, strict=True):
                assert_like_the_cpu(values_of(one), tensor, level="moments")
            break
    assert len(rest) == 1  # the trial, which found the way


def test_a_large_tensor_is_swept_as_it_appears_with_all_that_waits_and_once(gathered, monkeypatch):
    monkeypatch.setattr(gathering, "_LARGEST", 400)
    small, large, again = (Request(Point(name), MOMENTS) for name in ("small", "large", "again"))
    for step in range(3):
        x, y = values(torch.bfloat16, 100) + step, values(torch.bfloat16, 500) + step
        gathered.begin(_Step(Moment(step=step), requests=gathered.due))
        seen = []
        for request, tensor in ((small, x), (large, y), (again, y)):
            held = gathered.hold(request, tensor, Moment(step=step))
            if held is None:
                gathered.doubt(request, "moments", tensor, gathered.statistics.start(tensor, "moments"))
            seen.append(held)
        if step:
            assert [one.tensor for one in seen] == [None] * 3
            assert [one.twin for one in seen] == [None, None, seen[1]]
            y.zero_()
            for one, tensor in zip(seen, (x, values(torch.bfloat16, 500) + step), strict=False):
                assert_like_the_cpu(values_of(one), tensor, level="moments")
        gathered.end()


def test_a_way_over_a_page_that_could_not_be_gathered_is_not_gone_again(host, monkeypatch):
    statistics, due = statistics_of(values(torch.bfloat16, 100), level="full"), {}
    request = Request(Point("a"), Wish(summary=True, level="full"))

    def take_all(only, dtype, held):
        way = statistics.start_all(only, dtype, held, GATES)
        if way is not None:
            gathered.basket.aim(way)

    def alone(only, tensor):
        return statistics._anyhow(tensor, only)

    def no_memory(used):
        raise torch.OutOfMemoryError("no memory")

    def step(number):
        x = values(torch.bfloat16, 100) * (1 + number)
        gathered.begin(_Step(Moment(step=number), requests=due))
        if gathered.hold(request, x, Moment(step=number)) is None:
            gathered.doubt(request, "full", x, statistics.start(x, "full"))
        gathered.end()
        return x

    kept = []
    gathered = Gathering(GATES, PLACE, take_all=take_all, alone=alone, keep=kept.append, doubtful=lambda point: None)
    step(0), step(1)
    [desk] = statistics._desks.values()
    with monkeypatch.context() as patched:
        patched.setattr(desk.slots, "gather", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            values_of(kept[-1])
    x = step(2)
    assert_like_the_cpu(values_of(kept[-1]), x)  # the slots still hold what was not gathered


def test_a_page_without_a_table_that_another_thread_has_opened_is_not_written_to(host, monkeypatch):
    x = values(torch.float32, 3000)
    statistics = statistics_of(x, level="moments")
    turn = statistics._turn

    def turned(desk):
        found = turn(desk)
        if host.rooms:
            host.rooms = False
            statistics._send(desk)
            desk.page = None
            statistics._launched(desk, desk.known[torch.float32], x.data_ptr(), x.numel(), x.shape)
        return found

    monkeypatch.setattr(statistics, "_turn", turned)
    assert together(statistics, [x], "moments")[0] == [None]


def test_an_interrupt_before_the_launch_leaves_nobody_another_tensors_numbers(host, monkeypatch):
    x, y = values(torch.float32, 300), values(torch.float32, 300) + 1
    statistics = statistics_of(x, level="moments")
    [before], _ = together(statistics, [x], "moments")
    assert_like_the_cpu(before(), x, level="moments")
    basket = GATES.Basket(PLACE, list, list, 1 << 30, lanes.current_stream, lanes.is_capturing)
    held = [basket.make(GATES.Pass(basket, Point("a"), "moments", None, {}), y)]
    GATES.sorted(held, PLACE)

    def interrupted(*numbers):
        raise KeyboardInterrupt

    [desk] = statistics._desks.values()
    monkeypatch.setattr(desk, "together", lambda dtype: interrupted)
    with pytest.raises(KeyboardInterrupt):
        statistics.start_all("moments", torch.float32, held, GATES)
    assert held[0].got is None


def test_nothing_is_launched_while_another_device_is_the_current_one(host, monkeypatch):
    here, launched = [PLACE], []

    class There:
        def __init__(self, which):
            pass

        def __enter__(self):
            here.append(PLACE)

        def __exit__(self, *_):
            here.pop()

    monkeypatch.setattr(torch.cuda, "stream", There)
    monkeypatch.setattr(torch.cuda, "device", There)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where=None: "the stream of the step")
    for module in (lanes, gathering):
        monkeypatch.setattr(module, "is_alone", lambda: False)
    monkeypatch.setattr(lanes, "_current_device", lambda: here[-1])
    statistics = statistics_of(values(torch.bfloat16, 100), level="moments")
    [desk] = statistics._desks.values()
    starting_all, gather, kept = desk.slots.starting_all, desk.slots.gather, []

    def watched(launch):
        return lambda *numbers: (launched.append(here[-1]), launch(*numbers))[1]

    monkeypatch.setattr(desk.slots, "starting_all", lambda dtype: watched(starting_all(dtype)))
    monkeypatch.setattr(desk.slots, "gather", watched(gather))
    gathered = Gathering(
        GATES,
        PLACE,
        take_all=lambda only, dtype, held: gathered.basket.aim(statistics.start_all(only, dtype, held, GATES)),
        alone=lambda only, tensor: statistics._anyhow(tensor, only),
        keep=kept.append,
        doubtful=lambda point: None,
    )
    request, due = Request(Point("a"), MOMENTS), {}
    for number in range(3):
        x = values(torch.bfloat16, 100) * (1 + number)
        gathered.begin(_Step(Moment(step=number), requests=due))
        if gathered.hold(request, x, Moment()) is None:
            gathered.doubt(request, "moments", x, statistics.start(x, "moments"))
        if number == 2:
            here[:] = [5]  # in the middle of the step
        gathered.end()
    assert_like_the_cpu(values_of(kept[-1]), x, level="moments")
    assert set(launched) == {PLACE}


@pytest.mark.parametrize("level", ["moments", "full"])
def test_what_statistics_take_up_of_the_device_is_known_and_leaves_room_for_what_is_tried(host, level):
    tensors = [values(torch.bfloat16, 100), values(torch.float64, 100)]
    for seen in (tensors[:1], tensors):
        statistics = devices.Statistics()
        for tensor in seen:
            statistics._anyhow(tensor, level)
        lying = [vars(desk.slots).values() for desk in statistics._desks.values()]
        sizes = [part.nbytes for parts in lying for part in parts if isinstance(part, torch.Tensor)]
        [(_, taken)] = statistics.taken.items()
        assert 0 <= sum(sizes) - taken < 1e5  # weights and cursors
        assert taken + gathering._DOUBTED < gathering._MOST
        statistics.close()
        assert list(statistics.taken.values()) == [0]
