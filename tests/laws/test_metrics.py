"""Laws of comparing two tensors."""

import math
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerscope.compare.measure import measure, numba_sweep, numpy_sweep, operands
from layerscope.compare.measure.engine import folded, table
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.measure.sums import alone, together

# The package exports the function under the same name.
MEASURING = import_module("layerscope.compare.measure.pair")

modest = settings(max_examples=80, deadline=None)

floats = st.one_of(st.floats(-1e4, 1e4, width=16), st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]))
finite = st.floats(-1e6, 1e6, width=32)


def sides(elements, dtypes=(np.float32, np.float64)):
    """Two arrays of one size, of any of the dtypes."""

    def two(draw_from):
        size, one, other = draw_from
        return st.tuples(hnp.arrays(one, size, elements=elements), hnp.arrays(other, size, elements=elements))

    kinds = st.sampled_from(dtypes)
    return st.tuples(st.integers(0, 40), kinds, kinds).flatmap(two)


def assert_close(a: Metrics, b: Metrics) -> None:
    """Equal exactly where there is no rounding, to rounding where there is."""
    for name in ("count", "compared", "equal", "max_abs", "max_relative", "nonfinite", "percentiles"):
        np.testing.assert_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for side in ("reference", "candidate"):
        one, other = getattr(a, side), getattr(b, side)
        for name in ("min", "max", "nan", "posinf", "neginf", "zeros"):
            np.testing.assert_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert one.mean_abs == pytest.approx(other.mean_abs, rel=1e-12, abs=0.0, nan_ok=True)
        assert one.rms == pytest.approx(other.rms, rel=1e-12, abs=0.0, nan_ok=True)
    for name in ("mae", "mse", "mean_relative", "relative_l2", "relative_mae"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9, abs=0.0, nan_ok=True), name
    assert a.sqnr == pytest.approx(b.sqnr, rel=1e-9, abs=1e-9, nan_ok=True)  # a logarithm near zero
    for name in ("mean", "std"):
        slack = 1e-9 * a.mae if a.compared else 0.0
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9, abs=slack, nan_ok=True), name


@modest
@given(sides(floats), st.data(), st.sampled_from([numba_sweep, numpy_sweep]))
def test_joining_the_parts_gives_the_sums_of_the_whole(pair, data, engine):
    r, c = (side.astype(np.float64) for side in pair)
    cut = data.draw(st.integers(0, r.size))
    tables = [table(), table()]
    whole = engine.sweep(r, c, buckets=tables[0])
    parts = [engine.sweep(r[:cut], c[:cut], buckets=tables[1])]
    parts.append(engine.sweep(r[cut:], c[cut:], buckets=tables[1], start=cut))
    assert (folded(tables[0]) == folded(tables[1])).all()
    one = together(whole.together.reshape(-1, 23))
    other = together(np.concatenate([part.together.reshape(-1, 23) for part in parts]))
    for name in ("count", "largest", "place", "equal", "nonfinite", "differing", "first", "first_at_all"):
        if not (name == "place" and one.largest <= 0):
            assert getattr(one, name) == getattr(other, name), name
    for name in ("reference_spread", "candidate_spread", "difference_spread"):
        size = {"reference_spread": r, "candidate_spread": c, "difference_spread": np.r_[r, c]}[name]
        scale = 1e-9 * np.square(size[np.isfinite(size)]).sum()
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=scale), name
    for i in (1, 2):
        mine, theirs = alone(whole[i].reshape(-1, 10)), alone(np.concatenate([p[i].reshape(-1, 10) for p in parts]))
        assert mine.count == theirs.count
        assert (mine.lowest, mine.highest, mine.zeros) == (theirs.lowest, theirs.highest, theirs.zeros)
        assert mine.size == pytest.approx(theirs.size, rel=1e-12, abs=0.0)


@modest
@given(sides(floats, (np.float32, np.float64, np.float16)), st.integers(1, 9), st.integers(2, 5))
def test_neither_threads_nor_the_size_of_parts_matter(pair, part, threads):
    r, c = pair
    whole = measure(r, c)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "CHUNK", part)
        patch.setattr(MEASURING, "CHUNK", part)
        alone_, many = measure(r, c), measure(r, c, threads=threads)
    np.testing.assert_equal(many.to_json(), alone_.to_json())
    assert_close(whole, many)


