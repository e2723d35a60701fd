"""What is wanted of a tensor is taken once, and trouble with taking many together costs nothing but time."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import layerscope as ls
from asserts import assert_same_bits
from layerscope import native
from layerscope.points import Moment, Point
from layerscope.recorder import devices, gathering
from layerscope.recorder import taking as hand_of
from layerscope.recorder.recording import _Step
from layerscope.recorder.taking import Taking
from layerscope.recorder.taps import Wish
from layerscope.stats import summarize

TENSOR, BOTH = Wish(tensor=True), Wish(tensor=True, summary=True)


def taking(**options):
    return Taking(**{"in_memory": True, "listened": False, "budget": 1 << 20} | options)


def test_a_tensor_is_looked_at_once_until_it_changes():
    hand, looks, x = taking(), {}, torch.arange(3.0)
    first = hand.look(looks, x, TENSOR)
    assert hand.look(looks, x, TENSOR) is first
    x.add_(1)
    second = hand.look(looks, x, TENSOR)
    assert second is not first
    assert_same_bits(first.copy(), torch.tensor([0.0, 1.0, 2.0]))
    assert_same_bits(second.copy(), torch.tensor([1.0, 2.0, 3.0]))


def test_what_is_missing_is_taken_in_addition():
    hand, looks, x = taking(), {}, torch.arange(3.0)
    look = hand.look(looks, x, TENSOR)
    assert look.summary is None
    copy = look.copy
    assert hand.look(looks, x, BOTH) is look
    assert look.copy is copy
    assert look.summary() == summarize(torch.arange(3.0), level="moments")


def test_each_sight_of_an_inference_tensor_counts():
    hand, looks = taking(), {}
    with torch.inference_mode():
        x = torch.ones(3)
    assert hand.look(looks, x, TENSOR) is not hand.look(looks, x, TENSOR)
    assert looks == {}


def test_on_its_way_to_disk_it_is_a_blob_and_not_a_copy():
    look = taking(in_memory=False).look({}, torch.arange(3.0), TENSOR)
    assert look.copy is None
    assert (look.blob.dtype, look.blob.shape, look.blob.nbytes) == ("float32", (3,), 12)
    assert look.blob.data().tobytes() == torch.arange(3.0).numpy().tobytes()


def test_nothing_is_quick_or_gathered_without_a_gpu():
    model = nn.Linear(2, 2)
    with ls.record(model, ".", keep="summary") as rec:
        model(torch.ones(1, 2))
        assert not rec._taking.quick
        assert rec._taking.gathering is None


class Broken:
    """A gathering that fails at one thing."""

    place, given_up, is_mine = 0, 0, False

    def __init__(self, verb=""):
        self.verb, self.heard = verb, []

    def hear(self, verb):
        self.heard.append(verb)
        if verb == self.verb:
            raise RuntimeError("CUDA error 2")

    def begin(self, step):
        self.hear("begin")

    def end(self):
        self.hear("end")

    def give_up(self):
        self.given_up += 1

    def close(self):
        pass


@pytest.mark.parametrize("verb", ["begin", "end"])
def test_a_gathering_that_fails_is_given_up_and_said_once_and_the_step_goes_on(verb, caplog):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with caplog.at_level(logging.WARNING, "layerscope"), ls.record(model, ".") as rec:
        rec._taking.gathering = broken = Broken(verb)
        model(x)
        model(x)
    assert broken.heard == ["begin", "end"] * 2
    assert broken.given_up == 2
    assert caplog.text.count("are taken one by one: RuntimeError: CUDA error 2") == 1
    assert len(rec.run.moments) == 2


def test_a_step_in_which_nothing_is_due_begins_and_has_what_a_backward_pass_brought_leave(monkeypatch):
    rests = []
    monkeypatch.setattr(devices, "rest", lambda: rests.append(len(gathering.heard)))
    model, gathering = nn.Linear(2, 2), Broken()
    with ls.record(model, ".", when="first(1)") as rec:
        rec._taking.gathering = gathering
        for _ in range(3):
            model(torch.ones(1, 2))
    assert gathering.heard == ["begin", "end", "begin", "begin"]
    assert rests == [2, 3, 4]


@pytest.mark.skipif(bool(native.why_not()), reason=f"no gates: {native.why_not()}")
def test_what_waits_leaves_room_for_statistics_whenever_they_take_it_up(monkeypatch):
    monkeypatch.setattr(hand_of, "lane_of", lambda where: SimpleNamespace(prepare=lambda: None))
    monkeypatch.setattr(gathering, "_stream_here", lambda place: 0)
    monkeypatch.setattr(gathering, "is_alone", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: None)
    monkeypatch.setattr(
        devices, "_Desk", lambda key, size: SimpleNamespace(place=key[0], slots=SimpleNamespace(size_on_device=size))
    )
    hand = taking()
    hand._gather(3)
    room = []
    for place, size in ((5, 1000), (3, 500), (3, 300)):
        hand._devices._desk_of((place, size), size)
        hand.gathering.begin(_Step(Moment(), requests={}))
        room.append(hand.gathering.basket.most)
    assert room == [gathering._MOST, gathering._MOST - 500, gathering._MOST - 800]


@pytest.mark.parametrize("only", ["full", "tensor"])
def test_what_cannot_be_taken_together_is_taken_alone_and_says_why_it_cannot(only, caplog):
    hand = taking()
    hand.gathering = Broken()
    hand._take_all(only, torch.float32, [object()])  # for there is neither a lane nor a tensor
    assert "are taken one by one" in caplog.text
    good, bad = (hand._alone(only, tensor) for tensor in (torch.arange(3.0), torch.ones(2).to_sparse()))
    if only == "tensor":
        assert_same_bits(good(), torch.arange(3.0))
    else:
        assert good() == summarize(torch.arange(3.0))
    with pytest.raises(Exception, match="sparse_coo tensor is not stored"):
        bad()


def test_a_point_that_changed_unseen_is_listed_with_what_that_means():
    model = nn.Linear(2, 2)
    with ls.record(model, ".") as rec:
        model(torch.ones(1, 2))
        rec._taking._doubtful(Point(""))
    [missing] = rec.missing
    assert "in a way that torch does not count" in missing.reason
