"""Small tensors are held back to the end of a step where that gives the same values, and nowhere else.

The device is played by clones: what is taken is a copy made at the moment of taking.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from layerscope import native
from layerscope.points import Moment, Point
from layerscope.recorder import gathering
from layerscope.recorder.cargo import Arrival, Lost
from layerscope.recorder.gathering import Gathering, values_of
from layerscope.recorder.recording import _Step
from layerscope.recorder.taps import Request, Wish

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"no gates: {native.why_not()}")


class Copy(Arrival):
    """What was taken of a tensor, there at once."""

    def __init__(self, tensor):
        super().__init__(tensor.dtype, tensor.shape, None)
        self.host = tensor.detach().clone()


class Batch:
    """What was taken together."""

    def __init__(self, tensors):
        self.copies = [Copy(tensor) for tensor in tensors]

    def part(self, place, dtype, shape):
        return self.copies[place]


class Device:
    """Plays the model's hooks, and takes together what is held back."""

    def __init__(self, **points):
        self.requests = {name: Request(Point(name), wish) for name, wish in points.items()}
        self.batches = []
        self.doubtful = []
        self.held = []
        self.taken = {}  # bytes of each device, by statistics
        self.gathering = Gathering(
            native.load(),
            HERE,
            take_all=self.take_all,
            alone=lambda only, tensor: Copy(tensor),
            keep=self.held.append,
            doubtful=lambda point: self.doubtful.append(point.name),
            taken=self.taken,
        )
        self.kept = []
        self.due = {}

    def take_all(self, only, dtype, held):
        self.batches.append((only, len(held)))
        batch = Batch([one.tensor for one in held])
        for number, one in enumerate(held):
            one.got, one.place = batch, number

    def see(self, name, tensor):
        """What a recording does in a hook; whether the tensor waits for the end of the step."""
        request = self.requests[name]
        held = self.gathering.hold(request, tensor, Moment())
        if held is None:
            got = Copy(tensor)
            self.gathering.doubt(request, request.only, tensor, got)
        else:
            assert self.held[-1] is held
            got = partial(values_of, held)
        self.kept.append((name, got, tensor.clone()))
        basket = self.gathering.basket
        basket.make_room()
        assert basket.bytes + basket.doubted <= max(basket.most, 0)
        return held is not None and (held.twin or held).tensor is not None

    def begin(self):
        self.gathering.begin(_Step(Moment(), requests=self.due))

    def step(self, forward):
        """Run a step; return what each hook said."""
        self.begin()
        said = forward()
        self.gathering.end()
        return said

    def assert_kept(self):
        for name, got, was in self.kept:
            assert torch.equal(got(), was), name


HERE = -1  # what torch calls the host
SUMMARY, TENSOR = Wish(summary=True, level="full"), Wish(tensor=True)


class CUDA:
    """What is asked of CUDA."""

    stream = 0
    captures = False


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    monkeypatch.setattr(gathering, "current_stream", lambda place: CUDA.stream)
    monkeypatch.setattr(gathering, "is_capturing", lambda: CUDA.captures)
    monkeypatch.setattr(CUDA, "stream", 0)
    monkeypatch.setattr(CUDA, "captures", False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: f"stream of {place}")


@pytest.mark.parametrize("wish", [SUMMARY, TENSOR], ids=["summary", "tensor"])
def test_a_point_is_held_back_from_the_step_after_its_trial(wish):
    device = Device(a=wish, b=wish)

    def forward():
        return [device.see("a", torch.randn(8)), device.see("b", torch.randn(9))]

    said = [device.step(forward) for _ in range(4)]
    assert said == [[False, False], [True, True], [True, True], [True, True]]
    device.assert_kept()
    only = device.requests["a"].only
    assert device.batches == [(only, 2)] * 4  # the first is the trial's


def test_a_tensor_that_two_points_see_is_taken_once():
    device = Device(a=SUMMARY, b=SUMMARY)

    def forward():
        x = torch.randn(8)
        return [device.see("a", x), device.see("b", x)]

    for _ in range(3):
        device.step(forward)
    assert device.batches == [("full", 2), ("full", 1), ("full", 1)]  # the first is the trial's
    device.assert_kept()


