"""Rows as sets, against Python's own counters."""

import math
from collections import Counter

import numpy as np
import pytest

from layerscope.compare.measure.sets import SetCounts


@pytest.mark.parametrize("width", [1, 2, 8, 64])
@pytest.mark.parametrize("members", [2, 10, 1000])
def test_shared_members_are_those_of_two_counters(width, members):
    rng = np.random.default_rng(width)
    r, c = rng.integers(-members, members, (2, 50, width))
    c[::4] = r[::4]
    c[1::4] = r[1::4, ::-1]
    sets = SetCounts(width)
    sets.add(r.reshape(-1), c.reshape(-1))
    found = sets.result()
    shared = [(Counter(a) & Counter(b)).total() for a, b in zip(r.tolist(), c.tolist(), strict=True)]
    moved = [n == width and not np.array_equal(a, b) for n, a, b in zip(shared, r, c, strict=True)]
    assert (found.rows, found.changed, found.reordered) == (50, sum(n < width for n in shared), sum(moved))
    assert found.overlap == pytest.approx(sum(shared) / (50 * width))


def test_no_rows_have_no_overlap():
    assert math.isnan(SetCounts(4).result().overlap)