@modest
@given(sides(floats))
def test_both_engines_agree(pair):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MEASURING, "engine", lambda: numba_sweep)
        fast = measure(*pair)
        patch.setattr(MEASURING, "engine", lambda: numpy_sweep)
        slow = measure(*pair)
    assert_close(fast, slow)
    assert fast.worst == slow.worst
    assert fast.bitwise == slow.bitwise


@modest
@given(sides(floats))
def test_swapping_the_sides_flips_the_difference(pair):
    r, c = pair
    there, back = measure(r, c), measure(c, r)
    np.testing.assert_equal((there.reference, there.candidate), (back.candidate, back.reference))
    assert (there.equal, there.bitwise, there.nonfinite) == (back.equal, back.bitwise, back.nonfinite)
    np.testing.assert_equal((there.max_abs, there.percentiles), (back.max_abs, back.percentiles))
    slack = 1e-12 * there.mae if there.compared else 0.0
    assert there.mean == pytest.approx(-back.mean, abs=slack, nan_ok=True)
    for name in ("mae", "mse", "cosine", "correlation"):
        assert getattr(there, name) == pytest.approx(getattr(back, name), rel=1e-9, abs=1e-9, nan_ok=True), name
    if there.worst is not None:
        assert (there.worst.reference, there.worst.candidate) == (back.worst.candidate, back.worst.reference)


@modest
@given(sides(floats), st.randoms(use_true_random=False))
def test_the_same_shuffle_of_both_sides_changes_only_places(pair, random):
    r, c = pair
    order = list(range(r.size))
    random.shuffle(order)
    one, other = measure(r, c), measure(r[order], c[order])
    assert (one.nonfinite.either, one.nonfinite.differing) == (other.nonfinite.either, other.nonfinite.differing)
    assert (one.nonfinite.first is None) == (other.nonfinite.first is None)
    np.testing.assert_equal((one.max_abs, one.percentiles, one.equal), (other.max_abs, other.percentiles, other.equal))


@modest
@given(hnp.arrays(np.float64, st.integers(2, 40), elements=finite, unique=True), st.randoms(use_true_random=False))
def test_shuffling_one_side_shows_in_the_error_and_not_in_the_statistics(x, random):
    order = list(range(x.size))
    random.shuffle(order)
    metrics = measure(x, x[order])
    mine, theirs = metrics.reference, metrics.candidate
    assert (mine.min, mine.max, mine.zeros) == (theirs.min, theirs.max, theirs.zeros)
    assert mine.rms == pytest.approx(theirs.rms, rel=1e-12)
    assert (metrics.relative_l2 > 0) == (order != sorted(order))


@modest
@given(sides(floats))
def test_a_tensor_is_nothing_apart_from_itself(pair):
    r, _ = pair
    metrics = measure(r, r.copy())
    assert metrics.bitwise
    assert metrics.equal == r.size
    assert metrics.nonfinite.differing == 0
    if metrics.compared:
        assert (metrics.mse, metrics.relative_l2, metrics.sqnr, metrics.scale) == (0.0, 0.0, math.inf, 1.0)


@modest
@given(hnp.arrays(np.float64, st.integers(1, 40), elements=finite), st.floats(0.125, 8))
def test_a_scaled_tensor_has_that_scale(x, factor):
    if not x.any():
        x = x + 1.0
    metrics = measure(x, x * factor)
    assert metrics.scale == pytest.approx(factor, rel=1e-9)
    assert metrics.cosine == pytest.approx(1.0, rel=1e-9)
    assert metrics.relative_l2 == pytest.approx(abs(factor - 1), rel=1e-9, abs=1e-15)


@modest
@given(sides(floats))
def test_metrics_read_back(pair):
    metrics = measure(*pair)
    np.testing.assert_equal(Metrics.from_json(metrics.to_json()).to_json(), metrics.to_json())
