"""A fault and the same value without it, at each of the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerscope.diagnose.judge.judging import LIMITS, judge
from layerscope.diagnose.judge.measurement import Distance, rounding

FLOOR = Distance(
    2e-3, worst=0.02, peak=4.0, digest=1, count=4096, dtype=torch.bfloat16, rounding=rounding(torch.bfloat16)
)


def judged(code="same", **changed):
    got = replace(FLOOR, digest=2, **changed)
    return judge(got, floor=FLOOR, nudged=None, code=code)


def test_the_bits_of_the_floor_need_no_threshold():
    got = replace(FLOOR, error=1.0, scale=2.0, worst=9.0)
    assert judge(got, floor=got, nudged=None, code="same").kind == "noise"


def test_equal_values_are_the_same():
    assert judge(Distance(0.0), floor=None, nudged=None, code="same").kind == "same"


@pytest.mark.parametrize("code", LIMITS)
def test_the_error_may_exceed_the_floor_as_much_as_the_code_explains(code):
    limit = LIMITS[code]
    assert judged(code, error=FLOOR.error * limit * 0.99).kind == "noise"
    found = judged(code, error=FLOOR.error * limit * 1.01)
    assert found.kind == "root"
    assert found.ratio == pytest.approx(limit * 1.01)


def test_what_a_nudge_does_is_part_of_the_floor():
    nudged = replace(FLOOR, error=1e-2)
    got = replace(FLOOR, digest=2, error=9e-3)
    assert judge(got, floor=FLOOR, nudged=None, code="same").kind == "root"
    assert judge(got, floor=FLOOR, nudged=nudged, code="same").kind == "noise"


def test_a_factor_is_found_that_the_norm_hides():
    assert judged(scale=1.003).kind == "root"
    assert "times 1.0030" in judged(scale=1.003).because
    assert judged(scale=1.0002).kind == "noise"


def test_a_factor_that_a_few_elements_have_by_chance_is_none():
    assert judged(scale=1.003, count=4).kind == "noise"


def test_one_value_far_off_is_found_that_the_norm_hides():
    assert judged(worst=0.5).kind == "root"
    assert judged(worst=0.03).kind == "noise"


def test_rounding_of_the_largest_value_is_not_far_off():
    exact = Distance(0.0, digest=1, count=4096, dtype=torch.bfloat16)
    cast = replace(FLOOR, error=rounding(torch.bfloat16), worst=0.03, peak=8.0, digest=2)
    assert judge(cast, floor=exact, nudged=None, code="same").kind == "noise"
    assert judge(replace(cast, worst=0.5), floor=exact, nudged=None, code="same").kind == "root"


def test_sums_in_another_order_are_noise_in_float32():
    got = Distance(3e-6, digest=2, count=4096)
    assert judge(got, floor=None, nudged=Distance(6e-8), code="same").kind == "noise"
    assert judge(replace(got, error=3e-5), floor=None, nudged=Distance(6e-8), code="same").kind == "root"


def test_values_that_are_not_finite_are_told_from_those_that_the_dtype_makes_so():
    assert judged(nonfinite=1).kind == "nonfinite"
    overflows = replace(FLOOR, nonfinite=3)
    assert judge(replace(FLOOR, digest=2, nonfinite=3), floor=overflows, nudged=None, code="same").kind == "noise"


def test_another_shape_is_a_fault():
    assert judged(shape=False).kind == "root"


def test_indices_that_flip_as_with_rounding_are_noise():
    ids = Distance(0.01, changed=0.01, digest=1, count=100, dtype=torch.int64)
    got = replace(ids, digest=2)
    assert judge(got, floor=ids, nudged=None, code="same").kind == "noise"
    assert judge(replace(got, changed=0.1), floor=ids, nudged=None, code="same").kind == "root"


def test_only_doubtful_noise_is_said_to_be_doubtful():
    assert judge(FLOOR, floor=FLOOR, nudged=None, code="same").certain
    assert not judged(error=FLOOR.error * 1.1).certain
