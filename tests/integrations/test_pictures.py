"""Attention maps as pictures: the brightest pixel is the largest weight, whatever the size of the map."""

import numpy as np
import pytest
import torch

from layerscope.integrations.pictures import GAP, LEAST, MOST, picture


def test_a_small_map_is_enlarged_and_keeps_its_place():
    drawn = picture(torch.eye(4))
    assert drawn.shape == (LEAST, LEAST)
    assert np.array_equal(drawn, np.eye(4, dtype=np.uint8).repeat(16, 0).repeat(16, 1) * 255)


@pytest.mark.parametrize("size", [257, 1000])
def test_one_weight_of_a_large_map_is_not_averaged_away(size):
    weights = torch.full((size, size), 1e-6)
    weights[size - 1, 3] = 1.0
    drawn = picture(weights)
    assert max(drawn.shape) <= MOST
    assert drawn[-1, 0 if size == 1000 else 1] == 255
    assert (drawn > 0).sum() == 1


def test_heads_stand_side_by_side():
    drawn = picture(torch.stack([torch.full((64, 64), float(head)) for head in range(1, 4)]))
    assert drawn.shape == (2 * 64 + GAP, 2 * 64 + GAP)
    assert [drawn[0, 0], drawn[0, -1], drawn[-1, 0], drawn[-1, -1]] == [85, 170, 255, 0]


def test_what_is_not_finite_and_what_is_nothing_are_dark():
    assert picture(torch.tensor([[float("nan"), 1.0]])).max() == 255
    assert picture(torch.full((2, 2), float("inf"))).max() == 0
    assert picture(torch.zeros(2, 2)).max() == 0
