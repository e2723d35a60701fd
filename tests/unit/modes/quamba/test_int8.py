"""Codes, the way onto the grid and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from integers import grid
from layerscope.errors import Unsupported
from layerscope.modes.quamba.int8 import Codes, quantise, rescaled, scale_of_rows


def test_ties_go_to_the_even_code_and_what_is_outside_the_grid_saturates_at_127():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.49, 127.5, 1e9, -127.5, -128.0, -1e9, float("inf")])
    expected = [0, 2, 2, 0, -2, 126, 127, 127, 127, -127, -127, -127, 127]
    assert quantise(x, torch.tensor(1.0)).codes.tolist() == expected


@pytest.mark.parametrize("scale", [1.0, 0.1, 3e-3, 7.77e-6, 12.0])
def test_every_code_comes_back_when_it_is_taken_off_the_grid_and_put_on_it_again(scale):
    codes = Codes(torch.arange(-127, 128, dtype=torch.int8), torch.tensor(scale))
    assert torch.equal(quantise(codes.floats(), codes.scale).codes, codes.codes)


def test_codes_are_numpys():
    x = torch.randn(1000, 7) * 2
    found = quantise(x, torch.tensor(0.013)).codes
    assert found.dtype == torch.int8
    np.testing.assert_array_equal(found.numpy(), grid(x, 0.013))
    assert (found.abs() == 127).any()  # some were clipped


def test_what_is_not_clipped_is_off_by_half_a_step_at_most():
    x = torch.linspace(-1.27, 1.27, 999)
    assert (quantise(x, torch.tensor(0.01)).floats() - x).abs().max() <= 0.005 + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8])
def test_what_is_not_int8_cannot_pass_for_codes(dtype):
    with pytest.raises(Unsupported, match=f"these are {str(dtype)[6:]}: a float leaked into an INT8 stage"):
        Codes(torch.zeros(3, dtype=dtype), torch.tensor(1.0))


def test_a_row_has_its_largest_magnitude_on_the_last_code_and_a_row_of_zeros_stays_zero():
    x = torch.tensor([[0.1, -2.54, 1.0], [0.0, 0.0, 0.0], [1e-6, 0.0, -6e-7]])
    scale = scale_of_rows(x)
    assert scale[:, 0].tolist() == pytest.approx([0.02, 1.0, 1e-6 / 127])
    assert quantise(x, scale).codes.tolist() == [[5, -127, 50], [0, 0, 0], [127, 0, -76]]


def test_sums_become_floats_by_their_scale_and_bias():
    sums = torch.tensor([[100, -3], [0, 2**20]], dtype=torch.int32)
    found = rescaled(sums, torch.tensor([0.5, 0.25]), torch.tensor([1.0, -1.0]))
    assert found.tolist() == [[51.0, -1.75], [1.0, 2**18 - 1.0]]
    assert rescaled(sums, torch.tensor(2.0), None).tolist() == [[200.0, -6.0], [0.0, 2.0**21]]
