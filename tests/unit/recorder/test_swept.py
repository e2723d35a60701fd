"""What is left when something goes wrong between a hook and the values: a reason, never a number of something else."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import layerscope as ls
from layerscope import native
from layerscope.points import Moment, Point
from layerscope.recorder import gathering
from layerscope.recorder.cargo import Arrival
from layerscope.recorder.gathering import Gathering
from layerscope.recorder.recording import _Step
from layerscope.recorder.taking import Taking
from layerscope.recorder.taps import Request, Wish
from layerscope.runtimes.values import made_of

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"no gates: {native.why_not()}")

HERE = -1  # what torch calls the host


class Copy(Arrival):
    """A clone, there at once."""

    def __init__(self, tensor):
        super().__init__(tensor.dtype, tensor.shape, None)
        self.host = tensor.detach().clone()

    def part(self, place, dtype, shape):
        return self


def take_all(only, dtype, held):
    for one in held:
        one.got = Copy(one.tensor)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    monkeypatch.setattr(gathering, "current_stream", lambda place: 0)
    monkeypatch.setattr(gathering, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: None)


@pytest.fixture
def gated(monkeypatch):
    """Have recordings take what they see on a device that the host plays."""

    def prepare(self, parameters, plan, *, gathers):
        self.quick = self._shares = True
        self.gathering = Gathering(
            native.load(), HERE, take_all=take_all, alone=self._alone, keep=self._keep, doubtful=self._doubtful
        )

    monkeypatch.setattr(Taking, "prepare", prepare)
    monkeypatch.setattr(Taking, "_at_once", lambda self, taken, only, tensor: Copy(tensor))


class Outer(nn.Module):
    """Calls a part of its own, which does with its linear layer what it is told."""

    def __init__(self, forward):
        super().__init__()
        self.part = nn.Module()
        self.part.layer = nn.Linear(4, 4)
        self.part.forward = lambda x: forward(self.part.layer(x))

    def forward(self, x):
        try:
            self.part(x)
        except ValueError:
            return x + 1
        return x + 2


def refuse(x):
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("forward", "asked", "reason"),
    [
        (refuse, "part:output", "its forward did not finish"),
        (lambda x: (x, x + 1), "part:output[5]", "it has no such leaf; there is part:output[0], part:output[1]"),
    ],
    ids=["a module that raises", "a leaf that is not there"],
)
def test_a_module_whose_calls_pass_by_a_gate_is_known_to_have_been_called(gated, forward, asked, reason):
    model = Outer(forward)
    with ls.record(model, [".:output", asked, "part.layer:output"], weights=False) as rec:
        for _ in range(4):
            model(torch.randn(2, 4))
    assert [(one.point, one.reason) for one in rec.missing] == [(asked, reason)]


def inside_itself(x):
    value = [x]
    value.append(value)
    return value


def test_a_container_inside_itself_is_recorded_without_a_word(gated):
    model = Outer(inside_itself)
    with ls.record(model, "**:output", weights=False, on_error="raise") as rec:
        for _ in range(4):
            model(torch.randn(2, 4))
    assert rec.missing == []


def test_a_container_inside_itself_is_made_of_nothing_that_can_be_told():
    value = {"x": torch.zeros(1)}
    value["again"] = value
    assert made_of(value, {("x",): "standing"}) is None
    assert made_of(inside_itself(torch.zeros(1)), {(0,): "standing"}) is None


def test_a_trial_whose_values_never_came_casts_no_doubt_on_the_records_before(monkeypatch):
    doubtful, due, request = [], {}, Request(Point("a"), Wish(tensor=True))
    held_back = Gathering(
        native.load(), HERE, take_all=take_all, alone=None, keep=lambda held: None, doubtful=doubtful.append
    )

    def step():
        x = torch.randn(8)
        held_back.begin(_Step(Moment(), requests=due))
        if held_back.hold(request, x, Moment()) is None:
            held_back.doubt(request, "tensor", x, Copy(x))
        held_back.end()

    for _ in range(33):
        step()
    assert request.standing.proofs
    monkeypatch.setattr(Copy, "same_as", lambda self, other: 1 / 0)
    for _ in range(3):
        step()
    assert request.standing.never
    assert doubtful == []


def test_what_an_interrupt_leaves_behind_is_said_to_be_lost(gated, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rest = Gathering._rest

    def interrupted(self, left):
        monkeypatch.setattr(Gathering, "_rest", rest)
        raise KeyboardInterrupt  # where a signal that came in the middle of C is heard: at the first line of Python

    with ls.record(model, "**:output", weights=False) as rec:
        for number in range(5):
            if number == 3:
                monkeypatch.setattr(Gathering, "_rest", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    model(torch.randn(2, 4))
            else:
                model(torch.randn(2, 4))
    lost = sum(one.count for one in rec.completeness.dropped)
    assert rec.completeness.records + lost == 5 * 3
    assert lost == 3


class Contested(deque):
    """A deque that another thread empties as soon as somebody has begun to."""

    def popleft(self):
        one = super().popleft()
        self.clear()
        return one


def test_two_threads_that_read_at_once_lose_no_record():
    model = nn.Linear(4, 4)
    with ls.record(model, ".:output", weights=False) as rec:
        for _ in range(3):
            model(torch.randn(2, 4))
        rec._pending = Contested(rec._pending)
        assert len(rec.run._kept) == 1  # the others are the other thread's
