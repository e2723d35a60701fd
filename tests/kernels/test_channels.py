"""The sums of each channel, made by the kernels, against numpy on the values themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from layerscope.stats import summarize
from layerscope.stats.device import KINDS, ChannelSums, Laid

WHERE = "cuda" if torch.cuda.is_available() else "cpu"


def random_values(dtype, shape, seed=0):
    torch.manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape).to(dtype)
    return (torch.randn(shape) * (1 + torch.arange(shape[-1]) % 7) + 0.25).abs().to(dtype)


def counted(tensors, axes):
    laid = [Laid.of(t.to(WHERE), axis) for t, axis in zip(tensors, axes, strict=True)]
    sums = ChannelSums().start(tensors[0].dtype, laid).cpu().numpy()
    parts = np.split(sums, np.cumsum([one.size for one in laid])[:-1])
    return [one.channels(part) for one, part in zip(laid, parts, strict=True)]


def assert_like_numpy(channels, tensor, axis):
    values = tensor.to(torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype)
    values = values.double().numpy() if values.is_floating_point() else values.numpy().astype(np.float64)
    rows = np.moveaxis(values, axis, -1).reshape(-1, values.shape[axis])
    rows = np.ma.masked_invalid(rows)
    np.testing.assert_array_equal(channels.finite, rows.count(axis=0))
    np.testing.assert_array_equal(channels.absmax, np.abs(rows).max(axis=0).filled(math.nan))
    np.testing.assert_allclose(channels.mean, rows.mean(axis=0).filled(math.nan), rtol=1e-12)
    np.testing.assert_allclose(channels.rms, np.sqrt((rows**2).mean(axis=0)).filled(math.nan), rtol=1e-12)
    for power, row in ((3, 4), (4, 5)):
        np.testing.assert_allclose(channels.table[row], (rows**power).sum(axis=0).filled(0.0), rtol=1e-12)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_dtype_has_numpys_numbers_of_each_channel(dtype):
    tensors = [random_values(dtype, shape) for shape in ((3, 5, 7), (40, 256), (600, 16), (1, 1))]
    for found, tensor in zip(counted(tensors, [-1] * 4), tensors, strict=True):
        assert found.axis == -1
        assert_like_numpy(found, tensor, -1)


def test_any_axis_and_any_strides_are_laid_out_first():
    base = random_values(torch.float32, (6, 10, 12))
    tensors = [base, base, base.permute(2, 0, 1), base[::2, :, 1:]]
    axes = [0, 1, 1, -2]
    for found, tensor, axis in zip(counted(tensors, axes), tensors, axes, strict=True):
        assert_like_numpy(found, tensor, axis)


def test_what_is_not_finite_is_left_out():
    tensor = random_values(torch.bfloat16, (1030, 32))
    tensor[700, 3], tensor[2, 4], tensor[:, 5] = math.nan, -math.inf, math.nan
    assert_like_numpy(*counted([tensor], [-1]), tensor, -1)


def test_a_tensor_without_such_an_axis_is_one_channel():
    channels = counted([torch.tensor(-3.0), torch.arange(10.0)], [-1, 1])
    assert [(c.axis, c.absmax.tolist(), c.finite.tolist()) for c in channels] == [
        (None, [3.0], [1]),
        (None, [9.0], [10]),
    ]


def test_the_same_tensor_gives_the_same_bits_and_those_of_the_cpu_but_for_rounding():
    tensor = random_values(torch.float32, (2000, 48))
    one, two = counted([tensor, tensor], [-1, -1])
    assert one == two
    host = summarize(tensor, channels=-1).channels
    np.testing.assert_array_equal(one.table[:2], host.table[:2])
    np.testing.assert_allclose(one.table, host.table, rtol=1e-12)
