"""The types in C by themselves: what waits, what is taken of it and in which order, and that nothing is left behind.

The device is played by the host: torch calls it place -1, and its only stream is number 0.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import struct
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from asserts import assert_lives_through
from layerscope import native
from played import Step, bits

pytestmark = pytest.mark.skipif(native.load() is None, reason=f"no gates: {native.why_not()}")

gates = native.load()

HERE = -1
ENTRY = struct.Struct("qqq")
SLOTS, TILE, PROGRAMS = 4, 128, 3
MB = 1 << 20


class Standing:
    """What is known of a point: anything."""


class Bench:
    """A basket, and the hooks that put tensors there."""

    def __init__(self, *, most=MB, place=HERE):
        self.kept = []
        self.rest = []
        self.requests = {}
        self.stream = 0
        self.captures = False
        self.interrupted = False
        self.basket = gates.Basket(
            place=place,
            keep=self.kept.append,
            rest=self.take,
            most=most,
            current_stream=self.current,
            is_capturing=lambda: self.captures,
        )
        self.begin()

    def current(self, place):
        """Say which stream is the current one."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self.stream

    def take(self, left):
        """Take what there was no way for."""
        held, found = left
        self.rest.append(found)
        gates.release(held)

    def begin(self, number=1, *, alone=True):
        self.basket.shut()
        self.step = Step(self.requests)
        self.basket.open(self.step, number, self.stream, alone)

    def leave(self, *sizes, kind="moments", point="a point", until=100, now=False, dtype=torch.float32):
        """Return a pass for tensors with so many items."""
        leave = gates.Pass(self.basket, point, kind, Standing(), self.requests)
        for items in sizes:
            assert leave.allow(items, dtype, 4 * items, until, now)
        return leave

    def hold(self, leave, *tensors):
        """Hold tensors back, as a hook does; they may be let go of then."""
        held = [self.basket.hold(leave, tensor, "a moment") for tensor in tensors]
        assert None not in held
        return held

    def sweep(self):
        """Take what waits; return what there was no way for."""
        left = self.basket.sweep()
        if left is None:
            return {}, [], []
        gates.release(left[0])
        return left[1]

    def aim(self, desk, *, kind="moments", dtype=torch.float32):
        self.basket.aim(desk.way(kind=kind, dtype=dtype))


class Page:
    """A page of numbers, and the table that tells where the tensors lie."""

    def __init__(self):
        self.memory = ctypes.create_string_buffer(24 * SLOTS)
        self.table = ctypes.addressof(self.memory)
        self.aboard = 0
        self.over = True


class Desk:
    """Where tensors are taken: a launch reads the table that it is given."""

    def __init__(self):
        self.lock = threading.Lock()
        self.page = None
        self.pages = []
        self.launches = []
        self.values = []
        self.refuses = False
        self.raises = None

    def way(self, *, kind="moments", dtype=torch.float32):
        return gates.Way(kind, dtype, self.lock, self, self.launch, self.turn, SLOTS, TILE, PROGRAMS)

    def turn(self):
        assert not self.lock.locked()
        if not self.refuses and (self.page is None or self.page.aboard == SLOTS):
            self.page = Page()
            self.pages.append(self.page)
        return not self.refuses

    def launch(self, first, address, count, programs):
        assert self.lock.locked()
        if self.raises is not None:
            raise self.raises
        self.launches.append((first, count, programs))
        for at in range(count):
            where, items, _ = ENTRY.unpack(ctypes.string_at(address + 24 * at, 24))
            self.values.append(list((ctypes.c_float * items).from_address(where)))


# What waits -----------------------------------------------------------------------------------------------------------


def test_what_waits_comes_back_in_order_with_what_is_known_of_it():
    bench = Bench()
    leave = bench.leave(4, 6)
    one, two = bits(4), bits(6)

    first, second = bench.hold(leave, one, two)

    assert bench.kept == [first, second]
    assert first.tensor is one
    assert (first.pass_, first.moment, first.items, first.got, first.twin) == (leave, "a moment", 4, None, None)
    assert (leave.point, leave.kind, leave.count) == ("a point", "moments", 2)
    assert bench.basket.bytes == 40
    held, (groups, odd, changed) = bench.basket.sweep()
    assert held == [first, second]
    assert groups == {("moments", torch.float32): [first, second]}
    assert odd == changed == []
    assert (first.address, second.address) == (one.data_ptr(), two.data_ptr())
    assert (second.shape, second.dtype) == (torch.Size([6]), torch.float32)
    assert bench.basket.bytes == 0
    assert bench.basket.sweep() is None


def test_a_tensor_of_another_size_or_kind_does_not_wait():
    bench = Bench()
    leave = bench.leave(4)
    with torch.inference_mode():
        uncounted = bits(4)

    assert bench.basket.hold(leave, bits(5), None) is None
    assert bench.basket.hold(leave, torch.nn.Parameter(bits(4)), None) is None
    assert bench.basket.hold(leave, uncounted, None) is None
    assert bench.basket.hold(leave, "no tensor", None) is None
    assert bench.kept == []


def test_nothing_waits_that_its_pass_is_not_for():
    bench, other = Bench(), Bench()
    denied, past, foreign = bench.leave(4), bench.leave(4, until=0), other.leave(4)
    stale = gates.Pass(bench.basket, "a point", "moments", None, {})  # the requests of other taps
    stale.allow(4, torch.float32, 16, 100, False)
    denied.deny()

    for leave in (denied, past, foreign, stale):
        assert bench.basket.hold(leave, bits(4), None) is None


def test_a_pass_tells_eight_sizes_apart_and_learns_one_anew():
    leave = Bench().leave(*range(8))

    assert not leave.allow(8, torch.float32, 32, 100, False)
    assert leave.allow(7, torch.float32, 28, 200, False)
    assert leave.count == 8