def test_what_is_changed_in_place_in_its_step_is_never_held_back():
    device = Device(a=SUMMARY)

    def forward():
        x = torch.randn(8)
        held = device.see("a", x)
        x.add_(1)
        return held

    assert [device.step(forward) for _ in range(4)] == [False] * 4
    device.assert_kept()
    assert device.requests["a"].standing.never


def test_a_point_of_several_calls_is_held_back_only_if_all_of_them_may_be():
    device = Device(a=SUMMARY)

    def forward():
        first = torch.randn(8)
        said = [device.see("a", first), device.see("a", torch.randn(8))]
        first.data.add_(1)
        return said

    assert [device.step(forward) for _ in range(4)] == [[False, False]] * 4
    device.assert_kept()


def test_what_is_changed_behind_the_back_of_torch_is_never_held_back():
    device = Device(a=SUMMARY)

    def forward():
        x = torch.randn(8)
        held = device.see("a", x)
        x.data.add_(1)  # which counts no change
        return held

    assert [device.step(forward) for _ in range(4)] == [False] * 4
    device.assert_kept()


def test_a_first_change_after_the_trial_loses_that_record_and_says_so():
    device = Device(a=SUMMARY)

    def forward(*, change):
        x = torch.randn(8)
        held = device.see("a", x)
        x.mul_(2) if change else None
        return held

    said = [device.step(lambda change=change: forward(change=change)) for change in (0, 0, 1, 1, 0)]
    assert said == [False, True, True, False, False]
    lost = device.kept.pop(2)[1]
    with pytest.raises(Lost, match="changed in place between its hook and the end of the step"):
        lost()
    device.assert_kept()


def test_another_size_is_tried_for_itself_and_not_for_ever():
    device = Device(a=SUMMARY)
    sizes = [8, 8, 5, 5, 8, 8]
    assert [device.step(lambda size=size: device.see("a", torch.randn(size))) for size in sizes] == [
        False, True, False, True, True, True,
    ]  # fmt: skip
    for size in range(20, 60):
        device.step(lambda size=size: device.see("a", torch.randn(size)))
    assert len(device.requests["a"].standing.proofs) == 8
    said = [device.step(lambda: device.see("a", torch.randn(8))) for _ in range(2)]
    assert said == [False, True]  # the first was tried again: 32 steps have passed
    device.assert_kept()


def test_large_tensors_are_taken_at_once_and_many_small_ones_in_several_goes(monkeypatch):
    monkeypatch.setattr(gathering, "_MOST", 100 * 4)
    monkeypatch.setattr(gathering, "_LARGEST", 50 * 4)
    device = Device(large=SUMMARY, **{f"p{i}": SUMMARY for i in range(6)})

    def forward():
        return [device.see("large", torch.randn(51)), *(device.see(f"p{i}", torch.randn(40)) for i in range(6))]

    said = [device.step(forward) for _ in range(5)]
    assert [row[0] for row in said] == [False] * 5
    assert said[-1][1:] == [True, True, False] * 2  # the third has all of them taken
    assert [count for _, count in device.batches[-2:]] == [3, 3]  # as soon as more than 100 items are held
    device.assert_kept()


def test_what_several_points_see_is_taken_once_though_it_must_not_wait(monkeypatch):
    monkeypatch.setattr(gathering, "_LARGEST", 50 * 4)
    device = Device(norm=SUMMARY, q=SUMMARY, query=SUMMARY, k=SUMMARY, key=SUMMARY)

    def forward():
        x, query, key = torch.randn(51), torch.randn(51), torch.randn(51)
        for name, tensor in (("norm", x), ("q", x), ("query", query), ("k", x), ("key", key)):
            device.see(name, tensor)

    for _ in range(3):
        device.step(forward)
    assert device.batches == [("full", 1)] * 6  # three tensors, from the second step on
    device.assert_kept()


def test_a_huge_tensor_goes_its_hooks_own_way_whether_it_may_wait_or_not(monkeypatch):
    monkeypatch.setattr(gathering, "_LARGEST", 50 * 4)
    monkeypatch.setattr(gathering, "_HUGE", 60 * 4)
    device = Device(huge=SUMMARY, restless=SUMMARY)

    def forward():
        x, y = torch.randn(61), torch.randn(40)
        device.see("huge", x)
        device.see("restless", y)
        y.add_(1)

    for _ in range(4):
        device.step(forward)
    assert [one.pass_.point.name for one in device.held] == ["restless"] * 2
    device.assert_kept()


