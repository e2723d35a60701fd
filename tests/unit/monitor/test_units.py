from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.monitor.units import unit_axes, unit_axis


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(2, 7, 3), (4, 2, 9)),
        (nn.Conv1d(2, 7, 3), (2, 9)),
        (nn.ConvTranspose1d(2, 7, 3), (4, 2, 9)),
        (nn.Conv2d(2, 7, 3), (4, 2, 9, 9)),
        (nn.Conv2d(2, 7, 3), (2, 9, 9)),
        (nn.Conv3d(2, 7, 3), (4, 2, 5, 5, 5)),
        (nn.BatchNorm1d(7), (4, 7)),
        (nn.BatchNorm1d(7), (4, 7, 9)),
        (nn.BatchNorm2d(7), (4, 7, 5, 5)),
        (nn.InstanceNorm1d(7), (4, 7, 9)),
        (nn.GroupNorm(1, 7), (4, 7, 9)),
        (nn.MaxPool1d(2), (4, 7, 9)),
        (nn.AdaptiveAvgPool2d(2), (4, 7, 9, 9)),
        (nn.Linear(3, 7), (4, 5, 3)),
        (nn.Linear(3, 7), (4, 2, 5, 3)),
        (nn.LayerNorm(7), (4, 5, 7)),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "x".join(map(str, given)),
)
def test_the_axis_is_the_one_with_as_many_places_as_there_are_units(module, shape):
    output = module(torch.randn(shape))
    axis = unit_axis(output.shape, unit_axes(nn.Sequential(module))["0"])
    assert output.shape[axis] == 7


def test_modules_without_units_of_their_own_have_no_axis():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.Dropout())
    assert unit_axes(model) == {"1.0": -1}


def test_without_a_type_the_shape_before_decides_then_the_number_of_axes():
    shape = torch.Size((2, 3, 4))
    assert unit_axis(shape, None, (shape, 1)) == 1
    assert unit_axis(shape, None, (torch.Size((2, 3, 5)), 1)) == 2
    assert unit_axis(torch.Size((2, 3, 4, 5)), None) == 1
    assert unit_axis(torch.Size((2, 3)), -3) == 1  # a convolution that somebody has given another output
