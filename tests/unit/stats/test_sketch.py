"""The sketch: its bound on every kind of data, merging, text, histogram."""

import math

import numpy as np
import pytest

from layerscope.errors import BadText
from layerscope.stats import Histogram, Sketch

rng = np.random.default_rng(7)
N = 20_001
KINDS = {
    "normal": rng.standard_normal(N),
    "uniform": rng.random(N),
    "cauchy": rng.standard_cauchy(N),
    "lognormal": np.exp(5 * rng.standard_normal(N)),
    "constant": np.full(N, -3.7),
    "bimodal": np.concatenate([rng.standard_normal(N // 2) - 50, rng.standard_normal(N // 2) * 1e-3 + 50]),
    "integers": rng.integers(-5, 6, N).astype(float),
    "mostly zero": np.maximum(rng.standard_normal(N) - 1, 0),
    "denormal": rng.standard_normal(N) * 1e-310,
    "one huge": np.r_[rng.standard_normal(N), 1e300],
    "bucket edges": np.nextafter(np.repeat(1 + np.arange(65) / 64, 9), rng.choice([-9, 9], 65 * 9)),
    "two": np.array([1.0, 2.0]),
    "three": np.array([-1e-30, 5.0, 1e10]),
    "one": np.array([math.pi]),
}
ORDERS = {
    "as it came": lambda x: x,
    "sorted": np.sort,
    "reversed": lambda x: np.sort(x)[::-1],
    "from both ends": lambda x: np.stack([np.sort(x)[: x.size // 2], np.sort(x)[::-1][: x.size // 2]], 1).reshape(-1),
    "large first, then in steps": lambda x: np.sort(x)[::-1].reshape(-1)[np.argsort(np.arange(x.size) % 97)],
}
QUANTILES = [0.0, 1e-4, 0.01, 0.05, 0.25, 0.5, 0.503, 0.75, 0.95, 0.99, 0.9999, 1.0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_quantile_is_within_the_stated_bound(kind, order):
    values = ORDERS[order](KINDS[kind])
    if not values.size:
        values = KINDS[kind]
    sketch = Sketch.of(values)
    ordered = np.sort(values)
    for q in QUANTILES:
        rank = q * (values.size - 1)
        low, high = ordered[math.floor(rank)], ordered[min(math.floor(rank) + 1, values.size - 1)]
        bound = 2**-7 * max(abs(low), abs(high)) + 2.0**-126
        for known in ({}, {"low": ordered[0], "high": ordered[-1]}):
            assert abs(sketch.quantile(q, **known) - np.quantile(values, q)) <= bound, q


def test_the_bound_is_not_an_empty_promise():
    """Errors come close to 2**-7 and never over it: half as many buckets would break the bound."""
    values = 1 + np.arange(64 * 100) / 6400
    worst = max(abs(Sketch.of(np.array([v])).quantile(0.5) - v) / v for v in values)
    assert 0.9 * 2**-7 < worst < 2**-7


def test_known_extremes_are_exact():
    sketch = Sketch.of(np.array([1.001, 2.002, 3.003]))
    assert sketch.quantile(0.0, low=1.001, high=3.003) == 1.001
    assert sketch.quantile(1.0, low=1.001, high=3.003) == 3.003


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_0_and_1_is_refused(q):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Sketch.of(np.ones(3)).quantile(q)


def test_nothing_has_no_quantile():
    assert math.isnan(Sketch.of(np.empty(0)).quantile(0.5))


def test_what_is_not_finite_is_not_counted():
    assert Sketch.of(np.array([math.nan, math.inf, -math.inf, 2.0])) == Sketch.of(np.array([2.0]))


def test_buckets_are_of_fixed_logarithmic_width():
    sketch = Sketch.of(np.array([2.0**-126, -(2.0**-126), 2.0**-127, 0.0, 1.0, 1 + 1 / 64, -1.0]))
    assert sketch.keys.tolist() == [-(126 * 64 + 1), -1, 0, 1, 126 * 64 + 1, 126 * 64 + 2]
    assert sketch.counts.tolist() == [1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize("values", [KINDS["normal"], KINDS["one huge"], np.empty(0), np.zeros(3), np.array([-1e300])])
def test_the_text_reads_back(values):
    sketch = Sketch.of(values)
    assert Sketch.parse(str(sketch)) == sketch
    assert str(sketch).isascii()


def test_counts_of_any_size_read_back():
    sketch = Sketch.of(np.array([1.0, 2.0, 1e9]), np.array([1, 300, 2**62]))
    assert Sketch.parse(str(sketch)).counts.tolist() == [1, 300, 2**62]


def test_the_text_is_small():
    assert len(str(Sketch.of(rng.standard_normal(1_000_000)))) < 6000


TEXT = str(Sketch.of(np.arange(100.0)))


@pytest.mark.parametrize(
    "text", ["", "AAAA", "not base64!", TEXT[:-4], TEXT[:-8], TEXT[4:], TEXT[: len(TEXT) // 8 * 4], TEXT * 2]
)
def test_text_that_is_no_sketch_is_refused_in_a_sentence(text):
    if text == TEXT * 2:
        text = TEXT[:8] + TEXT  # damage in the middle, not behind the end
    with pytest.raises(BadText, match=r"is not a sketch \(.*\); pass what str\(sketch\) gave, unchanged\."):
        Sketch.parse(text)


def test_bytes_that_are_no_sketch_are_refused_in_a_sentence():
    data = Sketch.of(np.arange(100.0)).to_bytes()
    for damaged in (b"", b"AAAA", data[:-1], data[:5], data[3:], data[: len(data) // 2], data[:6] + data):
        with pytest.raises(BadText, match=r"these bytes are not a sketch \(.*\); pass what Sketch\.to_bytes gave\."):
            Sketch.from_bytes(damaged)


def test_the_histogram_counts_between_signed_powers_of_two():
    values = np.array([-3.0, -2.0, -0.3, 0.0, 0.0, 2.0**-130, 0.25, 1.0, 1.5, 7.9, math.nan])
    assert Sketch.of(values).histogram() == Histogram(
        edges=(-4.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        counts=(2, 0, 0, 1, 3, 1, 0, 2, 0, 1),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_histogram_agrees_with_numpys(kind):
    values = KINDS[kind]
    edges, counts = Sketch.of(values).histogram()
    assert len(edges) == len(counts) + 1
    assert list(edges) == sorted(edges)
    assert sum(counts) == values.size
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        inside = (values > low) & (values < high) | (values == (low if low > 0 else high if high < 0 else math.nan))
        tiny = np.abs(values) < 2.0**-126 if low < 0 < high else np.zeros(values.size, bool)
        assert count == np.count_nonzero(inside | tiny)


def test_positive_values_need_no_negative_bins():
    assert Sketch.of(np.array([1.0, 3.0])).histogram() == ((1.0, 2.0, 4.0), (1, 1))
    assert Sketch.of(np.zeros(5)).histogram() == ((-(2.0**-126), 2.0**-126), (5,))


@pytest.mark.parametrize("parts", [1, 2, 8, 64])
def test_a_histogram_of_finer_parts_agrees_with_numpys(parts):
    values = np.random.default_rng(0).normal(size=2000)
    edges, counts = Sketch.of(values).histogram(parts=parts, octaves=4)
    top = 2.0 ** math.floor(math.log2(np.abs(values).max())) * 2
    assert max(map(abs, edges)) <= top
    assert np.diff(edges)[np.array(edges[:-1]) > 0].max() <= top / 2 / parts
    assert list(counts) == np.histogram(values, edges)[0].tolist()  # no value of this kind is an edge itself
    assert sum(counts) == values.size


def test_small_magnitudes_gather_around_zero_only_when_asked():
    values = np.array([1e-9, -1e-9, 3.0])
    assert Sketch.of(values).histogram(octaves=2) == ((-1.0, 1.0, 2.0, 4.0), (2, 0, 1))
    assert len(Sketch.of(values).histogram().counts) > 30
    assert Sketch.of(np.zeros(5)).histogram(octaves=2) == Sketch.of(np.zeros(5)).histogram()


def test_parts_that_do_not_divide_an_octave_are_refused():
    with pytest.raises(ValueError, match="parts=3 does not divide the 64 buckets of an octave"):
        Sketch.of(np.ones(1)).histogram(parts=3)
