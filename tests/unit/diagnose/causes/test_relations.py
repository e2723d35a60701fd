"""Sums by row and column against numpy in float64; what is the same but for a cast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerscope.diagnose.causes import relations
from layerscope.diagnose.causes.relations import Sums
from layerscope.diagnose.judge.measurement import same

ONE = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
TWO = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("piece", [1, 12, 1 << 20])
def test_factors_and_remainders_are_those_of_numpy(monkeypatch, piece):
    monkeypatch.setattr(relations, "PIECE", piece)
    found = Sums.of(ONE, TWO)
    r, c = ONE.double().numpy(), TWO.double().numpy()
    for lines, axis in ((found.rows, 1), (found.columns, 0)):
        factor = (r * c).sum(axis) / (r * r).sum(axis)
        left = np.linalg.norm(c - np.expand_dims(factor, axis) * r, axis=axis) / np.linalg.norm(c, axis=axis)
        assert lines.factor.numpy() == pytest.approx(factor)
        assert lines.left.numpy() == pytest.approx(left)
        assert lines.wrong.numpy() == pytest.approx(np.full(len(factor), r.shape[axis]))
    assert found.relative == pytest.approx(np.linalg.norm(c - r) / np.linalg.norm(r))
    assert found.mean == pytest.approx((c - r).mean())
    assert found.cosine == pytest.approx((c * r).sum() / np.linalg.norm(c) / np.linalg.norm(r))


def test_columns_of_a_convolution_are_its_input_channels():
    kernel = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    changed = kernel.clone()
    changed[:, 1] *= 2
    assert Sums.of(kernel, changed).columns.factor.tolist() == pytest.approx([1, 2, 1])


def test_rounding_is_not_wrong():
    assert float(Sums.of(ONE, ONE.to(torch.bfloat16)).whole.wrong) == 0
    assert float(Sums.of(ONE, ONE.to(torch.bfloat16).float()).whole.wrong) > 0


def test_a_cast_is_the_same_and_a_last_bit_is_not():
    assert same(ONE, ONE.to(torch.float16))
    assert same(ONE.to(torch.bfloat16), ONE.to(torch.bfloat16).double())
    assert not same(ONE, torch.nextafter(ONE, ONE + 1))
    assert not same(ONE, ONE[:3])
