"""Laws of statistics that add up."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerscope.stats import Sketch, Summary, fingerprint, numba_engine, numpy_engine, summarize

modest = settings(max_examples=120, deadline=None)

narrow = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32))
halves = hnp.arrays(np.float16, st.integers(0, 40), elements=st.floats(width=16))
# Beyond 1e150 the moments of a merge may overflow where those of the whole do not, and the other way round.
wide = hnp.arrays(
    np.float64,
    st.integers(0, 40),
    elements=st.one_of(st.floats(-1e150, 1e150), st.sampled_from([math.nan, math.inf, -math.inf, -0.0])),
)
whole = hnp.arrays(st.sampled_from([np.int8, np.uint8, np.int16, np.int64, np.bool_]), st.integers(0, 40))
arrays = st.one_of(narrow, halves, wide, whole)
exact = ("count", "finite", "nan", "posinf", "neginf", "zeros", "fingerprint", "placed", "dtype", "shape", "tensors")


def assert_same(a: Summary, b: Summary) -> None:
    """Equal exactly where merging is exact, to rounding where it is not."""
    for name in exact:
        assert getattr(a, name) == getattr(b, name), name
    for name in ("min", "max", "absmax"):
        assert getattr(a, name) == getattr(b, name) or not a.finite, name
    assert a.sketch == b.sketch
    np.testing.assert_array_equal(a.first, b.first)
    assert a.l1 == pytest.approx(b.l1, rel=1e-12, abs=0.0)
    assert a.rms == pytest.approx(b.rms, rel=1e-9, abs=1e-300, nan_ok=True)
    # Spread and mean are known to rounding of the largest value, which may be far larger than either.
    scale = 1e-9 * (a.absmax if a.finite else 0.0)
    assert a.mean == pytest.approx(b.mean, rel=1e-9, abs=scale, nan_ok=True)
    assert a.std == pytest.approx(b.std, rel=1e-9, abs=scale, nan_ok=True)


@modest
@given(arrays, arrays)
@example(np.array([0.0]), np.array([-0.0]))
@example(np.array([0.1, 0.3]), np.array([7.0]))
def test_merging_is_commutative_to_the_bit(x, y):
    a, b = summarize(x), summarize(y)
    assert a + b == b + a


@modest
@given(arrays, arrays, arrays)
def test_merging_is_associative(x, y, z):
    a, b, c = summarize(x), summarize(y), summarize(z)
    assert_same((a + b) + c, a + (b + c))


@modest
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(0, 9), st.just(5)), elements=st.floats(width=32)), st.integers(0, 9)
)
def test_channels_of_the_parts_add_up_to_those_of_the_whole_in_any_order(x, at):
    one, two = (summarize(part, channels=-1).channels for part in (x[:at], x[at:]))
    both = summarize(x, channels=-1).channels
    assert one + two == two + one
    np.testing.assert_array_equal((one + two).table[:2], both.table[:2])
    exact = np.where(np.isfinite(x), x, 0).astype(np.float64)
    for power in (1, 2, 3, 4):
        slack = 1e-14 * (np.abs(exact) ** power).sum(axis=0)
        for found in (one + two, both):
            assert (np.abs(found.table[1 + power] - (exact**power).sum(axis=0)) <= slack).all()


@modest
@given(st.one_of(narrow, wide).flatmap(lambda x: st.tuples(st.just(x), st.integers(0, x.size))))
def test_merging_the_parts_gives_the_summary_of_the_whole(cut):
    x, at = cut
    parts, both = summarize(x[:at]) + summarize(x[at:]), summarize(x)
    assert parts.sketch == both.sketch
    assert parts.fingerprint == both.fingerprint
    for name in ("count", "finite", "nan", "posinf", "neginf", "zeros"):
        assert getattr(parts, name) == getattr(both, name)
    if both.finite:
        assert (parts.min, parts.max) == (both.min, both.max)
        assert parts.rms == pytest.approx(both.rms, rel=1e-9, abs=1e-300)
        assert parts.mean == pytest.approx(both.mean, rel=1e-9, abs=1e-9 * both.absmax)
        assert parts.std == pytest.approx(both.std, rel=1e-9, abs=1e-9 * both.absmax)


@modest
@given(arrays, st.randoms(use_true_random=False))
def test_order_matters_to_nothing_but_the_places(x, random):
    order = list(range(x.size))
    random.shuffle(order)
    a, b = summarize(x), summarize(x[order])
    assert (a.sketch, a.fingerprint, a.count, a.zeros) == (b.sketch, b.fingerprint, b.count, b.zeros)
    bits = x.view(np.uint8).reshape(x.size, x.itemsize)
    assert (a.placed == b.placed) == bool((bits == bits[order]).all())


@modest
@given(arrays)
def test_json_reads_back(x):
    summary = summarize(x)
    assert Summary.from_json(json.loads(json.dumps(summary.to_json(), allow_nan=False))) == summary


@modest
@given(st.one_of(narrow, wide), st.floats(0, 100))
def test_percentiles_keep_their_bound(x, q):
    finite = np.sort(x[np.isfinite(x)].astype(np.float64))
    estimate = summarize(x).percentile(q)
    if not finite.size:
        assert math.isnan(estimate)
        return
    rank = math.floor(q / 100 * (finite.size - 1))
    near = finite[max(rank - 1, 0) : rank + 3]  # one further on each side: q / 100 * (n - 1) may round across a rank
    low, high = near.min(), near.max()
    assert low - 2**-7 * abs(low) - 2.0**-126 <= estimate <= high + 2**-7 * abs(high) + 2.0**-126


@modest
@given(hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_a_sketch_is_the_sum_of_the_sketches_of_its_values(values):
    one_by_one = Sketch.of(values[:0])
    for value in values:
        one_by_one = one_by_one + Sketch.of(np.array([value]))
    assert one_by_one == Sketch.of(values)
    assert Sketch.parse(str(one_by_one)) == one_by_one
    assert Sketch.from_bytes(one_by_one.to_bytes()) == one_by_one


@modest
@given(arrays, st.data())
def test_a_changed_bit_changes_both_fingerprints(x, data):
    if not x.size or x.dtype == np.bool_:
        x = np.ones(3, np.float32)
    changed = x.copy()
    place = data.draw(st.integers(0, x.nbytes - 1))
    changed.view(np.uint8)[place] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    one, other = fingerprint(x), fingerprint(changed)
    assert one[:16] != other[:16]
    assert one[16:] != other[16:]


@modest
@given(st.integers(1, 5000), st.integers(0, 10_000), st.sampled_from(["u1", "u2", "u4", "u8"]))
def test_both_engines_fingerprint_alike_from_any_position(size, start, kind):
    words = np.random.default_rng(size).integers(0, 256, size).astype(kind)
    assert numba_engine.fingerprints(words, start) == numpy_engine.fingerprints(words, start)
    cut = size // 3
    parts = [numba_engine.fingerprints(words[:cut], start), numba_engine.fingerprints(words[cut:], start + cut)]
    assert tuple(sum(part) % 2**64 for part in zip(*parts, strict=True)) == numba_engine.fingerprints(words, start)
