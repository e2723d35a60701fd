"""Small tensors are held back to the end of a step where that gives the same values, and nowhere else.

The device is played by clones: what is taken is a copy made at the moment of taking.
"""

from __future__ import annotations

import threading

import pytest
import torch

from layerscope.points import Point
from layerscope.recorder import gathering
from layerscope.recorder.cargo import Arrival, Lost
from layerscope.recorder.gathering import Gathering
from layerscope.recorder.taps import Request, Wish


class Copy(Arrival):
    """What was taken of a tensor, there at once."""

    def __init__(self, tensor):
        super().__init__(tensor.dtype, tensor.shape, None)
        self.host = tensor.detach().clone()


class Device:
    """Plays the model's hooks, and takes together what is held back."""

    def __init__(self, **points):
        self.requests = {name: Request(Point(name), wish) for name, wish in points.items()}
        self.batches = []
        self.gathering = Gathering(0, self.take_all)
        self.kept = []

    def take_all(self, only, tensors, stream):
        self.batches.append((only, len(tensors), stream))
        return [Copy(tensor) for tensor in tensors]

    def see(self, name, tensor):
        """What a recording does in a hook; the record, and whether the tensor was held back."""
        request = self.requests[name]
        got = self.gathering.hold(request, request.only, tensor) if request.held > 0 else None
        held = got is not None
        if got is None:
            got = Copy(tensor)
            if request.held >= 0:
                self.gathering.doubt(request, request.only, tensor, got)
        self.kept.append((name, got, tensor.clone()))
        return held

    def step(self, forward):
        """Run a step; return what each hook said."""
        self.gathering.begin()
        said = forward()
        self.gathering.end()
        return said

    def assert_kept(self):
        for name, got, was in self.kept:
            assert torch.equal(got(), was), name


SUMMARY, TENSOR = Wish(summary=True, level="full"), Wish(tensor=True)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    monkeypatch.setattr(gathering, "current_stream", lambda place: 7)
    monkeypatch.setattr(gathering, "is_capturing", lambda: False)


@pytest.mark.parametrize("wish", [SUMMARY, TENSOR], ids=["summary", "tensor"])
def test_a_point_is_held_back_from_the_step_after_its_trial(wish):
    device = Device(a=wish, b=wish)

    def forward():
        return [device.see("a", torch.randn(8)), device.see("b", torch.randn(9))]

    said = [device.step(forward) for _ in range(4)]
    assert said == [[False, False], [True, True], [True, True], [True, True]]
    device.assert_kept()
    only = device.requests["a"].only
    assert device.batches == [(only, 2, 7)] * 4  # the first is the trial's


def test_a_tensor_that_two_points_see_is_taken_once():
    device = Device(a=SUMMARY, b=SUMMARY)

    def forward():
        x = torch.randn(8)
        return [device.see("a", x), device.see("b", x)]

    for _ in range(3):
        device.step(forward)
    assert device.batches == [("full", 1, 7)] * 3
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
    assert device.requests["a"].held == -1


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
    with pytest.raises(Lost, match="changed in place between the hook and the end of the step"):
        lost()
    device.assert_kept()


def test_another_size_is_tried_for_itself_and_not_for_ever():
    device = Device(a=SUMMARY)
    sizes = [8, 8, 5, 5, 8, 8]
    assert [device.step(lambda size=size: device.see("a", torch.randn(size))) for size in sizes] == [
        False, True, False, True, False, True,
    ]  # fmt: skip
    for size in range(20, 40):
        device.step(lambda size=size: device.see("a", torch.randn(size)))
    assert device.requests["a"].tries == 8
    device.assert_kept()


def test_large_tensors_are_taken_at_once_and_many_small_ones_in_several_goes(monkeypatch):
    monkeypatch.setattr(gathering, "_MOST", 2 * 100 * 4)
    monkeypatch.setitem(gathering._LARGEST, "full", 50 * 4)
    device = Device(large=SUMMARY, **{f"p{i}": SUMMARY for i in range(6)})

    def forward():
        return [device.see("large", torch.randn(51)), *(device.see(f"p{i}", torch.randn(40)) for i in range(6))]

    said = [device.step(forward) for _ in range(5)]
    assert [row[0] for row in said] == [False] * 5
    assert said[-1][1:] == [True] * 6
    assert [count for _, count, _ in device.batches[-2:]] == [3, 3]  # as soon as more than 100 items are held
    device.assert_kept()


def test_gradients_operations_and_inference_tensors_are_taken_at_once():
    device = Device(a=SUMMARY)
    assert Request(Point("a", "grad_output"), SUMMARY).held == -1
    assert Request(Point("op:aten.mm", op=True), SUMMARY).held == -1
    with torch.inference_mode():
        assert [device.step(lambda: device.see("a", torch.randn(8))) for _ in range(3)] == [False] * 3
    assert [device.step(lambda: device.see("a", torch.randn(8))) for _ in range(2)] == [False, True]
    with torch.inference_mode():
        assert device.step(lambda: device.see("a", torch.randn(8))) is False
    device.assert_kept()


def test_another_stream_and_another_thread_and_a_capture_are_taken_at_once(monkeypatch):
    device = Device(a=SUMMARY)
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))

    def elsewhere():
        with monkeypatch.context() as patched:
            patched.setattr(gathering, "current_stream", lambda place: 8)
            return device.see("a", torch.randn(8))

    assert device.step(elsewhere) is False
    said = []
    thread = threading.Thread(target=lambda: said.append(device.step(lambda: device.see("a", torch.randn(8)))))
    thread.start()
    thread.join()
    assert said == [False]
    monkeypatch.setattr(gathering, "is_capturing", lambda: True)
    assert device.step(lambda: device.see("a", torch.randn(8))) is False
    device.assert_kept()


def test_what_an_interrupt_leaves_is_taken_before_the_next_step():
    device = Device(a=SUMMARY)
    for _ in range(2):
        device.step(lambda: device.see("a", torch.randn(8)))
    device.gathering.begin()
    assert device.see("a", torch.randn(8))  # and the step never ends
    device.step(lambda: device.see("a", torch.randn(8)))
    device.assert_kept()