def test_nothing_waits_outside_of_the_step_its_thread_and_its_stream():
    bench = Bench()
    leave, said = bench.leave(4), []

    thread = threading.Thread(target=lambda: said.append(bench.basket.hold(leave, bits(4), None)))
    thread.start()
    thread.join()
    bench.stream = 7
    said.append(bench.basket.hold(leave, bits(4), None))
    bench.basket.open(bench.step, 1, 7, True)
    bench.captures = True
    said.append(bench.basket.hold(leave, bits(4), None))
    bench.captures = False
    assert bench.basket.hold(leave, bits(4), None) is not None
    bench.basket.bar()
    said.append(bench.basket.hold(leave, bits(4), None))
    bench.basket.shut()
    assert bench.basket.step is None
    said.append(bench.basket.hold(leave, bits(4), None))
    assert said == [None] * 5


def test_a_tensor_that_is_seen_twice_waits_once():
    bench = Bench()
    leave, tensor = bench.leave(4), bits(4)

    first, second = bench.hold(leave, tensor, tensor)

    assert second.twin is first
    assert second.tensor is None
    assert bench.basket.bytes == 16
    assert bench.sweep() == ({("moments", torch.float32): [first]}, [], [])


def test_a_tensor_is_not_the_same_after_a_change_or_for_another_kind():
    bench = Bench()
    tensor = bits(4)

    bench.hold(bench.leave(4), tensor)
    tensor.add_(1)
    (changed,) = bench.hold(bench.leave(4), tensor)
    (copied,) = bench.hold(bench.leave(4, kind="tensor"), tensor)

    assert changed.twin is None
    assert copied.twin is None


def test_a_tensor_is_known_again_after_all_was_taken_in_the_middle_of_its_step():
    bench = Bench()
    leave, tensor = bench.leave(4), bits(4)
    (first,) = bench.hold(leave, tensor)
    bench.sweep()

    (second,) = bench.hold(leave, tensor)
    bench.begin(2)
    (third,) = bench.hold(leave, tensor)

    assert second.twin is first
    assert third.twin is None


def test_a_tensor_whose_data_was_exchanged_is_not_known_again():
    bench = Bench()
    leave, taken, waiting = bench.leave(4), bits(4), bits(4)
    bench.hold(leave, taken)
    bench.sweep()
    bench.hold(leave, waiting)

    taken.data, waiting.data = bits(4) + 1, waiting.data.view(2, 2)

    assert [one.twin for one in bench.hold(leave, taken, waiting)] == [None, None]


def test_a_tensor_is_known_again_after_fifteen_others_were_taken_each_by_itself():
    bench = Bench()
    leave, tensor = bench.leave(4), bits(4)
    (first,) = bench.hold(leave, tensor)
    bench.sweep()
    others = [bits(4) for _ in range(16)]
    for other in others[:15]:
        bench.hold(leave, other)
        bench.sweep()
    (known,) = bench.hold(leave, tensor)
    bench.hold(leave, others[15])
    bench.sweep()
    (forgotten,) = bench.hold(leave, tensor)

    assert known.twin is first
    assert forgotten.twin is None


def test_a_tensor_at_the_place_of_one_that_is_gone_is_another_one():
    bench = Bench()
    leave = bench.leave(4)

    for _ in range(50):
        (held,) = bench.hold(leave, bits(4))
        assert held.twin is None
        bench.sweep()


def test_what_was_let_go_of_too_early_is_neither_taken_nor_taken_for_another():
    def ask():
        bench = Bench()
        leave = bench.leave(4)
        for _ in range(50):
            gates.release(bench.hold(leave, bits(4)))
            (held,) = bench.hold(leave, bits(4))
            assert held.twin is None
            assert bench.sweep() == ({("moments", torch.float32): [held]}, [], [])

    assert_lives_through(ask)


# What becomes of it ---------------------------------------------------------------------------------------------------


def test_what_was_changed_in_place_is_told_apart_with_its_twins():
    bench = Bench()
    leave, tensor, kept, freed = bench.leave(4), bits(4), bits(4), bits(4)
    first, second, third, gone = bench.hold(leave, tensor, tensor, kept, freed)

    tensor.add_(1)
    freed.untyped_storage().resize_(0)

    assert bench.sweep() == ({("moments", torch.float32): [third]}, [], [first, second, gone])


