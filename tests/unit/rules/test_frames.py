from __future__ import annotations

import math

import pytest
import torch

from framed import frame, parameter, reading
from layerscope.errors import NoSuchPoint
from layerscope.points import Point


def test_a_reading_is_found_by_name_or_point():
    one = frame(0, reading("a", 1), reading("a:grad_output", 2))
    assert one.reading("a").summary.mean == 1
    assert one.reading(Point("a", "grad_output")).summary.mean == 2
    with pytest.raises(NoSuchPoint, match="b:output has no reading at step=0"):
        one.reading("b")


def test_a_reading_knows_whether_it_is_finite():
    assert reading("a", 1e38).finite
    assert not reading("a", torch.tensor([1.0, math.inf])).finite


def test_a_parameters_point_is_its_modules_output():
    assert parameter("blocks.0.fc.weight").point == Point("blocks.0.fc")
    assert parameter("scale").point == Point("")
