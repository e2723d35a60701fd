"""What a device leaves is read as the summary it stands for; its kernels are tested in tests/kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from layerscope.stats import summarize
from layerscope.stats.device import ResultBuffer, Results


def left_by_a_device(values, *, wide=False, power=0):
    """Head and buckets as the kernels write them, from the definitions."""
    exact = values.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    scaled = np.ldexp(finite, power)
    mean = scaled.mean() if finite.size else 0.0
    head = np.zeros(32, np.int64)
    real = head.view(np.float64)
    real[:3] = mean, ((scaled - mean) ** 2).sum(), np.abs(scaled).sum()
    real[4:6] = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    head[3] = finite.size
    head[6:10] = (exact == 0).sum(), np.isnan(exact).sum(), (exact == math.inf).sum(), (exact == -math.inf).sum()
    head[10:13] = -1, 7, power
    real[16:26] = np.resize(exact, 10)
    bits = finite.view(np.uint64) >> np.uint64(46) if wide else finite.astype(np.float32).view(np.uint32) >> 17
    counted = bits[np.abs(finite) >= 2.0**-126]
    places, counts = np.unique(counted.astype(np.int32), return_counts=True)
    return head, places, counts.astype(np.int32)


def read(*parts, wide=False, full=True):
    """Put several tensors' parts on one buffer, their lists in reverse, and read it."""
    buckets = (1 << (18 if wide else 15)) if full else 0
    words = np.full(len(parts) * (32 + buckets), -1)  # what nobody has written to
    at, listed = 0, words[len(parts) * 32 :]
    for number, (head, places, counts) in reversed(list(enumerate(parts))):
        size = places.size if full else 0
        listed[at : at + size] = (places + (counts.astype(np.int64) << 32))[:size]
        head[13], head[14] = size, at
        words[number * 32 : (number + 1) * 32] = head
        at += size
    return Results.read(ResultBuffer(torch.from_numpy(words), len(parts), buckets, address=0))


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=5000).astype(np.float32),
        np.random.default_rng(1).normal(size=300).astype(np.float32) ** 15,
        np.array([0.0, -0.0, 1e-39, -1.5, math.nan, math.inf, -math.inf], np.float32),
        np.array([2.5] * 9, np.float32),
        np.array([-1.0, -2.0, -1e30], np.float32),
    ],
    ids=["normal", "heavy tails", "not finite", "constant", "negative"],
)
def test_a_sheet_reads_as_the_summary_of_its_tensor(values):
    [numbers] = read(left_by_a_device(values))
    summary = numbers.summary("float32", values.shape)
    expected = summarize(values)
    for name in ("count", "nan", "posinf", "neginf", "zeros", "min", "max", "sketch", "dtype", "shape"):
        assert getattr(summary, name) == getattr(expected, name), name
    for name in ("mean", "std", "l1"):
        assert getattr(summary, name) == pytest.approx(getattr(expected, name), rel=1e-12), name
    assert repr(summary.first) == repr(expected.first)
    assert (summary.fingerprint, summary.placed) == (2**64 - 1, 7)


def test_lists_of_several_tensors_are_told_apart():
    many = [np.random.default_rng(seed).normal(size=100 + seed).astype(np.float32) for seed in range(5)]
    sketches = [n.summary("float32", ()).sketch for n in read(*map(left_by_a_device, many))]
    assert sketches == [summarize(values).sketch for values in many]


def test_what_nobody_has_written_to_is_not_kept():
    many = [np.random.default_rng(seed).normal(size=100 + seed).astype(np.float32) for seed in range(5)]
    parts = [left_by_a_device(values) for values in many]
    found = read(*parts)
    assert found._listed.size == 2 * sum(places.size for _, places, _ in parts)
    assert found._listed.base.size * 8 < 5 * 256 + 8 * 5 * 105


def test_tensors_without_a_bucket_that_holds_something_leave_no_list():
    zeros, nothing = np.zeros(7, np.float32), np.array([math.nan, math.inf], np.float32)
    found = read(left_by_a_device(zeros), left_by_a_device(nothing))
    sketches = [n.summary("float32", ()).sketch for n in found]
    assert sketches == [summarize(zeros).sketch, summarize(nothing).sketch]


def test_a_bucket_is_counted_as_often_as_there_can_be_items():
    head, places, _ = left_by_a_device(np.array([1.5, -1.5], np.float32))
    head[3] = 2**31 - 1 + 5
    [numbers] = read((head, places, np.array([2**31 - 1, 5], np.int32)))
    assert numbers.summary("float32", ()).sketch.counts.tolist() == [5, 2**31 - 1]


def test_float64_is_scaled_back_and_has_wider_buckets():
    values = np.random.default_rng(0).normal(size=1000) * 1e300
    [numbers] = read(left_by_a_device(values, wide=True, power=-998), wide=True)
    summary, expected = numbers.summary("float64", values.shape), summarize(values)
    assert summary.sketch == expected.sketch
    assert summary.std == pytest.approx(expected.std, rel=1e-12)
    assert summary.l1 == pytest.approx(expected.l1, rel=1e-12)


def test_a_sum_beyond_float64_is_infinite_as_on_the_cpu():
    values = np.array([1.7e308] * 9 + [-1.7e308])
    [numbers] = read(left_by_a_device(values, wide=True, power=-1022), wide=True)
    assert numbers.summary("float64", (10,)).l1 == summarize(values).l1 == math.inf


def test_moments_come_without_sketch_and_fingerprints():
    values = np.array([1.0, 2.0, math.nan], np.float32)
    [numbers] = read(left_by_a_device(values), full=False)
    summary = numbers.summary("float32", (3,))
    assert summary == summarize(values, level="moments")


def test_without_a_finite_value_there_is_no_mean():
    [numbers] = read(left_by_a_device(np.array([math.nan, math.inf], np.float32)))
    summary = numbers.summary("float32", (2,))
    assert math.isnan(summary.mean)
    assert math.isnan(summary.max)
    assert summary.l1 == 0.0
