from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.errors import Unsupported
from layerscope.monitor.alarm_taps import bounds_of, innermost, maps_of, other_side, points_of
from layerscope.points import Point
from layerscope.recorder import Tap


def test_the_same_modules_are_seen_from_another_side():
    assert other_side(["blocks.*", "!blocks.0", "op:aten.softmax"], "grad_output") == (
        "blocks.*:grad_output",
        "!blocks.0",
    )


def test_maps_stand_second_unless_the_pattern_says_where():
    assert maps_of([]) is None
    assert maps_of(["attn", "other[weights]", "!x"]).patterns == ("attn[1]", "other[weights]", "!x")
    assert maps_of(Tap("attn", keep="summary")).keep == "summary"


def test_a_shared_module_is_named_by_its_first_name():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert points_of(Tap("2"), model) == {Point("0")}


def test_functions_that_are_bounded_and_flat_at_both_ends_have_their_range():
    model = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Hardtanh(-2.0, 3.0), nn.ReLU6(), nn.ReLU(), nn.Softsign())
    assert bounds_of(model) == {"0": (0.0, 1.0), "1": (-1.0, 1.0), "2": (-2.0, 3.0), "5": (-1.0, 1.0)}


def test_the_optimizer_that_steps_is_the_innermost():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert innermost(Wrapper(Wrapper(sgd))) is sgd
    with pytest.raises(Unsupported, match="a str is no torch"):
        innermost("sgd")