def test_gradients_operations_and_inference_tensors_are_taken_at_once():
    device = Device(a=SUMMARY)
    assert not Request(Point("a", "grad_output"), SUMMARY).gathers
    assert not Request(Point("op:aten.mm", op=True), SUMMARY).gathers
    with torch.inference_mode():
        assert [device.step(lambda: device.see("a", torch.randn(8))) for _ in range(3)] == [False] * 3
    assert [device.step(lambda: device.see("a", torch.randn(8))) for _ in range(2)] == [False, True]
    with torch.inference_mode():
        assert device.step(lambda: device.see("a", torch.randn(8))) is False
    device.assert_kept()


def test_another_stream_and_another_thread_and_a_capture_are_taken_at_once(monkeypatch):
    device = Device(a=SUMMARY)
    monkeypatch.setattr(CUDA, "stream", 5)
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))

    def elsewhere():
        with monkeypatch.context() as patched:
            patched.setattr(CUDA, "stream", 8)
            return device.see("a", torch.randn(8))

    assert device.step(elsewhere) is False
    said = []
    thread = threading.Thread(target=lambda: said.append(device.step(lambda: device.see("a", torch.randn(8)))))
    thread.start()
    thread.join()
    assert said == [False]
    monkeypatch.setattr(CUDA, "captures", True)
    assert device.step(lambda: device.see("a", torch.randn(8))) is False
    device.assert_kept()


def test_a_capture_that_begins_in_the_middle_of_a_step_is_taken_at_once(monkeypatch):
    device = Device(a=SUMMARY)
    monkeypatch.setattr(CUDA, "stream", 5)
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))

    def forward():
        monkeypatch.setattr(CUDA, "captures", True)
        return device.see("a", torch.randn(8))

    assert device.step(forward) is False


def test_what_is_taken_later_is_taken_on_the_stream_of_its_step(monkeypatch):
    device, used = Device(a=SUMMARY), []
    monkeypatch.setattr(CUDA, "stream", 3)
    monkeypatch.setattr(torch.cuda, "stream", lambda origin: used.append(origin) or nullcontext())
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))
    assert used == []

    def forward():
        held = device.see("a", torch.randn(8))
        CUDA.stream = 4
        return held

    assert device.step(forward)
    assert used == [f"stream of {HERE}"]


def test_memory_that_was_given_back_is_not_read():
    device = Device(a=SUMMARY)

    def forward(*, change):
        x = torch.randn(8)
        said = device.see("a", x)
        if change:
            x.untyped_storage().resize_(0)  # which does not count as a change
        return said

    for change in (False, False):
        device.step(lambda change=change: forward(change=change))
    device.assert_kept()
    assert device.step(lambda: forward(change=True))
    with pytest.raises(Lost):
        device.kept[-1][1]()


def test_a_point_is_tried_again_and_again_and_said_to_be_in_doubt_if_it_has_changed(monkeypatch):
    device = Device(a=SUMMARY)

    def forward(*, change):
        x = torch.randn(8)
        held = device.see("a", x)
        x.data.add_(1) if change else None
        return held

    said = [device.step(lambda: forward(change=False)) for _ in range(1600)]
    tried = [number for number, held in enumerate(said) if not held]
    assert tried == [0, 33, 98, 227, 484, 997, 1510]  # after 32, 64, 128, 256, 512 and 512 steps
    agenda = device.gathering._agenda
    assert len(agenda.points) == len(agenda.bytes) == 1
    assert device.doubtful == []
    device.assert_kept()
    said = [device.step(lambda: forward(change=True)) for _ in range(500)]
    assert said.count(True) == 1510 + 513 - 1600  # until it was tried
    assert device.doubtful == ["a"]
    assert said[-70:] == [False] * 70


