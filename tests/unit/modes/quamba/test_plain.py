"""The plain arithmetic against numpy, and the fast one against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from integers import convolution, products, random_codes, scan
from layerscope.modes.quamba.fast import FAST
from layerscope.modes.quamba.int8 import Codes
from layerscope.modes.quamba.plain import PLAIN


def test_sums_of_products_are_exact_and_those_of_the_fast_arithmetic():
    x, weight = random_codes(2, 9, 1536), random_codes(80, 1536, seed=1)
    x[0, 0], weight[0] = 127, 127
    found = PLAIN.products(x, weight)
    np.testing.assert_array_equal(found.numpy(), products(x, weight))
    assert torch.equal(found, FAST.products(x, weight))
    assert found.dtype == torch.int32


@pytest.mark.parametrize("length", [1, 3, 40])
def test_convolution_sums_are_exact_and_those_of_the_fast_arithmetic(length):
    x, weight = random_codes(2, length, 6), random_codes(6, 4, seed=1)
    found = PLAIN.convolution(x, weight)
    np.testing.assert_array_equal(found.numpy(), convolution(x, weight))
    assert torch.equal(found, FAST.convolution(x, weight))
    assert found.dtype == torch.int32


def test_the_scan_agrees_with_float64_on_the_same_codes_and_with_the_fast_scan_to_rounding():
    u, delta, B, C = (  # noqa: N806
        (random_codes(2, 100, 10), torch.tensor(0.03)),
        (random_codes(2, 100, 10, low=0, seed=1), torch.tensor(0.004)),
        (random_codes(2, 100, 8, seed=2), torch.tensor(0.02)),
        (random_codes(2, 100, 8, seed=3), torch.tensor(0.05)),
    )
    A, D = -torch.arange(1.0, 9).repeat(10, 1), torch.linspace(-1, 2, 10)  # noqa: N806
    found = PLAIN.scan(Codes(*u), Codes(*delta), A, Codes(*B), Codes(*C), D)
    oracle = scan(u, delta, A, B, C, D)
    assert np.linalg.norm(found.numpy() - oracle) <= 1e-5 * np.linalg.norm(oracle)
    fast = FAST.scan(Codes(*u), Codes(*delta), A, Codes(*B), Codes(*C), D)
    assert not torch.equal(found, fast)  # two implementations, not one under two names
    assert (found - fast).norm() <= 1e-6 * found.norm()