ODD = {
    "in another order": lambda: bits(8)[::2],
    "between two rows": lambda: bits(5)[1:],
    "to be negated": lambda: torch._neg_view(bits(4)),
    "empty": lambda: bits(0),
    "to be conjugated": lambda: torch.complex(bits(4), bits(4)).conj(),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_does_not_lie_plainly_is_odd(make):
    bench = Bench()
    tensor = make()

    (held,) = bench.hold(bench.leave(tensor.numel()), tensor)
    groups, odd, changed = bench.sweep()

    assert groups == {}
    assert odd + changed == [held]


NOWHERE = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "without values": lambda: torch.empty(4, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(bits(4), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([bits(2), bits(2)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
@pytest.mark.parametrize("make", NOWHERE.values(), ids=NOWHERE)
def test_what_does_not_lie_anywhere_is_left_to_the_hook(make):
    bench, tensor = Bench(), make()
    assert bench.basket.hold(bench.leave(tensor.numel()), tensor, "a moment") is None
    assert bench.basket.make(bench.leave(tensor.numel()), tensor) is None
    assert bench.kept == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
def test_every_dtype_that_has_statistics_may_wait(dtype):
    bench = Bench()
    (held,) = bench.hold(bench.leave(16, dtype=dtype), torch.zeros(16, dtype=dtype))
    assert bench.sweep() == ({("moments", dtype): [held]}, [], [])
    assert (held.dtype, held.shape) == (dtype, (16,))


def test_what_lies_elsewhere_by_the_end_was_changed():
    bench = Bench()
    tensor, kept = bits(4), bits(4)
    moved, still = bench.hold(bench.leave(4), tensor, kept)

    tensor.data = bits(4)  # which torch does not count

    assert bench.sweep() == ({("moments", torch.float32): [still]}, [], [moved])


def test_what_lies_on_another_device_is_odd():
    bench = Bench(place=0)
    (held,) = bench.hold(bench.leave(4), bits(4))
    assert bench.sweep() == ({}, [held], [])


def test_another_dtype_than_was_tried_does_not_wait():
    bench = Bench()
    leave = bench.leave()
    single, whole = (bench.basket.make(leave, tensor).type for tensor in (bits(4), bits(4).int()))
    assert leave.allow(4, torch.float32, 16, 100, False, single)
    [held] = bench.hold(leave, bits(4))
    for other in (bits(4).double(), bits(4).int(), bits(4).bfloat16()):
        assert bench.basket.hold(leave, other, "a moment") is None
    assert leave.allow(4, torch.int32, 16, 100, False, whole)
    assert leave.count == 2
    [other] = bench.hold(leave, bits(4).int())
    groups, odd, changed = bench.sweep()
    assert groups == {("moments", torch.float32): [held], ("moments", torch.int32): [other]}
    assert odd == changed == []


def test_where_any_dtype_may_wait_each_is_taken_by_itself():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    leave = bench.leave(4)

    single, double = bench.hold(leave, bits(4), bits(4).double())
    groups, odd, changed = bench.sweep()

    assert single.got is desk.pages[0]
    assert groups == {("moments", torch.float32): [], ("moments", torch.float64): [double]}
    assert odd == changed == []


def test_each_dtype_is_taken_by_itself():
    bench = Bench()
    single, double = bench.leave(4), bench.leave(4, dtype=torch.float64)
    held = [*bench.hold(single, bits(4)), *bench.hold(double, bits(4).double()), *bench.hold(single, bits(4))]
    groups, odd, changed = bench.sweep()
    assert groups == {("moments", torch.float32): [held[0], held[2]], ("moments", torch.float64): [held[1]]}
    assert odd == changed == []


def test_a_tensor_that_must_not_wait_takes_all_the_others_along():
    bench, desk = Bench(), Desk()
    bench.aim(desk)

    (first,) = bench.hold(bench.leave(4), bits(4))
    assert desk.values == []
    (second,) = bench.hold(bench.leave(2, now=True), bits(2))

    assert desk.values == [[0, 1, 2, 3], [0, 1]]
    assert first.tensor is second.tensor is None
    assert bench.rest == []


def test_no_more_waits_than_may_with_what_is_in_doubt():
    bench = Bench(most=64)
    leave = bench.leave(4)
    bench.basket.doubted = 16

    bench.hold(leave, *(bits(4) for _ in range(4)))

    ((groups, odd, changed),) = bench.rest
    assert groups == {("moments", torch.float32): bench.kept}
    assert odd == changed == []
    assert bench.basket.bytes == 0


# Ways -----------------------------------------------------------------------------------------------------------------


def test_all_that_waits_is_taken_in_one_launch_and_let_go_of():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    tensors = [bits(4), bits(1000)]
    gone = [weakref.ref(tensor) for tensor in tensors]

    first, second = bench.hold(bench.leave(4, 1000), *tensors)
    del tensors
    assert bench.basket.sweep() is None

    assert desk.values == [list(range(4)), list(range(1000))]
    assert desk.launches == [(0, 2, 3)]  # 8 tiles, of which each of 3 programs takes 3 at most
    assert (first.got, first.place, second.got, second.place) == (desk.page, 0, desk.page, 1)
    assert (second.shape, second.dtype) == (torch.Size([1000]), torch.float32)
    assert (desk.page.aboard, desk.page.over) == (2, False)
    assert not desk.lock.locked()
    assert [one() for one in gone] == [None, None]


def test_a_full_page_is_turned():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    leave = bench.leave(2)

    held = bench.hold(leave, *(torch.full((2,), float(at)) for at in range(2 * SLOTS + 1)))
    assert bench.basket.sweep() is None

    assert [(first, count) for first, count, _ in desk.launches] == [(0, SLOTS), (0, SLOTS), (0, 1)]
    assert desk.values == [[at, at] for at in range(2 * SLOTS + 1)]
    assert [(desk.pages.index(one.got), one.place) for one in held] == [divmod(at, SLOTS) for at in range(len(held))]


def test_a_page_that_others_use_too_is_filled_up():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    desk.turn()
    desk.page.aboard = SLOTS - 1

    first, second = bench.hold(bench.leave(2), bits(2), bits(2))
    bench.basket.sweep()

    assert [(desk.pages.index(one.got), one.place) for one in (first, second)] == [(0, SLOTS - 1), (1, 0)]


def test_what_there_is_no_room_for_is_left():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    desk.turn()
    desk.refuses = True
    leave = bench.leave(2)

    held = bench.hold(leave, *(bits(2) for _ in range(SLOTS + 1)))
    groups, _, _ = bench.sweep()

    assert groups == {("moments", torch.float32): held[SLOTS:]}
    assert held[SLOTS].got is None


def test_a_page_without_a_table_is_of_no_use():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    desk.turn()
    desk.page.table, desk.refuses = 0, True

    (held,) = bench.hold(bench.leave(2), bits(2))

    assert bench.sweep()[0] == {("moments", torch.float32): [held]}


def test_a_desk_that_somebody_else_uses_is_not_waited_for():
    bench, desk = Bench(), Desk()
    bench.aim(desk)

    (held,) = bench.hold(bench.leave(2), bits(2))
    with desk.lock:
        groups, _, _ = bench.sweep()

    assert groups == {("moments", torch.float32): [held]}
    assert desk.launches == []


def test_on_another_stream_nothing_is_launched():
    bench, desk = Bench(), Desk()
    bench.aim(desk)

    (held,) = bench.hold(bench.leave(2), bits(2))
    bench.stream = 7

    assert bench.sweep()[0] == {("moments", torch.float32): [held]}
    assert desk.launches == []


def test_where_the_stream_cannot_be_asked_for_all_is_left():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    (held,) = bench.hold(bench.leave(2), bits(2))

    bench.stream = "lost"

    assert bench.sweep()[0] == {("moments", torch.float32): [held]}


def test_a_launch_that_fails_leaves_what_it_was_for():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    desk.raises = RuntimeError("the driver says no")

    (held,) = bench.hold(bench.leave(2), bits(2))
    groups, _, _ = bench.sweep()

    assert groups == {("moments", torch.float32): [held]}
    assert held.got is None
    assert not desk.lock.locked()


def test_an_interrupt_in_a_launch_goes_on_and_leaves_nothing_behind():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    desk.raises = KeyboardInterrupt()

    (held,) = bench.hold(bench.leave(2), bits(2))
    with pytest.raises(KeyboardInterrupt):
        bench.basket.sweep()

    assert (held.tensor, held.got) == (None, None)
    assert not desk.lock.locked()
    assert bench.basket.sweep() is None


def test_an_interrupt_goes_on_wherever_it_comes():
    bench = Bench()
    calls, leave = Calls(bench), bench.leave(2)
    calls.after.value = leave
    bench.aim(Desk())
    bench.hold(leave, bits(2))

    bench.interrupted = True

    with pytest.raises(KeyboardInterrupt):
        bench.basket.hold(leave, bits(2), None)
    with pytest.raises(KeyboardInterrupt):
        calls.outer((), {}, bits(2))
    with pytest.raises(KeyboardInterrupt):
        bench.basket.sweep()


def test_a_new_way_replaces_the_one_of_its_kind_and_dtype():
    bench, old, new = Bench(), Desk(), Desk()
    bench.aim(old)
    bench.aim(new)
    gone = weakref.ref(old)
    del old

    bench.hold(bench.leave(2), bits(2))
    bench.sweep()

    assert gone() is None
    assert new.launches == [(0, 1, 1)]


def test_more_ways_than_there_is_room_for_replace_the_last():
    bench, desks = Bench(), [Desk() for _ in range(10)]
    for number, desk in enumerate(desks):
        bench.aim(desk, kind=f"kind {number}")
        bench.hold(bench.leave(2, kind=f"kind {number}"), bits(2))

    left, _, _ = bench.sweep()

    assert [bool(desk.launches) for desk in desks] == [True] * 7 + [False] * 2 + [True]
    assert [kind for (kind, _), group in left.items() if group] == ["kind 7", "kind 8"]


def test_without_ways_all_is_left():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    bench.basket.aim(None)

    (held,) = bench.hold(bench.leave(2), bits(2))

    assert bench.sweep()[0] == {("moments", torch.float32): [held]}
    assert sys.getrefcount(desk) == 2


def together(take):
    return gates.Way("moments", torch.float32, None, None, take, None, 0, 0, 0)


def test_a_way_without_a_desk_is_given_all_of_them():
    bench, given = Bench(), []

    def take(held):
        given.append(list(held))
        for place, one in enumerate(held):
            one.got, one.place = "taken", place

    bench.basket.aim(together(take))
    held = bench.hold(bench.leave(2), *(bits(2) for _ in range(5)))

    assert bench.basket.sweep() is None
    assert given == [held]
    assert [(one.got, one.place, one.tensor) for one in held] == [("taken", place, None) for place in range(5)]


def test_what_a_way_without_a_desk_does_not_take_is_left():
    bench = Bench()

    def take(held):
        held[0].got = "taken"
        raise RuntimeError("no room for more")

    bench.basket.aim(together(take))
    first, second = bench.hold(bench.leave(2), bits(2), bits(2))

    assert bench.sweep() == ({("moments", torch.float32): [second]}, [], [])
    assert first.got == "taken"


# Without a basket -----------------------------------------------------------------------------------------------------


def made(bench, *tensors):
    leave = bench.leave()
    return [bench.basket.make(leave, tensor) for tensor in tensors]


def test_what_is_only_made_is_sorted_and_entered_alike():
    bench, desk = Bench(), Desk()
    held = made(bench, bits(4), bits(6))
    desk.turn()

    assert gates.sorted([*held, "no tensor"], HERE) == ({("moments", torch.float32): held}, [], [])
    desk.page.aboard = 3
    assert desk.way().take(held[1:]) == 1

    assert desk.launches == [(3, 1, 1)]
    where, items, each = ENTRY.unpack_from(desk.page.memory, 3 * ENTRY.size)
    assert (where, items, each) == (held[1].tensor.data_ptr(), 6, 1)
    assert (held[0].got, held[1].got, held[1].place) == (None, desk.page, 3)


@pytest.mark.parametrize("target", [1 << 20, 1 << 40])
def test_copies_are_laid_one_after_the_other_wherever_and_found_after_their_entries(target):
    bench = Bench()
    tensors = [bits(4), bits(100)]
    held = made(bench, *tensors)
    gates.sorted(held, HERE)

    entries, size, largest = gates.room_for(held, 4)
    memory = ctypes.create_string_buffer(entries + size)
    address, flight = ctypes.addressof(memory), object()

    assert (entries, size, largest) == (64, 64 + 448, 400)  # all in units of 64
    assert gates.ferried(held, 4, address, target, flight) == 400
    found = [ENTRY.unpack_from(memory, 24 * at) for at in range(2)]
    assert found == [(tensors[0].data_ptr(), target, 16), (tensors[1].data_ptr(), target + 64, 400)]
    assert [(one.got, one.place) for one in held] == [(flight, 64), (flight, 128)]


def crossed(asked, refuses=None, *, arguments=(4, 3)):
    """Go through a berth with a driver that notes what it is asked, and refuses one thing; return what was launched."""

    def note(name, *numbers):
        asked.append((name, *numbers))
        return 700 if name == refuses else 0

    word = ctypes.c_uint64
    follow = ctypes.CFUNCTYPE(ctypes.c_int, word, word, ctypes.c_uint)(lambda *numbers: note("follow", *numbers))
    mark = ctypes.CFUNCTYPE(ctypes.c_int, word, word)(lambda *numbers: note("mark", *numbers))
    start = ctypes.CFUNCTYPE(ctypes.c_int, *[word] * 4)(lambda config, function, given, extra: note(KERNELS[function]))
    where = [ctypes.cast(one, ctypes.c_void_p).value for one in (start, follow, mark)]
    rooms = [(ctypes.c_int64 * (count + 1))() for count in arguments]
    refused = []
    fill, carry = (
        gates.Launch(
            where[0], 0, at, 0, ctypes.addressof(room), len(room) - 1, lambda *told: refused.append(told), room
        )
        for at, room in enumerate(rooms)
    )
    gates.fly_on(fill, 5, 3, 12, carry, 1000, 128, (*where[1:], 1, 2, 11, 12, 2000, 16))
    return [list(room) for room in rooms], refused


KERNELS = ("fill", "carry")


def test_a_berth_is_filled_when_it_is_empty_and_emptied_when_it_is_filled():
    asked = []
    rooms, refused = crossed(asked)
    assert asked == [
        ("follow", 1, 12, 0), ("fill",), ("mark", 11, 1), ("follow", 2, 11, 0), ("carry",), ("mark", 12, 2),
    ]  # fmt: skip
    assert rooms == [[0, 0, 5, 3, 12], [2000, 1000, 2, 16]]  # 128 bytes are two lines
    assert refused == []


@pytest.mark.parametrize(("refuses", "steps"), [("follow", 1), ("mark", 3)])
def test_nothing_goes_on_from_where_the_driver_refused(refuses, steps):
    asked = []
    with pytest.raises(RuntimeError, match="refused to go on beside the model: CUDA error 700"):
        crossed(asked, refuses)
    assert len(asked) == steps


@pytest.mark.parametrize(("refuses", "programs"), [("fill", 12), ("carry", 16)])
def test_a_launch_that_is_refused_is_told_as_any_other(refuses, programs):
    assert crossed([], refuses)[1] == [(700, programs)]


@pytest.mark.parametrize("arguments", [(3, 3), (4, 4)])
def test_the_launch_of_another_kernel_goes_through_no_berth(arguments):
    asked = []
    with pytest.raises(TypeError, match=r"a launch takes \d numbers, and how many programs"):
        crossed(asked, arguments=arguments)
    assert asked == []


# Gates ----------------------------------------------------------------------------------------------------------------


class Hook:
    """What stands behind a gate: it notes what was left to it."""

    def __init__(self):
        self.left = []
        self.errors = []

    def __call__(self, *given, **named):
        self.left.append((*given, *named.items()))

    def failed(self, error):
        self.errors.append(error)


class Both:
    """Two gates of which one is asked."""

    def __init__(self, *both):
        self.__dict__["both"] = both

    def __setattr__(self, name, value):
        for gate in self.both:
            setattr(gate, name, value)


class Calls:
    """A module's call inside of another one's, with a gate before and after it."""

    def __init__(self, bench):
        self.local = SimpleNamespace(calls=[])
        self.module, self.name = object(), "inner"
        self.bench = bench
        self.hook = Hook()
        self.before, self.finish, self.end = map(self.gate, ("begin", "finish", "end"))
        self.after = Both(self.finish, self.end)
        self.before.away = self.after.away = 1
        self.under_way = None

    def gate(self, kind):
        return gates.Gate(self.bench.basket, kind, self.hook, self.module, self.name, self.local)

    def outer(self, args, kwargs, value):
        """Return whether the beginning and the end have passed."""
        self.local.calls[:] = [("outer", self.bench.step, 0, sys._getframe(), None)]
        return self.inner(args, kwargs, value)

    def inner(self, args, kwargs, value):
        self.hook.left.clear()
        assert self.before(self.module, args, kwargs) is None
        began = not self.hook.left
        self.under_way = list(self.local.calls[1:])
        self.hook.left.clear()
        assert (self.finish if self.under_way else self.end)(self.module, args, kwargs, value) is None
        return began, not self.hook.left


def test_the_tensors_of_a_usual_call_wait_without_a_word_of_python():
    bench = Bench()
    calls, leave = Calls(bench), bench.leave(4)
    calls.before.args, calls.before.kwargs = (tuple, (), (leave, int)), (dict, ("mask",), (leave,))
    calls.after.value = (list, (), (leave,))

    for number in range(3):
        given, mask, value = bits(4), bits(4), bits(4)
        assert calls.outer((given, 7), {"mask": mask}, [value]) == (True, True)
        ((name, step, call, frame, special),) = calls.under_way
        assert (name, step, call, special) == ("inner", bench.step, number, None)
        assert frame.f_code is Calls.inner.__code__
        assert len(calls.local.calls) == 1
        seen = [one.tensor for one in bench.kept[3 * number :]]
        assert all(one is other for one, other in zip(seen, (given, mask, value), strict=True))
        assert {one.moment for one in bench.kept[3 * number :]} == {f"call {number}"}


def test_a_call_that_is_only_seen_to_end_is_counted():
    bench = Bench()
    calls = Calls(bench)
    calls.after.value = bench.leave(4)

    assert [calls.outer((), {}, bits(4)) for _ in range(3)] == [(False, True)] * 3
    assert [one.moment for one in bench.kept] == ["call 0", "call 1", "call 2"]


@pytest.mark.parametrize("alone", [True, False])
def test_the_hook_goes_on_counting_where_the_gate_has_stopped(alone):
    bench = Bench()
    bench.begin(2, alone=alone)
    calls = Calls(bench)
    calls.after.value = bench.leave(4)

    for _ in range(3):
        assert calls.outer((), {}, bits(4)) == (False, True)
    assert calls.outer((), {}, bits(5)) == (False, False)
    assert next(bench.step.calls["inner"]) == 3
    assert calls.outer((), {}, bits(4)) == (False, True)

    assert [one.moment for one in bench.kept] == ["call 0", "call 1", "call 2", "call 4"]


def test_each_step_is_counted_from_nought_unless_it_has_several_forwards():
    bench = Bench()
    calls = Calls(bench)
    calls.after.value = bench.leave(4)

    for number, alone in ((2, True), (3, True), (4, False)):
        bench.begin(number, alone=alone)
        calls.outer((), {}, bits(4))
    step = bench.step
    bench.basket.open(step, 5, 0, False)  # another forward of the same step
    calls.outer((), {}, bits(4))

    assert [one.moment for one in bench.kept] == ["call 0", "call 0", "call 0", "call 1"]


UNUSUAL = {
    "another size": ((bits(5),), {"mask": bits(4)}),
    "another type": ((torch.nn.Parameter(bits(4)),), {"mask": bits(4)}),
    "one more": ((bits(4), bits(4)), {"mask": bits(4)}),
    "another key": ((bits(4),), {"other": bits(4)}),
    "no key": ((bits(4),), {}),
    "a list": ([bits(4)], {"mask": bits(4)}),
}


@pytest.mark.parametrize(("args", "kwargs"), UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_call_is_left_to_the_hook_and_changes_nothing(args, kwargs):
    bench = Bench()
    calls, leave = Calls(bench), bench.leave(4)
    calls.before.args, calls.before.kwargs = (tuple, (), (leave,)), (dict, ("mask",), (leave,))

    assert calls.outer(args, kwargs, None) == (False, False)
    assert bench.kept == []
    assert bench.step.calls == {}
    assert len(calls.local.calls) == 1


def test_calls_that_nothing_is_wanted_of_pass():
    bench = Bench()
    calls = Calls(bench)
    calls.before.blind = calls.after.blind = True

    assert calls.outer((bits(4),), {}, bits(4)) == (True, True)
    assert bench.kept == []


def test_nothing_passes_where_somebody_changes_what_torch_does():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError("it was noticed")

    bench = Bench()
    calls, value = Calls(bench), bits(4)
    calls.after.value = bench.leave(4)

    with Mode():
        assert calls.outer((), {}, value) == (False, False)


def test_nothing_passes_a_gate_that_is_closed():
    bench = Bench()
    calls = Calls(bench)
    calls.after.value = bench.leave(4)
    assert calls.outer((), {}, bits(4)) == (False, True)

    calls.end.close()

    value = bits(4)
    assert calls.outer((1,), {"two": 2}, value) == (False, False)
    assert calls.hook.left == [(calls.module, (1,), {"two": 2}, value)]
    assert next(bench.step.calls["inner"]) == 1  # the one that has passed was counted


def test_a_hook_that_was_just_taken_off_is_told_as_little_as_torch_tells():
    calls = Calls(Bench())
    calls.before(calls.module, ())
    calls.end(calls.module, (), "value")
    calls.finish(module=calls.module)
    assert calls.hook.left == [(calls.module, ()), (calls.module, (), "value"), (("module", calls.module),)]


def test_what_a_hook_raises_or_returns_is_the_callers():
    class Raising(Hook):
        def __call__(self, *given):
            raise KeyError(*given)

    calls = Calls(Bench())
    calls.hook = Raising()
    with pytest.raises(KeyError, match="hello"):
        calls.gate("end")("hello")
    calls.hook = len
    assert calls.gate("end")("hello") == 5


def test_there_is_no_other_kind_of_gate():
    with pytest.raises(ValueError, match="there is no gate called middle"):
        Calls(Bench()).gate("middle")


def test_a_gate_is_copied_and_pickled_as_its_hook_is():
    calls = Calls(Bench())
    calls.hook.__class__ = Silent
    assert copy.deepcopy(calls.end) == "a copy"
    assert pickle.loads(pickle.dumps(calls.end)) == []


class Silent(Hook):
    """A hook that becomes something else in a copy."""

    def __deepcopy__(self, memo):
        return "a copy"

    def __reduce__(self):
        return list, ()


def test_a_compiler_reads_the_hook_through_the_gate():
    class Compiled(Hook):
        def __call__(self, module, args, kwargs, value):
            if not torch.compiler.is_dynamo_compiling():
                self.left.append(value)

    calls = Calls(Bench())
    calls.hook = Compiled()
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(calls.gate("end"), with_kwargs=True, always_call=True)
    model(torch.ones(2))
    assert len(calls.hook.left) == 1

    torch.compile(model, fullgraph=True, backend="eager")(torch.ones(2))
    assert len(calls.hook.left) == 1


def test_an_interrupt_is_nobodys_to_forget():
    bench = Bench()
    calls = Calls(bench)
    calls.after.value = bench.leave(4)
    bench.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        calls.outer((), {}, bits(4))
    assert calls.hook.errors == []


def test_a_call_from_elsewhere_is_left_to_the_hook():
    bench = Bench()
    calls = Calls(bench)
    calls.after.value = bench.leave(4)
    calls.after.away = 0

    assert calls.outer((), {}, bits(4)) == (False, False)
    calls.after.away = 10**6
    assert calls.outer((), {}, bits(4)) == (False, False)


def test_what_keeps_the_records_is_heard_when_it_fails():
    bench = Bench()
    basket = gates.Basket(HERE, lambda held: 1 / 0, bench.take, MB, lambda place: 0, lambda: False)
    basket.open(bench.step, 1, 0, True)
    bench.basket = basket
    calls, leave = Calls(bench), bench.leave(4)
    calls.after.value = leave

    calls.outer((), {}, bits(4))
    assert [type(error) for error in calls.hook.errors] == [ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        basket.hold(leave, bits(4), None)


def test_a_moment_that_the_step_does_not_keep_lives_as_long_as_it_is_needed():
    class Forgetful(Step):
        def at(self, call):
            return SimpleNamespace(call=call)

    def ask():
        bench = Bench()
        bench.step = Forgetful(bench.requests)
        bench.basket.open(bench.step, 1, 0, True)
        calls = Calls(bench)
        calls.after.value = bench.leave(4)
        assert [calls.outer((), {}, bits(4)) for _ in range(3)] == [(False, True)] * 3
        assert [one.moment.call for one in bench.kept] == [0, 1, 2]

    assert_lives_through(ask)


@pytest.mark.parametrize(
    "expected",
    [None, 3, (), (tuple,), (tuple, None, 5), (tuple, (), [int]), (dict, (), (int,)), (dict, None, (int,))],
    ids=str,
)
def test_nothing_is_like_an_expectation_that_makes_no_sense(expected):
    def ask():
        calls = Calls(Bench())
        calls.after.value = expected
        for value in (bits(4), (1,), [1], {"a": 1}):
            assert calls.outer((), {}, value) == (False, False)

    assert_lives_through(ask)


# What may go wrong ----------------------------------------------------------------------------------------------------


def mistakes():
    bench = Bench()
    basket, leave, desk = bench.basket, bench.leave(2), Desk()
    (held,) = made(bench, bits(2))
    return {
        "a basket of nothing": (gates.Basket,),
        "a basket in a place without a number": (gates.Basket, "cuda", print, print, 1, print, print),
        "a pass of no basket": (gates.Pass, None, "a point", "moments", None, {}),
        "a gate of no basket": (gates.Gate, object(), "end", print, object(), "a module", None),
        "a way of no kind": (gates.Way, None, torch.float32, None, desk, print, print, 1, 1, 1),
        "a way without slots": (gates.Way, "moments", torch.float32, None, desk, print, print, None, 1, 1),
        "what waits": (gates.Held,),
        "opened without a number": (basket.open, bench.step, None, 0, True),
        "opened on no stream": (basket.open, bench.step, 1, None, True),
        "held by no pass": (basket.hold, None, bits(2), None),
        "made by no pass": (basket.make, None, bits(2)),
        "aimed at nothing": (basket.aim, "moments"),
        "allowed so many": (leave.allow, "many", 8, 1, False),
        "allowed too little": (leave.allow, 2, 8),
        "sorted without a list": (gates.sorted, (held,), HERE),
        "sorted nowhere": (gates.sorted, [held], None),
        "taken without a list": (desk.way().take, (held,)),
        "room for no list": (gates.room_for, None, 4),
        "released without a list": (gates.release, held),
    }


@pytest.mark.parametrize("mistake", [] if gates is None else mistakes())
def test_a_mistake_is_a_type_error(mistake):
    function, *given = mistakes()[mistake]
    with pytest.raises(TypeError):
        function(*given)


def test_a_step_without_what_a_step_has_is_not_begun():
    bench = Bench()
    leave = bench.leave(2)

    with pytest.raises(AttributeError):
        bench.basket.open(object(), 1, 0, True)
    with pytest.raises(TypeError, match="dict"):
        bench.basket.open(SimpleNamespace(calls={}, moments=[], requests={}), 1, 0, True)

    assert bench.basket.step is None
    assert bench.basket.hold(leave, bits(2), None) is None


def test_what_does_not_wait_cannot_be_taken():
    bench = Bench()
    (held,) = made(bench, bits(2))
    gates.release([held])

    for given in ([held], [None], ["no tensor"]):
        with pytest.raises(ValueError, match="not all of these wait"):
            gates.room_for(given, 4)
        with pytest.raises(ValueError, match="not all of these wait"):
            Desk().way().take(given)


def test_what_has_no_items_takes_a_program_like_any_other():
    def ask():
        desk = Desk()
        assert desk.way().take(made(Bench(), bits(0))) == 1
        assert desk.launches == [(0, 1, 1)]

    assert_lives_through(ask)


def test_a_tile_of_nothing_is_refused():
    def ask():
        desk = Desk()
        for tile, most in ((0, 0), (0, 1), (1, 0)):
            with pytest.raises(ValueError, match="tile"):
                gates.Way("moments", torch.float32, desk.lock, desk, desk.launch, desk.turn, SLOTS, tile, most)

    assert_lives_through(ask)


def test_what_was_taken_before_may_change_the_list_when_it_is_let_go_of():
    class Clearing:
        def __del__(self):
            held.clear()

    def ask():
        desk = Desk()
        held[:] = made(Bench(), *(bits(2) for _ in range(SLOTS)))
        gates.sorted(held, HERE)
        held[0].got = Clearing()
        assert desk.way().take(held) == SLOTS
        assert desk.launches == [(0, SLOTS, 1)]

    held = []
    assert_lives_through(ask)


HALF_MADE = {
    "a basket": lambda bench: gates.Basket.__new__(gates.Basket).sweep(),
    "a gate": lambda bench: gates.Gate.__new__(gates.Gate).close(),
    "a pass": lambda bench: gates.sorted([bench.basket.make(gates.Pass.__new__(gates.Pass), bits(2))], HERE),
    "a way": lambda bench: bench.basket.aim(gates.Way.__new__(gates.Way)),
}


@pytest.mark.parametrize("use", HALF_MADE.values(), ids=HALF_MADE)
def test_nothing_can_be_half_made(use):
    def ask():
        bench = Bench()
        with pytest.raises(TypeError):
            use(bench)

    assert_lives_through(ask)


def test_a_basket_that_is_made_again_still_knows_what_waits_or_forgets_it():
    def ask():
        bench = Bench()
        leave = bench.leave(2)
        for _ in range(20):
            bench.hold(leave, bits(2))
            bench.basket.__init__(HERE, bench.kept.append, bench.take, MB, lambda place: 0, lambda: False)
            bench.kept.clear()
            gc.collect()
        bench.hold(leave, bits(2))
        bench.sweep()

    assert_lives_through(ask)


def test_what_is_forgotten_may_sweep_itself():
    class Sweeping:
        def __del__(self):
            seen.append(bench.basket.sweep())

    def ask():
        leave = bench.leave(2)
        for _ in range(20):
            (held,) = bench.hold(leave, bits(2))
            bench.sweep()
            held.got = Sweeping()
            bench.kept.clear()
            (other,) = bench.hold(leave, bits(2))
            del held  # the basket alone knows it now, and forgets it when it is swept
            left = bench.basket.sweep()
            assert [one[0] for one in (*seen, left) if one is not None] == [[other]]
            seen.clear()

    bench, seen = Bench(), []
    assert_lives_through(ask)


def test_a_step_may_end_while_a_tensor_is_made_to_wait():
    def ask():
        bench = Bench()
        bench.current = lambda place: bench.basket.shut() or 0
        bench.basket = gates.Basket(HERE, bench.kept.append, bench.take, MB, bench.current, lambda: False)
        bench.basket.open(bench.step, 1, 0, True)
        calls = Calls(bench)
        calls.after.value = bench.leave(4)
        assert calls.outer((), {}, bits(4)) == (False, False)
        assert bench.basket.step is None
        assert bench.kept == []

    assert_lives_through(ask)


@pytest.mark.parametrize("kind", ["begin", "end"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("objects", range(14))
def test_the_collector_may_end_the_step_while_a_tensor_is_made_to_wait(kind, alone, objects):
    """A recording in a generator that nobody has any more is closed wherever the collector happens to run."""

    class Closing:
        def __del__(self):
            bench.basket.shut()

    def current(place):
        cycle = Closing()
        cycle.itself = cycle
        del cycle
        gc.set_threshold(objects + gc.get_count()[0] + 1)
        gc.enable()
        return 0

    def ask():
        gc.disable()
        kept = [(i, i, i, i, object()) for i in range(5000)]  # so that no tuple is made without asking for memory
        bench.basket = gates.Basket(HERE, bench.kept.append, bench.take, MB, current, lambda: False)
        bench.basket.open(bench.step, 1, 0, alone)
        calls = Calls(bench)
        if kind == "begin":
            calls.before.args, calls.before.kwargs = (tuple, (), (bench.leave(4),)), (dict, (), ())
        else:
            calls.after.value = bench.leave(4)
        calls.outer((bits(4),), {}, bits(4))  # whether it passes depends on when the collector runs
        gc.disable()
        bench.sweep()
        del kept

    bench = Bench()
    assert_lives_through(ask)


# What is left behind --------------------------------------------------------------------------------------------------


def test_a_tensor_is_gone_when_it_was_taken_though_its_record_stays():
    bench = Bench()
    leave, tensor = bench.leave(4), bits(4)
    gone = weakref.ref(tensor)

    bench.hold(leave, tensor, tensor)
    del tensor
    assert gone() is not None
    bench.sweep()

    assert gone() is None
    assert len(bench.kept) == 2


def test_everything_is_gone_with_the_last_that_knows_it():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    calls, leave, tensor = Calls(bench), bench.leave(4), bits(4)
    calls.after.value = leave
    calls.outer((), {}, tensor)
    bench.hold(leave, bits(4))
    bench.sweep()
    bench.hold(leave, tensor)
    gone = [weakref.ref(one) for one in (bench, bench.step, desk, desk.page, calls, leave.standing, tensor)]

    del bench, desk, calls, leave, tensor
    gc.collect()

    assert [one() for one in gone] == [None] * 7


def test_what_is_asked_ten_thousand_times_takes_no_more_memory_than_asked_once():
    bench, desk = Bench(), Desk()
    bench.aim(desk)
    desk.launch = lambda *given: None
    bench.aim(desk)
    calls, leave, odd = Calls(bench), bench.leave(2, 4), bits(8)[::2]
    calls.before.args, calls.before.kwargs = (tuple, (), (leave,)), (dict, ("mask",), (leave,))
    calls.after.value = (list, (), (leave,))
    tensor, other, changed = bits(4), bits(2), bits(4)
    broken = Desk()
    broken.raises = RuntimeError("the driver says no")

    def ask(number):
        bench.begin(number, alone=number % 2 == 0)
        assert calls.outer((tensor,), {"mask": other}, [tensor]) == (True, True)
        assert calls.outer((tensor,), {"mask": 3}, [tensor])[0] is False
        bench.hold(leave, odd, changed)
        changed.add_(1)
        assert bench.basket.hold(leave, bits(3), None) is None
        bench.sweep()
        bench.hold(leave, tensor, other)
        bench.sweep()
        bench.aim(broken)
        bench.hold(leave, other)
        bench.sweep()
        bench.aim(desk)
        gates.sorted(made(bench, tensor), HERE)
        with pytest.raises(TypeError):
            bench.basket.aim(3)
        bench.kept.clear()
        desk.pages.clear()
        broken.pages.clear()
        if desk.page is not None and desk.page.aboard == SLOTS:
            desk.page = None
        broken.page = None

    def blocks(rounds):
        for number in range(rounds):
            ask(1 + number % 90)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks(1000)
    assert blocks(10_000) - before < 500
