"""Listening: forwards that are let pass leave no gap in the count, and a listener hears the others."""

import pytest
import torch

from layerscope.errors import NothingRecorded
from layerscope.recorder import Tap, record


class Ear:
    """A listener that hears everything, but does not want every forward."""

    def __init__(self, wanted):
        self.wanted = iter(wanted)
        self.heard = []

    def wants(self):
        return next(self.wanted)

    def seen(self, point, moment, tensor, summary):
        told = summary() if callable(summary) else summary
        self.heard.append((str(point), moment.step, tensor.item(), told.mean))


def test_forwards_that_a_listener_does_not_want_are_neither_recorded_nor_counted():
    model = torch.nn.Sequential(torch.nn.Identity())
    with record(model, "0", keep="both", listener=Ear(value not in (0, 2, 3) for value in range(6))) as rec:
        for value in range(6):
            model(torch.tensor([float(value)]))
    assert [(m.step, rec.run.tensor("0", step=m.step).item()) for m in rec.run.moments] == [
        (0, 1.0),
        (1, 4.0),
        (2, 5.0),
    ]
    assert rec.completeness.forwards == 3


def test_a_gradient_of_a_forward_that_was_wanted_arrives_after_one_that_was_not():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    ear = Ear([True, False])
    ear.seen = lambda *heard: None
    with record(model, "0:grad_output", listener=ear) as rec:
        out = model(torch.ones(1, 2))
        model(torch.zeros(1, 2)).sum().backward()
        out.sum().backward()
    assert torch.equal(rec["0:grad_output"], torch.ones(1, 2))


def test_a_listener_is_told_each_record_as_it_is_made():
    model = torch.nn.Sequential(torch.nn.Identity())
    ear = Ear([True, False, True])
    with record(model, "0", keep="summary", listener=ear) as rec:
        for value in range(3):
            model(torch.tensor([float(value)]))
            assert len(ear.heard) == (1, 1, 2)[value]
    assert ear.heard == [("0:output", 0, 0.0, 0.0), ("0:output", 1, 2.0, 2.0)]
    assert rec.completeness.forwards == 2


def test_with_a_listener_memory_keeps_tensors_and_no_summaries_alone():
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with record(model, [Tap("0", keep="summary"), Tap("1", keep="both")], listener=Ear([True])) as rec:
        model(torch.ones(1))
    assert [str(point) for point in rec.run.points] == ["1:output"]


def test_a_listener_that_raises_is_listed_and_the_forward_goes_on():
    class Deaf(Ear):
        def seen(self, point, moment, tensor, summary):
            raise RuntimeError("what?")

    model = torch.nn.Sequential(torch.nn.Identity())
    with pytest.raises(NothingRecorded, match=r"RuntimeError: what\?"), record(model, "0", listener=Deaf([True])):
        assert model(torch.ones(1)).item() == 1.0