@pytest.mark.parametrize("calls", [2, 3, 5, 7])
def test_a_point_of_several_calls_is_tried_again_with_all_of_them(calls):
    device = Device(a=SUMMARY)

    def forward(*, change):
        tensors = [torch.randn(8) for _ in range(calls)]
        said = [device.see("a", tensor) for tensor in tensors]
        tensors[0].data.add_(1) if change else None
        return said

    for step in range(100):
        said = device.step(lambda step=step: forward(change=step > 1))
        assert len(set(said)) == 1
    assert device.doubtful == ["a"]
    assert said == [False] * calls


def test_a_view_counts_as_what_it_keeps_from_being_used_again():
    device = Device(a=SUMMARY)
    whole = torch.zeros(2 << 20)
    assert [device.step(lambda: device.see("a", whole[:8])) for _ in range(3)] == [False] * 3


def test_a_point_with_a_call_that_cannot_be_tried_is_not_held_back():
    device = Device(a=SUMMARY)

    def forward():
        whole = torch.randn(32)
        said = [device.see("a", whole[:8]), device.see("a", whole[9:17])]  # the second lies on no border of 16 bytes
        whole.data.add_(1)
        return said

    assert [device.step(forward) for _ in range(3)] == [[False, False]] * 3
    device.assert_kept()


@pytest.mark.parametrize(("points", "few"), [(16, 1), (127, 1), (128, 2), (300, 3)])
def test_few_points_are_tried_again_in_a_step_and_each_of_them_after_a_while(points, few):
    names = [f"p{i}" for i in range(points)]
    device = Device(**dict.fromkeys(names, SUMMARY))
    seen = [device.step(lambda: [device.see(name, torch.randn(8)) for name in names]) for _ in range(2)]
    assert seen == [[False] * points, [True] * points]
    said = [device.step(lambda: [device.see(name, torch.randn(8)) for name in names]) for _ in range(32 + 128)]
    tried = [row.count(False) for row in said]
    assert tried[:31] == [0] * 31
    assert max(tried) == few
    assert all(any(not row[i] for row in said) for i in range(points))
    device.assert_kept()


def test_few_bytes_are_tried_again_in_a_step_so_that_new_points_are_tried_too(monkeypatch):
    monkeypatch.setattr(gathering, "_DOUBTED", 100 * 4)
    monkeypatch.setattr(gathering, "_FEW", 8)
    old, new = [[f"{kind}{i}" for i in range(60)] for kind in ("old", "new")]
    device = Device(**dict.fromkeys(old + new, SUMMARY))

    def forward(names):
        return [device.see(name, torch.randn(25)) for name in names]

    first = [device.step(lambda: forward(old)).count(False) for _ in range(16)]
    assert first == [60 - 4 * i for i in range(16)]  # four are tried in a step
    for _ in range(17):
        assert device.step(lambda: forward(old)) == [True] * 60
    both = [device.step(lambda: forward(old + new)) for _ in range(31)]
    assert {row[:60].count(False) for row in both[:15]} == {2}  # more were due
    assert [row[60:].count(False) for row in both] == [60 - 2 * i for i in range(31)]
    device.assert_kept()


def test_all_calls_of_a_point_are_booked_together():
    device = Device(a=SUMMARY)
    for _ in range(2):
        device.step(lambda: [device.see("a", torch.randn(25)) for _ in range(3)])
    assert dict(device.gathering._agenda.bytes) == {34: 300}


