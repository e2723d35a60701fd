"""What summaries alone can say, with numpy's word on what they cannot."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layerscope.compare.run_statistics import at_least, by_statistics
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import MemoryRun

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


def entry(tensor, *, keep="summary", level="full"):
    run = MemoryRun()
    summary = summarize(tensor, level=level) if keep != "tensor" and tensor is not None else None
    run.add(Point("a"), Moment(), tensor=tensor if keep != "summary" else None, summary=summary)
    return next(run.records())


def judged(reference, candidate, **options):
    kind, because = by_statistics(entry(reference, **options), entry(candidate, **options))
    return SimpleNamespace(kind=kind, because=because)


def test_equal_fingerprints_are_the_same():
    found = judged(X, X.clone())
    assert found.kind == "same"
    assert found.because == "the fingerprints of all bits are equal; tensors were not kept"


def test_a_permutation_is_not_the_same_though_every_statistic_is():
    other = X.flip(0)
    mine, theirs = summarize(X), summarize(other)
    assert (mine.mean, mine.min, mine.max) == (pytest.approx(theirs.mean), theirs.min, theirs.max)
    assert judged(X, other).kind == "noise"


def test_without_fingerprints_nothing_is_called_the_same():
    assert judged(X, X.clone(), level="moments").kind == "noise"


def test_fingerprints_of_another_dtype_are_not_compared():
    numbers = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert judged(numbers, numbers.view(torch.int32)).kind != "same"


def test_both_constant_with_one_value_are_the_same_in_any_dtype():
    assert judged(torch.ones(4), torch.ones(4, dtype=torch.bfloat16)).kind == "same"
    assert judged(torch.zeros(4), torch.full((4,), 0.5)).kind == "degenerate"


def test_what_rounding_explains_is_noise_and_what_it_does_not_a_root():
    assert judged(X, X.bfloat16()).kind == "noise"
    found = judged(X, X * 1.5)
    assert found.kind == "root"
    assert found.because == "statistics alone: relative L2 is 0.5 at least"


def test_a_shift_that_keeps_the_norm_is_seen_by_the_mean():
    wave = torch.sin(torch.arange(64.0))
    mine = wave - wave.mean()
    mirrored = -(mine + 1)  # mean -1 against 1, and the same norm
    found = judged(mine + 1, mirrored)
    assert found.kind == "root"


def test_other_numbers_of_nan_are_nonfinite():
    broken = X.clone()
    broken[0, 0], broken[0, 1] = torch.nan, torch.inf
    found = judged(X, broken)
    assert found.kind == "nonfinite"
    assert found.because == "1 NaN and 1 infinite values in the candidate, 0 NaN and 0 infinite values in the reference"
    assert judged(broken, broken.clone()).kind == "same"


def test_a_constant_reference_is_degenerate():
    assert judged(torch.zeros(4), torch.ones(4)).kind == "degenerate"
    assert judged(torch.ones(4), torch.ones(4)).kind == "same"


def test_shapes_that_differ_are_named():
    found = judged(X, X.T)
    assert (found.kind, found.because) == ("unpaired", "shapes differ, [8, 16] against [16, 8]")


def test_a_record_with_neither_tensor_nor_summary_is_missing():
    nothing = entry(None)
    kind, because = by_statistics(nothing, entry(X))
    assert (kind, because) == ("missing", "the reference kept neither a tensor nor a summary of it")
    kind, because = by_statistics(entry(X), nothing)
    assert (kind, because) == ("missing", "the candidate kept neither a tensor nor a summary of it")


def test_a_tensor_on_one_side_is_summarized():
    assert by_statistics(entry(X), entry(X.clone(), keep="tensor"))[0] == "same"
    assert by_statistics(entry(X, keep="tensor"), entry(X * 2))[0] == "root"


def test_of_a_zero_reference_no_bound_is_finite():
    zero, one = summarize(torch.zeros(4)), summarize(torch.ones(4))
    assert at_least(zero, one) == math.inf
    assert at_least(zero, zero) == 0.0


VALUES = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
ARRAYS = hnp.arrays(np.float32, st.shared(st.integers(1, 40), key="n"), elements=VALUES)


@settings(max_examples=200, deadline=None)
@given(ARRAYS, ARRAYS)
def test_the_bound_is_never_more_than_the_error(reference, candidate):
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    bound = at_least(summarize(torch.from_numpy(reference)), summarize(torch.from_numpy(candidate)))
    norm = np.linalg.norm(r)
    error = np.linalg.norm(c - r) / norm if norm else math.inf if c.any() else 0.0
    assert bound <= error * (1 + 1e-9) + 1e-12


def test_the_bound_is_reached_by_a_scaled_copy():
    assert at_least(summarize(X), summarize(X * 3)) == pytest.approx(2.0)
