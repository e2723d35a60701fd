"""Every number against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from layerscope.diagnose.judge import measuring
from layerscope.diagnose.judge.measuring import bits, measured


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_numbers_are_those_of_numpy_in_float64(dtype):
    wanted = drawn(3, 40, 17)
    got = (wanted * 1.02 + 0.01 * drawn(3, 40, 17, seed=1)).to(dtype)
    found = measured(wanted, got)
    r, c = wanted.double().numpy(), got.double().numpy()
    d = c - r
    rms = math.sqrt((r * r).mean())
    assert found.error == pytest.approx(np.linalg.norm(d) / np.linalg.norm(r), rel=1e-5)
    assert found.scale == pytest.approx((r * c).sum() / (r * r).sum(), rel=1e-6)
    assert found.worst == pytest.approx(abs(d).max() / rms, rel=1e-5)
    assert found.peak == pytest.approx(abs(r).max() / rms, rel=1e-5)
    assert (found.count, found.dtype, found.shape, found.nonfinite, found.changed) == (r.size, dtype, True, 0, 0.0)


def test_a_tensor_that_is_read_piece_by_piece_has_the_numbers_of_the_whole(monkeypatch):
    wanted = drawn(41, 7)
    got = wanted * 1.02 + 0.01 * drawn(41, 7, seed=1)
    wanted[3], got[5], got[20] = -1e9, -math.inf, math.nan
    digest = bits(got)
    monkeypatch.setattr(measuring, "PIECE", 10)
    found = measured(wanted, got)
    r, c = (np.delete(side.double().numpy(), [3, 5, 20], axis=0) for side in (wanted, got))
    d, rms = c - r, math.sqrt((r * r).sum() / wanted.numel())
    assert found.error == pytest.approx(np.linalg.norm(d) / np.linalg.norm(r), rel=1e-5)
    assert found.scale == pytest.approx((r * c).sum() / (r * r).sum(), rel=1e-6)
    assert found.worst == pytest.approx(abs(d).max() / rms, rel=1e-5)
    assert found.peak == pytest.approx(abs(r).max() / rms, rel=1e-5)
    assert (found.nonfinite, found.changed) == (7, 14 / 287)
    assert found.digest == digest != bits(got + 1)


def test_an_axis_of_one_stands_for_all_where_that_is_asked_for():
    one, many = torch.arange(18)[None], torch.arange(18).expand(2, 18)
    assert measured(one, many, broadcast=True).equal
    assert measured(many, one, broadcast=True).equal
    assert measured(one, many + 1, broadcast=True).changed == 1.0
    assert not measured(one, many).shape


@pytest.mark.parametrize("shape", [(2, 10), (0, 18), (1, 2, 18)])
def test_other_shapes_do_not_stretch(shape):
    assert not measured(torch.arange(18)[None], torch.zeros(shape, dtype=torch.int64), broadcast=True).shape


def test_equal_values_are_equal_and_need_no_numbers():
    value = drawn(5, 7)
    found = measured(value, value.clone())
    assert found.equal
    assert found.error == 0.0


def test_another_number_of_elements_cannot_be_compared():
    found = measured(drawn(4, 6), drawn(4, 5))
    assert not found.shape
    assert not found.equal
    assert found.error == math.inf


def test_the_same_elements_in_another_shape_can():
    value = drawn(4, 6)
    assert measured(value, value.reshape(2, 2, 6)).equal


def test_values_that_only_one_side_has_finite_are_counted_and_left_out_of_the_sums():
    wanted = drawn(10)
    got = wanted.clone()
    got[3], got[7] = math.nan, math.inf
    found = measured(wanted, got)
    assert found.nonfinite == 2
    assert found.error == 0.0


def test_what_is_not_finite_on_both_sides_is_no_difference():
    wanted = drawn(10)
    wanted[2] = math.nan
    found = measured(wanted, wanted.clone().half().float())
    assert found.nonfinite == 0
    assert 0 < found.error < 1e-3


def test_a_mask_is_compared_as_a_pattern_whatever_number_stands_for_minus_infinity():
    wanted = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), torch.finfo(torch.float32).min)
    same = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -65504.0).half()
    shifted = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(2).bool(), -math.inf)
    assert measured(wanted, same).equal
    assert measured(wanted, shifted).changed == pytest.approx(7 / 64)


def test_integers_and_truth_values_are_counted():
    wanted = torch.arange(20)
    got = wanted.clone()
    got[:5] += 1
    assert measured(wanted, got).changed == 0.25
    assert measured(wanted > 3, got > 3).changed == pytest.approx(1 / 20)


def test_complex_values_are_compared_as_their_parts():
    wanted = torch.complex(drawn(6), drawn(6, seed=1))
    found = measured(wanted, wanted * 1.5)
    assert found.error == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("wanted", [torch.empty(0, 4), torch.zeros(3)])
def test_empty_and_zero_tensors_have_an_answer(wanted):
    assert measured(wanted, wanted.clone()).equal
    if wanted.numel():
        assert measured(wanted, wanted + 1).error == math.inf


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_bits_tell_any_change_and_any_exchange(dtype):
    value = torch.arange(1, 42).to(torch.float32).remainder(5).to(dtype)
    other = value.clone()
    other[-1] = torch.tensor(0.0).to(dtype) if float(value[-1]) else torch.tensor(1.0).to(dtype)
    swapped = value.clone()
    swapped[[3, 4]] = value[[4, 3]] if dtype is not torch.float8_e4m3fn else swapped[[3, 4]]
    assert bits(value) == bits(value.clone())
    assert bits(value) != bits(other)
    if not torch.equal(swapped.float(), value.float()):
        assert bits(value) != bits(swapped)


def test_bits_do_not_depend_on_strides():
    value = drawn(6, 8)
    assert bits(value.t()) == bits(value.t().contiguous())