@pytest.mark.parametrize("every", [1, 10, 40])
def test_steps_in_which_nothing_is_due_count_so_that_what_is_seldom_seen_is_tried_as_soon(every):
    names = [f"p{i}" for i in range(16)]
    device = Device(**dict.fromkeys(names, SUMMARY))
    tried = []
    for _ in range(50):
        tried.append(device.step(lambda: [device.see(name, torch.randn(8)) for name in names]).count(False))
        for _ in range(every - 1):
            device.gathering.begin(None)
    assert tried[0] == 16
    assert max(tried[1:]) <= every
    assert sum(tried[1 : 1 + 100 // every]) == 16
    device.assert_kept()


def test_a_point_of_too_many_sizes_is_not_tried_for_ever(monkeypatch):
    monkeypatch.setattr(gathering, "_LARGEST", 50 * 4)
    monkeypatch.setattr(gathering, "_HUGE", 100 * 4)
    device = Device(a=SUMMARY)
    for size in (*range(51, 60), *range(8, 13)):  # of which four and four are told apart
        device.step(lambda size=size: device.see("a", torch.randn(size)))
    trials = len(device.batches)
    assert [device.step(lambda: device.see("a", torch.randn(12))) for _ in range(200)] == [False] * 200
    assert len(device.gathering._agenda.points) <= 4  # of the sizes that may wait
    assert len(device.batches) == trials
    for said in (False, True):
        assert device.step(lambda: [device.see("a", torch.randn(size)) for size in range(8, 12)]) == [said] * 4
    device.assert_kept()


def test_sizes_that_are_all_new_in_one_step_find_no_more_room_than_there_is():
    device = Device(a=SUMMARY)
    said = [device.step(lambda: [device.see("a", torch.randn(size)) for size in range(20, 32)]) for _ in range(60)]
    assert said[0] == [False] * 12
    assert said[1] == said[-1] == [True] * 8 + [False] * 4
    assert {row[:8].count(False) for row in said[33:41]} == {1}  # each of these is tried again by itself
    assert sum(device.gathering._agenda.points.values()) == 8  # and the others are not
    device.assert_kept()


def test_statistics_of_float64_are_taken_at_once_and_leave_others_room_to_be_tried(monkeypatch):
    monkeypatch.setattr(gathering, "_DOUBTED", 100 * 4)
    device = Device(wide=SUMMARY, copied=TENSOR, narrow=SUMMARY)

    def forward():
        wide, narrow = torch.randn(40, dtype=torch.float64), torch.randn(20)
        return [device.see("wide", wide), device.see("copied", wide), device.see("narrow", narrow)]

    assert [device.step(forward) for _ in range(3)] == [[False] * 3, [False, True, True], [False, True, True]]
    device.assert_kept()


def test_what_is_held_back_leaves_room_for_what_statistics_take_up(monkeypatch):
    monkeypatch.setattr(gathering, "_MOST", 100 * 4)
    points = {f"p{i}": SUMMARY for i in range(6)}
    device = Device(**points)
    for taken, counts in ((0, [3, 3]), (50 * 4, [2, 2, 2]), (90 * 4, [1] * 6), (300 * 4, [1] * 6), (0, [3, 3])):
        device.taken[device.gathering.place] = taken
        for _ in range(5):
            device.batches.clear()
            device.step(lambda: [device.see(name, torch.randn(40)) for name in points])
        assert [count for _, count in device.batches] == counts
    device.assert_kept()


def test_what_is_tried_beside_what_waits_leaves_room_for_it(monkeypatch):
    monkeypatch.setattr(gathering, "_MOST", 100 * 4)
    device = Device(a=SUMMARY, b=SUMMARY, new=SUMMARY, newer=SUMMARY)
    for _ in range(2):
        device.step(lambda: [device.see(name, torch.randn(40)) for name in ("a", "b")])
    device.batches.clear()
    device.step(lambda: [device.see(name, torch.randn(40)) for name in ("a", "b", "new", "newer")])
    assert [count for _, count in device.batches] == [2, 2]  # what waits, when the first new one comes; what is tried
    device.assert_kept()


def test_with_one_more_tensor_it_is_less_than_64_mb():
    assert gathering._MOST + gathering._LARGEST < 64e6


def test_nothing_is_judged_while_a_graph_is_captured(monkeypatch):
    device = Device(a=SUMMARY)
    device.step(lambda: device.see("a", torch.randn(8)))
    asked = []
    monkeypatch.setattr(Copy, "has_arrived", property(lambda self: asked.append(self) or True))
    monkeypatch.setattr(CUDA, "captures", True)
    monkeypatch.setattr(CUDA, "stream", 7)
    device.step(lambda: None)
    assert asked == []
    monkeypatch.setattr(CUDA, "captures", False)
    device.step(lambda: None)
    assert len(asked) == 2


def test_a_point_of_which_not_all_calls_could_be_tried_is_tried_another_time(monkeypatch):
    monkeypatch.setattr(gathering, "_DOUBTED", 100 * 4)
    device = Device(first=SUMMARY, a=SUMMARY, last=SUMMARY)

    def forward():
        tensors = [torch.randn(size) for size in (40, 10, 60, 25, 50)]
        said = [device.see(name, x) for name, x in zip(("first", "a", "a", "a", "last"), tensors, strict=True)]
        tensors[2].data.add_(1)
        return said

    assert device.step(forward) == [False] * 5
    assert not device.requests["a"].standing.trials  # though one of its calls might have been
    assert device.requests["last"].standing.trials  # for which there was room again
    assert [device.step(forward) for _ in range(3)] == [[True, False, False, False, True]] * 3
    assert device.requests["a"].standing.never
    device.assert_kept()


def test_a_point_that_is_too_much_by_itself_is_taken_at_once_and_leaves_others_room(monkeypatch):
    monkeypatch.setattr(gathering, "_DOUBTED", 100 * 4)
    device = Device(shared=SUMMARY, other=SUMMARY)

    def forward():
        said = [device.see("shared", torch.randn(20)) for _ in range(9)]
        return [*said, device.see("other", torch.randn(30))]

    said = [device.step(forward) for _ in range(40)]
    assert device.requests["shared"].standing.never
    assert [row[-1] for row in said[:3]] == [False, True, True]
    device.assert_kept()


@pytest.mark.parametrize("wish", [SUMMARY, TENSOR], ids=["summary", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_another_dtype_is_tried_for_itself(dtype, wish):
    device = Device(a=wish)

    def forward(number):
        x = torch.arange(8.0) + number
        x = x.to(dtype) if number % 2 else x
        held = device.see("a", x)
        x.data.add_(1) if number % 2 and number > 20 else None
        return held

    said = [device.step(lambda number=number: forward(number)) for number in range(120)]
    waits = wish is TENSOR or dtype is not torch.float64
    assert said[:6] == [False, False, True, waits, True, waits]
    if waits:
        assert device.doubtful == ["a"]
        assert not any(said[-40:])
    else:
        device.assert_kept()


def test_a_point_that_goes_over_to_another_dtype_is_held_back_again():
    device = Device(a=SUMMARY)
    dtypes = [torch.float32] * 3 + [torch.bfloat16] * 60
    said = [device.step(lambda dtype=dtype: device.see("a", torch.randn(8, dtype=dtype))) for dtype in dtypes]
    assert [number for number, held in enumerate(said) if not held] == [0, 3, 36]
    device.assert_kept()


def test_a_trial_whose_copy_never_came_is_lost(monkeypatch):
    device = Device(a=SUMMARY)
    device.step(lambda: device.see("a", torch.randn(8)))
    monkeypatch.setattr(Copy, "same_as", lambda self, other: 1 / 0)
    assert device.step(lambda: device.see("a", torch.randn(8))) is False
    assert device.requests["a"].standing.never


def test_an_interrupt_while_all_are_taken_leaves_no_tensor_behind(monkeypatch):
    device = Device(a=SUMMARY)
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))
    device.begin()
    x = torch.randn(8)
    assert device.see("a", x)
    alive = weakref.ref(x)
    del x

    def interrupted(only, dtype, held):
        raise KeyboardInterrupt

    monkeypatch.setattr(device.gathering, "_take_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.gathering.end()
    assert alive() is None
    with pytest.raises(Lost, match="or the step was broken off"):
        device.kept[-1][1]()


def test_what_an_interrupt_leaves_in_doubt_is_let_go():
    device = Device(a=SUMMARY)
    device.begin()
    x = torch.randn(8)
    device.see("a", x)
    alive = weakref.ref(x)
    del x
    device.begin()
    assert alive() is None


def test_what_an_interrupt_leaves_is_taken_before_the_next_step():
    device = Device(a=SUMMARY)
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))
    device.begin()
    assert device.see("a", torch.randn(8))  # and the step never ends
    device.step(lambda: device.see("a", torch.randn(8)))
    device.assert_kept()


@pytest.mark.parametrize("end", ["close", "give_up"])
def test_the_ways_are_let_go_of_when_nothing_waits_any_more(end):
    class Ferry:
        """What may hold memory of a device."""

        def __call__(self, held):
            raise AssertionError("nothing waits")

    ferry = Ferry()
    alive = weakref.ref(ferry)
    gathering = Device().gathering
    gathering.basket.aim(gathering.gates.Way("tensor", torch.float32, None, None, ferry, None, 0, 0, 0))
    del ferry
    assert alive() is not None
    getattr(gathering, end)()
    assert alive() is None
