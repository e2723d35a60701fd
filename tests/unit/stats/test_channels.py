"""The statistics of each channel against numpy, for every dtype, shape, layout and axis, by both engines."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests.unit.stats.test_sweeps import assert_same, random_bits, values_of

from layerscope.errors import BadText
from layerscope.stats import Channels, Summary, summarize
from layerscope.stats.tensor_views import ITEMS

DTYPES = [getattr(torch, name) for name in ITEMS]
SHAPES = [(), (0,), (0, 4), (3, 0, 2), (1,), (7,), (33, 65), (2, 3, 5, 7), (40, 1000), (3, 70_000)]

pytestmark = [
    pytest.mark.usefixtures("counting"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@np.errstate(all="ignore")
def assert_channels(channels, values, axis):
    """What numpy says of each channel, in its widest float."""
    last = np.moveaxis(values, axis, -1)
    rows = last.reshape(math.prod(last.shape[:-1]), last.shape[-1]).astype(np.longdouble)
    finite = np.isfinite(rows)
    n, zeroed = finite.sum(axis=0), np.where(finite, rows, 0)
    largest = np.abs(zeroed).max(axis=0, initial=0.0)
    np.testing.assert_array_equal(channels.finite, n)
    ulp = {"rtol": 3e-16}  # of the modulus of complex values, which is itself rounded
    np.testing.assert_allclose(channels.absmax, np.where(n > 0, largest, math.nan).astype(float), **ulp)
    mean = zeroed.sum(axis=0) / n
    scale = np.abs(zeroed).sum(axis=0) / n
    for found, wanted, slack in (
        (channels.mean, mean, scale),
        (channels.rms, np.sqrt((zeroed**2).sum(axis=0) / n), 0 * mean),
        (channels.share, np.where(n > 0, largest, math.nan) / largest.max(initial=0.0), 0 * mean),
    ):
        there = np.isfinite(wanted.astype(float))  # squares of float64 may leave its range; numpy's longdouble does not
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        small = there & (wanted**2 < 1e300) & ((wanted == 0) | (np.abs(wanted) > 1e-150))
        error = np.abs(found[small] - wanted[small])
        assert (error <= 1e-11 * np.maximum(np.abs(wanted), slack)[small]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_of_any_dtype_and_shape_have_numpys_statistics_of_each_channel(dtype):
    for shape in SHAPES:
        tensor = random_bits(dtype, shape)
        values = values_of(tensor)
        if dtype is torch.float4_e2m1fn_x2:
            values = values.reshape((*shape[:-1], 2 * shape[-1]) if shape else (2,))
        axes = range(-len(shape), len(shape)) if shape else [-1]
        for axis in axes:
            summary = summarize(tensor, channels=axis)
            if shape:
                assert summary.channels.axis == axis
                assert_channels(summary.channels, values, axis)
            else:
                assert summary.channels.axis is None
                assert_channels(summary.channels, values.reshape(-1, 1), -1)
            assert_same(dataclasses.replace(summary, channels=None), summarize(tensor))  # the rest is as without


@pytest.mark.parametrize("shape", [(512, 512), (5, 300), (64, 96, 40), (100_003, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_finite_tensors_of_many_blocks_have_numpys_statistics(dtype, shape):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * torch.rand(shape[-1]) + 0.5).to(dtype)
    for axis in range(len(shape)):
        assert_channels(summarize(tensor, channels=axis).channels, tensor.to(torch.float64).numpy(), axis)


def test_permuted_expanded_sliced_and_negated_tensors_are_seen_as_they_are():
    torch.manual_seed(0)
    base = torch.randn(6, 20, 30)
    views = [base.permute(2, 0, 1), base.expand(4, 6, 20, 30), base[::2, 1:, ::3], torch._neg_view(base)]
    for view in views:
        for axis in range(view.dim()):
            assert_channels(summarize(view, channels=axis).channels, view.resolve_neg().double().numpy(), axis)


def test_a_value_that_is_not_finite_leaves_the_other_blocks_and_channels_as_they_are():
    torch.manual_seed(0)
    tensor = torch.randn(2000, 100)
    tensor[1500, 7], tensor[3, 9], tensor[:, 11] = math.nan, -math.inf, math.nan
    channels = summarize(tensor, channels=-1).channels
    assert_channels(channels, tensor.double().numpy(), -1)
    assert channels.finite.tolist()[7:12] == [1999, 2000, 1999, 2000, 0]
    assert all(math.isnan(getattr(channels, name)[11]) for name in ("absmax", "mean", "rms", "share", "kurtosis"))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_kurtosis_is_the_fourth_central_moment_over_the_squared_variance(scale):
    rng = np.random.default_rng(0)
    values = np.stack([rng.normal(size=9999), rng.laplace(size=9999), rng.uniform(size=9999) + 3], axis=1) * scale
    channels = summarize(values, channels=1).channels
    away = values - values.mean(axis=0)
    wanted = (away**4).mean(axis=0) / (away**2).mean(axis=0) ** 2
    assert channels.kurtosis == pytest.approx(wanted, rel=1e-9)
    away = values - values.mean()
    assert channels.whole.kurtosis == pytest.approx([(away**4).mean() / (away**2).mean() ** 2], rel=1e-9)


def test_kurtosis_is_not_made_up_where_float64_cannot_tell_it():
    rng = np.random.default_rng(0)
    values = np.stack([np.full(1000, 7.0), 1e6 + rng.normal(size=1000), rng.normal(size=1000)], axis=1)
    assert np.isnan(summarize(values, channels=-1).channels.kurtosis).tolist() == [True, True, False]


def test_the_share_of_tokens_that_carry_a_channel_is_counted():
    values = np.zeros((1000, 3))
    values[:, 0], values[:250, 1], values[17, 2] = -4.0, 4.0, 4.0
    assert summarize(values, channels=-1).channels.tokens.tolist() == [1.0, 0.25, 0.001]


def test_adding_up_is_what_one_tensor_with_the_values_of_both_would_give():
    torch.manual_seed(0)
    one, two = torch.randn(300, 48), torch.randn(50, 48) * 5
    both = summarize(one, channels=-1) + summarize(two, channels=-1)
    assert_channels(both.channels, torch.cat([one, two]).double().numpy(), -1)
    assert both.channels == summarize(two, channels=-1).channels + summarize(one, channels=-1).channels
    assert sum([summarize(one, channels=-1).channels]) == summarize(one, channels=-1).channels


def test_summaries_whose_channels_do_not_fit_are_added_without_them():
    one = summarize(torch.randn(4, 8), channels=-1)
    for other in (torch.randn(4, 9), torch.randn(8, 4)):
        assert (one + summarize(other, channels=-1)).channels is None
    assert (one + summarize(torch.randn(4, 8))).channels is None
    assert (one + summarize(torch.randn(4, 8), channels=1)).channels is None
    with pytest.raises(ValueError, match=r"8 channels along axis -1 and 4 channels along axis 0 cannot be added up"):
        one.channels + summarize(torch.randn(4, 8), channels=0).channels


def test_a_tensor_without_the_axis_or_with_too_many_channels_is_one_channel():
    for tensor, axis in ((torch.randn(6), 1), (torch.tensor(3.0), -1), (torch.randn(3, 300_000), -1)):
        channels = summarize(tensor, channels=axis).channels
        assert (channels.axis, len(channels)) == (None, 1)
        assert_channels(channels, tensor.double().numpy().reshape(-1, 1), -1)


def test_what_is_packed_and_what_is_written_reads_back():
    tensor = torch.randn(30, 17)
    for channels in (summarize(tensor, channels=a).channels for a in (-1, 0, 5)):
        assert Channels.unpacked(channels.packed()) == channels
    tensor[2, 3] = math.nan
    summary = summarize(tensor, channels=-1)
    assert Summary.from_json(summary.to_json()) == summary
    assert Channels.unpacked(summary.channels.packed()).finite[3] == 29
    empty = summarize(torch.empty(4, 0), channels=-1).channels
    assert Channels.unpacked(empty.packed()) == empty


@pytest.mark.parametrize("spoil", [lambda b: b[:10], lambda b: b[:-3], lambda b: b"no" + b[2:], lambda b: b[:-8]])
def test_other_bytes_are_refused(spoil):
    packed = summarize(torch.randn(3, 5), channels=-1).channels.packed()
    with pytest.raises(BadText, match="these bytes are not channels"):
        Channels.unpacked(spoil(packed))


def test_rows_for_a_table():
    row = summarize(np.array([[3.0, 1.0], [-4.0, 1.0]]), channels=-1).channels.to_dicts()[0]
    assert row.pop("kurtosis") == pytest.approx(1.0)
    assert row.pop("tokens") == pytest.approx(25**2 / (2 * (81 + 256)))
    assert row == {
        "channel": 0,
        "finite": 2,
        "absmax": 4.0,
        "mean": -0.5,
        "rms": pytest.approx(12.5**0.5),
        "share": 1.0,
    }


# Which stand out ----------------------------------------------------------------------------------


def channels_of(sizes):
    return summarize(np.array([sizes, [-s for s in sizes]], float), channels=-1).channels


def test_a_channel_far_above_the_others_stands_out_and_costs_bits():
    channels = channels_of([1.0] * 30 + [1.5, 48.0, 0.0, 12.0])
    assert np.flatnonzero(channels.outlying()).tolist() == [31, 33]
    assert channels.bits()[[31, 33]].tolist() == [5.0, 3.0]  # 48 / 1.5 and 12 / 1.5
    assert channels.bits()[:31].tolist() == [0.0] * 31
    assert np.flatnonzero(channels.outlying(times=20)).tolist() == [31]
    assert channels.bits(times=20)[31] == 2.0  # the next one is ordinary now


@pytest.mark.parametrize(
    "sizes",
    [[], [0.0] * 9, [2.0], [1.0, 100.0], [1.0] * 64, [2.0**i for i in range(32)], [1.0] * 40 + [5.9]],
    ids=["none", "zero", "one", "two", "alike", "of many sizes", "a little above"],
)
def test_where_no_channel_is_far_above_the_others_none_stands_out(sizes):
    channels = channels_of(sizes)
    assert not channels.outlying().any()
    assert not channels.bits().any()
