from __future__ import annotations

import pytest
import torch

from framed import frame, reading
from layerscope.points import Point
from layerscope.rules import saturated
from layerscope.rules.saturated import _share


def bounded(values, bounds):
    return reading("act", values, bounds=bounds)


def test_a_tanh_at_its_ends_fires_and_one_in_its_middle_does_not():
    inputs = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    [alarm] = saturated().look(frame(7, bounded(torch.tanh(inputs * 100), (-1, 1))))
    assert (alarm.point, alarm.moment.step, alarm.threshold) == (Point("act"), 7, 0.9)
    assert saturated().look(frame(7, bounded(torch.tanh(inputs), (-1, 1)))) == []


def test_a_sigmoid_stuck_at_one_end_fires_too():
    assert saturated().look(frame(0, bounded(torch.sigmoid(torch.full((100,), 12.0)), (0, 1)))) != []


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0, 40.0, 200.0])
def test_the_share_is_never_overstated(spread):
    values = torch.tanh(torch.randn(20_000, generator=torch.Generator().manual_seed(1)).double() * spread)
    truly = (values.abs() >= 0.9).double().mean().item()  # within 5 % of the range of length 2
    assert _share(bounded(values, (-1, 1)), -1, 1) <= truly


def test_a_module_without_a_range_is_passed_over():
    assert saturated().look(frame(0, reading("linear", 1e9))) == []
