"""Joining sums against numpy on the whole."""

import numpy as np
import pytest

from layerscope.compare.measure import numpy_sweep
from layerscope.compare.measure.engine import table
from layerscope.compare.measure.sums import alone, together


def swept(r, c, start=0):
    return numpy_sweep.sweep(r, c, buckets=table(), start=start)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_blocks_join_to_the_spreads_of_the_whole(offset):
    rng = np.random.default_rng(0)
    r = rng.standard_normal(9000) + offset
    c = r + rng.standard_normal(9000) * 0.01 + np.repeat([0.0, 5.0, -3.0], 3000)
    parts = [swept(r[i : i + 3000], c[i : i + 3000], i) for i in range(0, 9000, 3000)]
    whole = together(np.concatenate([part.together for part in parts]))
    d = c - r
    assert whole.reference_spread == pytest.approx(((r - r.mean()) ** 2).sum(), rel=1e-9)
    assert whole.candidate_spread == pytest.approx(((c - c.mean()) ** 2).sum(), rel=1e-9)
    assert whole.difference_spread == pytest.approx(((d - d.mean()) ** 2).sum(), rel=1e-9)
    assert whole.product == pytest.approx(((c - c.mean()) * (r - r.mean())).sum(), rel=1e-9)
    assert whole.place == np.abs(d).argmax()
    own = alone(np.concatenate([part.candidate for part in parts]))
    assert (own.lowest, own.highest, own.count) == (c.min(), c.max(), 9000)
    assert own.spread == pytest.approx(whole.candidate_spread, rel=1e-12)


def test_a_constant_stays_one_whatever_the_sizes_of_its_blocks():
    x = np.full(1000, 0.1)
    parts = [swept(x[a:b], x[a:b] * 2) for a, b in ((0, 3), (3, 10), (10, 1000))]
    whole = together(np.concatenate([part.together for part in parts]))
    assert (whole.reference, whole.reference_spread) == (0.1, 0.0)
    assert alone(np.concatenate([part.reference for part in parts])).spread == 0.0


def test_blocks_with_nothing_finite_change_nothing():
    nothing, x = np.full(5, np.nan), np.arange(5.0)
    rows = np.concatenate([swept(nothing, nothing).together, swept(x, x + 1, 5).together])
    assert together(rows).reference == 2.0
    assert together(rows).first_at_all == 0
    assert together(rows[:0]).count == 0
    assert alone(np.empty((0, 10))).lowest == np.inf
