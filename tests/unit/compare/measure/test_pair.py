"""Every metric against numpy in float64, for every pair of dtypes, by both engines."""

import dataclasses
import math
import os
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from layerscope.compare.measure import EPSILON, measure, numba_sweep, numpy_sweep, operands
from layerscope.compare.measure.metrics import PERCENTILES, Metrics
from layerscope.compare.measure.operands import operand
from layerscope.errors import Damaged, Unsupported
from layerscope.points import Moment, Point
from layerscope.stats.tensor_views import ITEMS
from layerscope.store import Blob, Manifest, MemoryRun, Writer, open_run

# The package exports the function under the same name.
MEASURING = import_module("layerscope.compare.measure.pair")

DTYPES = [getattr(torch, name) for name in ITEMS]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(params=["numba", "numpy"])
def sweeping(request, monkeypatch):
    chosen = numba_sweep if request.param == "numba" else numpy_sweep
    monkeypatch.setattr(MEASURING, "engine", lambda: chosen)
    return chosen


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(operands, "CHUNK", 70_000)
    monkeypatch.setattr(MEASURING, "CHUNK", 70_000)


def values_of(tensor):
    """What torch takes the values to be, as float64 or complex128."""
    tensor = torch.as_tensor(tensor)
    if tensor.dtype is torch.float4_e2m1fn_x2:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        packed = tensor.view(torch.uint8).numpy()
        return np.stack([table[packed & 15], table[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).resolve_conj().resolve_neg().numpy()
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.numpy().astype(np.float64)
    return tensor.to(torch.float64).numpy()


def modulus(x):
    return np.where(np.isnan(x), math.nan, np.abs(x)) if np.iscomplexobj(x) else x


@np.errstate(all="ignore")
def truth(reference, candidate):
    """The definitions, written down plainly."""
    r, c = values_of(reference), values_of(candidate)
    shape = r.shape
    both = np.isfinite(r) & np.isfinite(c)
    same = (r == c) | (np.isnan(r) & np.isnan(c))
    odd = np.flatnonzero(~both & ~same)
    odd = odd if odd.size else np.flatnonzero(~both)
    x, y = r[both], c[both]
    d = y - x
    told = modulus(d)
    absolute = np.abs(d)
    expected = {
        "count": r.size,
        "compared": x.size,
        "equal": int(same.sum()),
        "nonfinite.either": int((~both).sum()),
        "nonfinite.differing": int((~both & ~same).sum()),
        "nonfinite.first": tuple(map(int, np.unravel_index(odd[0], shape))) if odd.size else None,
    }
    for name, side in (("reference", modulus(r)), ("candidate", modulus(c))):
        own = side[np.isfinite(side)]
        expected |= {
            f"{name}.nan": int(np.isnan(side).sum()),
            f"{name}.posinf": int((side == math.inf).sum()),
            f"{name}.neginf": int((side == -math.inf).sum()),
            f"{name}.zeros": int((side == 0).sum()),
            f"{name}.mean": own.mean() if own.size else math.nan,
            f"{name}.std": own.std() if own.size else math.nan,
            f"{name}.min": own.min() if own.size else math.nan,
            f"{name}.max": own.max() if own.size else math.nan,
            f"{name}.rms": np.sqrt((own**2).mean()) if own.size else math.nan,
            f"{name}.mean_abs": np.abs(own).mean() if own.size else math.nan,
        }
    if not x.size:
        return expected
    error, power, own_power = (absolute**2).sum(), (np.abs(x) ** 2).sum(), (np.abs(y) ** 2).sum()
    inner = (y * np.conj(x)).sum().real
    mean_r, mean_c = x.mean(), y.mean()
    spread = math.sqrt((np.abs(x - mean_r) ** 2).sum()) * math.sqrt((np.abs(y - mean_c) ** 2).sum())
    constant = (x == x[0]).all() or (y == y[0]).all()
    relative = absolute / (np.abs(x) + EPSILON)
    expected |= {
        "mean": told.mean(),
        "std": told.std(),
        "mae": absolute.mean(),
        "max_abs": absolute.max(),
        "mse": (absolute**2).mean(),
        "rmse": np.sqrt((absolute**2).mean()),
        "relative_mse": error / power if power else (math.nan if error else 0.0),
        "relative_mae": absolute.sum() / np.abs(x).sum() if power else (math.nan if error else 0.0),
        "max_relative": relative.max(),
        "mean_relative": relative.mean(),
        "correlation": math.nan if constant else ((y - mean_c) * np.conj(x - mean_r)).sum().real / spread,
        "cosine": inner / math.sqrt(power) / math.sqrt(own_power) if power and own_power else math.nan,
        "sqnr": 10 * np.log10(power / error) if error else math.inf,
        "relative_l2": math.sqrt(error / power) if power else (math.nan if error else 0.0),
        "scale": inner / power if power else (math.nan if error else 1.0),
    }
    if error:
        place = np.flatnonzero(both)[absolute.argmax()]
        expected |= {
            "worst.index": tuple(map(int, np.unravel_index(place, shape))),
            "worst.reference": modulus(r).reshape(-1)[place],
            "worst.candidate": modulus(c).reshape(-1)[place],
        }
    return expected


def assert_true(metrics, reference, candidate, *, rel=1e-9):
    expected = truth(reference, candidate)
    for name, number in expected.items():
        found = metrics
        for part in name.split("."):
            found = getattr(found, part)
        if isinstance(number, tuple | int) or number is None:
            assert found == number, name
            continue
        # A mean or an inner product near zero has no digits of its own: its error is relative to what was added up.
        slack = {
            "mean": expected.get("mae", 0.0),
            "reference.mean": expected["reference.mean_abs"],
            "candidate.mean": expected["candidate.mean_abs"],
            "correlation": 1.0,
            "cosine": 1.0,
            "sqnr": 1.0,
            "scale": expected["candidate.rms"] / expected["reference.rms"] if expected["reference.rms"] else 0.0,
            # Of a difference that is nearly constant, what is left is rounding.
            "std": 1e-3 * expected.get("mae", 0.0),
        }.get(name, 0.0)
        assert found == pytest.approx(number, rel=rel, abs=min(rel * slack, 1e300), nan_ok=True), name
    if not expected["compared"]:
        assert metrics.worst is None
        assert all(math.isnan(number) for number in (metrics.mse, metrics.sqnr, metrics.scale, *metrics.percentiles))
    else:
        assert_percentiles(metrics, reference, candidate)


@np.errstate(all="ignore")
def assert_percentiles(metrics, reference, candidate):
    r, c = values_of(reference), values_of(candidate)
    both = np.isfinite(r) & np.isfinite(c)
    absolute = np.sort(np.abs(c[both] - r[both]))
    for q, found in zip(PERCENTILES, metrics.percentiles, strict=True):
        exact = np.percentile(absolute, q)
        upper = absolute[math.ceil(q / 100 * (absolute.size - 1))]  # the bound is relative to the neighbours
        assert abs(found - exact) <= metrics.percentile_bound * upper + 2.0**-126, q
    assert (metrics.percentile_bound == 0) == (absolute[-1] == 0)


def some(dtype, shape, *, seed=0, scale=1.0):
    """Values like activations in a dtype, or like its own where it has no such."""
    rng = np.random.default_rng(seed)
    if dtype is torch.float4_e2m1fn_x2:
        return torch.from_numpy(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)).view(dtype)
    values = rng.standard_normal(shape) * scale
    if dtype is torch.bool:
        return torch.from_numpy(values > 0)
    if dtype.is_complex:
        return torch.from_numpy(values + 1j * rng.standard_normal(shape)).to(dtype)
    if dtype is torch.float8_e8m0fnu:
        return torch.from_numpy(rng.integers(120, 134, shape, dtype=np.uint8)).view(dtype)
    if not dtype.is_floating_point:
        low = 0 if not dtype.is_signed else -100
        return torch.from_numpy(rng.integers(low, 100, shape)).to(dtype)
    return torch.from_numpy(values).to(dtype)


# Dtypes and shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("one", DTYPES, ids=str)
def test_any_two_dtypes_have_numpys_metrics(one):
    for other in DTYPES:
        r, c = some(one, (3, 5, 66), seed=1), some(other, (3, 5, 66), seed=2)
        metrics = measure(r, c)
        assert_true(metrics, r, c)
        assert (metrics.reference.dtype, metrics.candidate.dtype) == (str(one)[6:], str(other)[6:])
        assert metrics.shape == (3, 5, 66)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size_has_numpys_metrics_by_either_engine(dtype, sweeping):
    for size in (2, 1022, 1024, 40_000):
        r, c = some(dtype, (size,), seed=1), some(dtype, (size,), seed=2)
        assert_true(measure(r, c), r, c)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_and_their_rounding_have_numpys_metrics(dtype, sweeping):
    for size in (1, 2, 7, 1023, 1024, 1025, 32_768 + 3, 140_001):
        r = torch.randn(size)
        c = (r + 0.01 * torch.randn(size)).to(dtype)
        assert_true(measure(r, c), r, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_nothing_and_a_single_number_have_an_answer(dtype, sweeping):
    for shape in ((), (0,), (3, 0, 2), (0, 4)):
        r = torch.full(shape, 3).to(dtype)
        c = torch.full(shape, 5).to(dtype)
        metrics = measure(r, c)
        assert_true(metrics, r, c)
        assert metrics.fraction_equal == (0.0 if metrics.count else 1.0)
        if shape == ():
            assert (metrics.max_abs, metrics.worst.index, metrics.scale) == (2.0, (), 5 / 3)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 2),
        lambda t: t.permute(1, 2, 0),
        lambda t: t[:, ::2],
        lambda t: t[1:, 3:, 1:],
        lambda t: t[:, :1].expand(6, 50, 9),
        lambda t: t.flip(1),
    ],
    ids=["transposed", "permuted", "strided", "offset", "expanded", "flipped"],
)
def test_strides_change_nothing(view):
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex64):
        r, c = some(dtype, (6, 50, 9), seed=3), some(dtype, (6, 50, 9), seed=4)
        solid = measure(view(r).clone(memory_format=torch.contiguous_format), view(c).contiguous())
        assert measure(view(r), view(c)) == solid
        assert measure(view(r), view(c).contiguous()) == solid
        assert_true(solid, view(r), view(c))


def test_lazily_conjugated_tensors_are_what_they_stand_for():
    z, w = torch.randn(2, 40, 30, dtype=torch.complex64)
    assert measure(z.conj(), w.T.reshape(40, 30).conj()) == measure(z.conj().resolve_conj(), w.T.reshape(40, 30).conj())
    assert measure(z.conj(), z).bitwise is False
    assert_true(measure(z.conj(), w), z.conj(), w)


def test_numpy_arrays_are_taken_as_they_are():
    r = np.random.default_rng(0).standard_normal((31, 17))
    c = np.asfortranarray(r + 0.1).astype(">f4")
    c.setflags(write=False)
    assert_true(measure(r, c), r, c.astype("f4"))


def test_packed_float4_is_compared_value_by_value():
    packed = torch.tensor([[0b0111_0010, 0b1111_0000]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    metrics = measure(packed, torch.tensor([[1.0, 6.0, 0.0, -4.0]]))
    assert (metrics.shape, metrics.max_abs, metrics.worst.index) == ((1, 4), 2.0, (0, 3))
    assert measure(packed, packed.clone()).bitwise


def test_a_tensor_elsewhere_is_measured_on_a_copy(monkeypatch):
    pairs = [(some(dtype, (3, 5, 66), seed=1), some(dtype, (3, 5, 66), seed=2)) for dtype in DTYPES]
    expected = [measure(r, c) for r, c in pairs]
    monkeypatch.setattr(operands, "elsewhere", lambda side: True)
    assert [measure(r, c) for r, c in pairs] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(2, 5, 80), torch.randn(2, 5, 80).bfloat16()),
        (torch.rand(500).double() * 1e300, torch.rand(500).double() * -1e300),
        (torch.randn(30, 75).t(), torch.randn(75, 30)),
        (torch.tensor([1.0, math.nan, math.inf, 0.0]), torch.tensor([1.5, math.nan, 2.0, -0.0])),
        (torch.randn(3, 40, dtype=torch.complex64), torch.randn(3, 40)),
        (torch.arange(24).view(6, 4), torch.arange(24).flip(0).view(6, 4)),
        (torch.empty(0, 3), torch.empty(0, 3)),
    ],
    ids=["tokens", "large", "strided", "nonfinite", "complex", "sets", "empty"],
)
def test_tensors_on_a_gpu_have_the_metrics_of_their_copies(one, other):
    expected = repr(measure(one, other))  # which takes NaN for NaN
    assert repr(measure(one.cuda(), other.cuda())) == expected
    assert repr(measure(one, other.cuda())) == expected


def test_shapes_that_differ_are_refused_with_both():
    with pytest.raises(Unsupported, match=r"reference has shape \[2, 3\] and the candidate \[3, 2\]"):
        measure(torch.ones(2, 3), torch.ones(3, 2))


# Digits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1e3, -1e6])
@pytest.mark.parametrize("size", [900, 50_000])
def test_a_mean_far_from_zero_costs_no_digits(offset, size, sweeping):
    rng = np.random.default_rng(5)
    r = rng.standard_normal(size) + offset
    c = r + rng.standard_normal(size) * 0.1 + 100.0
    metrics = measure(r, c)
    assert_true(metrics, r, c)
    exact = (c - r).astype(np.longdouble)
    assert metrics.std == pytest.approx(float(exact.std()), rel=1e-9)
    narrow, other = r.astype(np.float32), c.astype(np.float32)
    assert_true(measure(narrow, other), narrow, other)


def test_blocks_of_very_different_size_keep_the_digits_of_all(sweeping):
    rng = np.random.default_rng(6)
    r = rng.standard_normal(70_000)
    r[:1024] *= 1e6
    r[40_000:] = r[40_000:] * 1e-3 + 50
    c = r * 1.001
    assert_true(measure(r, c), r, c)


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1e38), ("bfloat16", 1e38), ("float32", 1e-38), ("float16", 1e4)]
)
def test_the_ends_of_the_range_are_no_problem(dtype, scale, sweeping):
    kind = getattr(torch, dtype)
    r = (torch.rand(3000, dtype=torch.float64) * scale).to(kind)
    c = (torch.rand(3000, dtype=torch.float64) * -scale).to(kind)
    assert_true(measure(r, c), r, c)


@pytest.mark.parametrize("scale", [1e300, 1e200, 1e-160, 1e-300])
def test_squares_that_leave_the_range_of_float64_do_not_spoil_the_ratios(scale, sweeping):
    rng = np.random.default_rng(7)
    r, c = rng.standard_normal((2, 3000))
    c[5] = math.nan
    large, plain = measure(r * scale, c * scale), measure(r, c)
    for name in ("correlation", "cosine", "sqnr", "relative_l2", "relative_mse", "relative_mae", "scale"):
        assert getattr(large, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    for name in ("mean", "std", "mae", "max_abs"):
        assert getattr(large, name) == pytest.approx(getattr(plain, name) * scale, rel=1e-9), name
    assert large.reference.std == pytest.approx(plain.reference.std * scale, rel=1e-9)
    assert large.percentiles == pytest.approx([p * scale for p in plain.percentiles], rel=2**-6)
    assert (large.compared, large.worst.index) == (2999, plain.worst.index)


def test_large_complex_numbers_beside_narrow_ones_are_scaled_alike():
    r = np.array([1 + 2j, 3 - 1j, 0.5j], np.complex64)
    c = np.array([3e200 + 1e200j, 1e200, -2e200j])
    metrics = measure(r, c)
    assert metrics.max_abs == pytest.approx(np.hypot(3e200, 1e200), rel=1e-9)
    assert metrics.mae == pytest.approx(np.abs(c).mean(), rel=1e-9)
    assert metrics.candidate.mean_abs == pytest.approx(np.abs(c).mean(), rel=1e-9)


def test_integers_are_exact_up_to_two_to_the_53():
    r = torch.tensor([2**53 - 1, -(2**53), 16_777_217, 0])
    c = torch.tensor([2**53 - 2, -(2**53), 16_777_216, 0])
    metrics = measure(r, c)
    assert (metrics.max_abs, metrics.mae, metrics.equal) == (1.0, 0.5, 2)
    assert (metrics.worst.reference, metrics.worst.candidate) == (2.0**53 - 1, 2.0**53 - 2)
    assert metrics.reference.max == 2.0**53 - 1


def test_a_constant_difference_has_no_spread_to_speak_of(sweeping):
    r = torch.arange(5000, dtype=torch.float64)
    metrics = measure(r, r + 0.5)
    assert (metrics.mean, metrics.std, metrics.mae, metrics.max_abs) == (0.5, 0.0, 0.5, 0.5)


@pytest.mark.parametrize("size", [3, 1000, 70_001])
def test_a_constant_has_no_correlation(size, sweeping):
    metrics = measure(torch.full((size,), 0.1), torch.rand(size))
    assert math.isnan(metrics.correlation)
    assert metrics.reference.std == 0.0
    assert 0 < metrics.cosine < 1


# Equal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_are_exactly_zero_apart(dtype, sweeping):
    for size in (4, 5000):
        r = some(dtype, (size,), seed=9)
        metrics = measure(r, r.clone())
        assert metrics.bitwise
        assert metrics.equal == metrics.count == metrics.compared
        zeros = (metrics.mean, metrics.std, metrics.mae, metrics.max_abs, metrics.mse, metrics.rmse)
        assert {*zeros, *metrics.percentiles, metrics.percentile_bound} == {0.0}
        relative = (metrics.relative_l2, metrics.relative_mse, metrics.relative_mae, metrics.max_relative)
        assert {*relative, metrics.mean_relative} == {0.0}
        assert (metrics.correlation, metrics.cosine, metrics.scale, metrics.sqnr) == (1.0, 1.0, 1.0, math.inf)
        assert metrics.worst is None
        assert metrics.reference == metrics.candidate
        assert_true(metrics, r, r)


def test_equal_constants_have_no_correlation_and_equal_zeros_no_cosine(sweeping):
    ones, zeros = measure(torch.ones(7), torch.ones(7)), measure(torch.zeros(7), torch.zeros(7))
    assert math.isnan(ones.correlation)
    assert ones.cosine == 1.0
    assert math.isnan(zeros.correlation)
    assert math.isnan(zeros.cosine)
    assert (zeros.relative_l2, zeros.sqnr, zeros.scale) == (0.0, math.inf, 1.0)


def test_a_single_bit_is_noticed_wherever_it_is(small_parts):
    r = torch.randn(300_000)
    for place in (0, 1023, 5000, -1):
        c = r.clone()
        c.view(torch.int32)[place] ^= 1
        metrics = measure(r, c)
        assert not metrics.bitwise
        assert metrics.equal == 299_999
        assert metrics.worst.index == (place % 300_000,)


def test_zeros_of_either_sign_are_equal_and_not_the_same_bits(sweeping):
    metrics = measure(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (metrics.bitwise, metrics.equal, metrics.mse, metrics.relative_l2) == (False, 2, 0.0, 0.0)


def test_equal_values_of_another_dtype_are_equal_and_not_bitwise():
    r = torch.randn(5000).bfloat16()
    metrics = measure(r, r.float())
    assert (metrics.bitwise, metrics.fraction_equal, metrics.sqnr, metrics.correlation) == (False, 1.0, math.inf, 1.0)


def test_a_reference_of_zeros_has_no_relative_error(sweeping):
    r, c = torch.zeros(10), torch.ones(10)
    metrics = measure(r, c)
    assert all(math.isnan(x) for x in (metrics.relative_l2, metrics.relative_mse, metrics.scale, metrics.cosine))
    assert metrics.sqnr == -math.inf
    assert metrics.max_relative == pytest.approx(1e8)


# Non-finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.complex64], ids=str)
def test_what_is_not_finite_is_left_out_counted_and_located(dtype, sweeping):
    for place, bad in product((0, 6, 1023, 1024, 5000, -1), (math.nan, math.inf, -math.inf)):
        r, c = some(dtype, (9001,), seed=1), some(dtype, (9001,), seed=2)
        c[place] = bad
        metrics = measure(r, c)
        assert metrics.nonfinite == (type(metrics.nonfinite))(1, 1, (place % 9001,))
        assert metrics.reference.finite
        assert not metrics.candidate.finite
        assert_true(metrics, r, c)
        assert_true(measure(c, r), c, r)


def test_the_same_nan_and_the_same_infinity_are_equal(sweeping):
    r = torch.tensor([[math.nan, math.inf, 1.0], [-math.inf, math.nan, 2.0]])
    c = torch.tensor([[math.nan, math.inf, 1.5], [math.inf, 3.0, 2.0]])
    metrics = measure(r, c)
    assert (metrics.equal, metrics.compared) == (3, 2)
    assert (metrics.nonfinite.either, metrics.nonfinite.differing, metrics.nonfinite.first) == (4, 2, (1, 0))
    assert_true(metrics, r, c)
    assert measure(r, r.clone()).nonfinite.first == (0, 0)
    assert measure(r, r.clone()).nonfinite.differing == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nothing_finite_at_all_has_an_answer(dtype, sweeping):
    r = torch.full((2, 3, 700), math.nan, dtype=dtype)
    c = torch.full((2, 3, 700), -math.inf, dtype=dtype)
    metrics = measure(r, c)
    assert_true(metrics, r, c)
    assert (metrics.compared, metrics.equal, metrics.nonfinite.differing) == (0, 0, 4200)
    assert math.isnan(metrics.tokens.error)


def test_many_non_finite_values_on_both_sides(sweeping):
    rng = np.random.default_rng(3)
    r, c = rng.standard_normal((2, 40_000)).astype(np.float32)
    for side in (r, c):
        for bad in (math.nan, math.inf, -math.inf):
            side[rng.random(side.size) < 0.1] = bad
    assert_true(measure(r, c), r, c)


# The worst --------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [(3, 4), (1022, 1023), (10, 5000), (40_000, 300_000), (0, 399_999)])
def test_of_equally_bad_elements_the_first_is_the_worst(places, sweeping, small_parts):
    r = torch.zeros(400_000)
    c = r.clone()
    for number, place in enumerate(places):
        c[place] = (-1) ** number * 2.0
    metrics = measure(r.view(400, 1000), c.view(400, 1000), threads=2)
    assert metrics.worst.index == divmod(places[0], 1000)
    assert (metrics.worst.reference, metrics.worst.candidate, metrics.max_abs) == (0.0, 2.0, 2.0)


# Tokens and sets --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 700, 1), (4, 2, 9, 700), (3, 5, 2000), (2, 70, 4096)], ids=str)
def test_tokens_have_their_own_relative_errors(shape, sweeping):
    r, c = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    r[0, 0] = c[0, 0]
    c[-1, -1] = math.nan
    tokens = measure(r, c).tokens
    rows_r, rows_c = r.numpy().reshape(-1, shape[-1]), c.numpy().reshape(-1, shape[-1])
    both = np.isfinite(rows_c)
    d = np.where(both, rows_c - rows_r, 0)
    powers = (np.where(both, rows_r, 0) ** 2).sum(axis=1)
    errors = np.where((d == 0).all(axis=1), 0, np.sqrt((d**2).sum(axis=1) / np.where(powers, powers, 1)))
    assert tokens.count == len(rows_r)
    assert tokens.worst == errors.argmax()
    assert tokens.error == pytest.approx(errors.max(), rel=1e-9)
    assert (tokens.median, tokens.p90) == pytest.approx(tuple(np.percentile(errors, (50, 90))), rel=1e-9)


def test_one_bad_token_stands_out_and_a_matrix_has_no_tokens():
    r = torch.randn(2, 50, 64)
    c = r + 1e-3 * torch.randn_like(r)
    c[1, 7] = 0
    tokens = measure(r, c).tokens
    assert (tokens.count, tokens.worst) == (100, 57)
    assert tokens.error == pytest.approx(1.0)
    assert tokens.p90 < 0.01
    assert measure(r[0], c[0]).tokens is None


def test_a_token_whose_reference_is_zero_has_no_error():
    r, c = torch.ones(1, 3, 4), torch.ones(1, 3, 4) * 1.5
    r[0, 1] = 0
    tokens = measure(r, c).tokens
    assert (tokens.worst, tokens.error, tokens.median) == (0, 0.5, 0.5)


def test_more_tokens_than_are_kept_are_read_from_a_sketch(monkeypatch):
    monkeypatch.setattr(import_module("layerscope.compare.measure.token_errors"), "_EXACT", 100)
    r, c = torch.randn(2, 3, 700, 8, dtype=torch.float64)
    exact = np.linalg.norm((c - r).numpy(), axis=-1) / np.linalg.norm(r.numpy(), axis=-1)
    tokens = measure(r, c).tokens
    assert tokens.error == pytest.approx(exact.max(), rel=1e-9)
    assert (tokens.median, tokens.p90) == pytest.approx(tuple(np.percentile(exact, (50, 90))), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8], ids=str)
def test_rows_of_integers_are_compared_as_sets(dtype):
    r = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 2], [1, 2, 2]], dtype=dtype)
    c = torch.tensor([[1, 2, 3], [6, 4, 5], [7, 8, 0], [1, 2, 2], [2, 1, 2]], dtype=dtype)
    sets = measure(r, c).sets
    assert (sets.rows, sets.changed, sets.reordered) == (5, 2, 2)
    assert sets.overlap == pytest.approx((3 + 3 + 2 + 2 + 3) / 15)


def test_only_narrow_integers_of_two_axes_are_sets():
    assert measure(torch.ones(3, 64).long(), torch.ones(3, 64).long()).sets is not None
    for tensor in (torch.ones(3, 65).long(), torch.ones(3).long(), torch.ones(3, 4).bool(), torch.ones(3, 4)):
        assert measure(tensor, tensor).sets is None
    assert measure(torch.ones(3, 4).long(), torch.ones(3, 4)).sets is None


def test_sets_that_are_cut_between_parts_are_counted_once(monkeypatch):
    rng = np.random.default_rng(0)
    r = np.argsort(rng.random((500, 7)), axis=1)
    c = r.copy()
    c[::3] = c[::3, ::-1]
    c[1::3, 2] = 99
    whole = measure(r, c).sets
    assert (whole.changed, whole.reordered) == (167, 167)
    monkeypatch.setattr(operands, "CHUNK", 10)
    assert measure(r, c, threads=3).sets == whole


# Parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [1, 7, 1000, 1024, 4096])
def test_the_cut_into_parts_changes_nothing_but_rounding(part, monkeypatch, sweeping):
    r = torch.randn(2, 33, 65 if part > 1 else 5)
    c = (r + 0.1 * torch.randn_like(r)).bfloat16()
    c[1, 3, 2] = math.inf
    whole = measure(r, c)
    monkeypatch.setattr(operands, "CHUNK", part)
    monkeypatch.setattr(MEASURING, "CHUNK", part)
    monkeypatch.setattr(MEASURING, "_ROWS", 5)
    assert_true(measure(r, c), r, c)
    parts = measure(r, c, threads=3)
    assert parts == measure(r, c)
    assert parts.percentiles == whole.percentiles
    assert parts.tokens.worst == whole.tokens.worst
    assert parts.tokens.error == pytest.approx(whole.tokens.error, rel=1e-12)


def test_threads_give_the_same_answer_to_the_bit():
    r = torch.randn(3, 700, 900)
    c = r + 1e-3 * torch.randn_like(r)
    c[1] = r[1]
    assert measure(r, c, threads=2) == measure(r, c) == measure(r, c, threads=5)


def entry_of(tensor, name="x"):
    run = MemoryRun(Manifest())
    run.add(Point(name), Moment(), tensor=tensor)
    return next(run.records(name))


@pytest.mark.parametrize("shape", [(2, 20, 48), (30, 48), (48,)], ids=str)
def test_a_cut_of_a_fused_tensor_is_compared_with_its_part(shape, monkeypatch):
    for part in (4, 50, 96, 1000, 1 << 18):
        monkeypatch.setattr(operands, "CHUNK", part)
        fused = torch.randn(shape)
        alone = fused[..., 16:40] + 0.1 * torch.randn(*shape[:-1], 24)
        expected = measure(alone, fused[..., 16:40].contiguous())
        found = measure(entry_of(alone), operand(entry_of(fused), cut=(16, 40)))
        assert (found.shape, found.worst, found.equal) == (expected.shape, expected.worst, expected.equal)
        assert_true(found, alone, fused[..., 16:40])
        back = measure(operand(entry_of(fused), cut=(16, 40)), entry_of(alone))
        assert_true(back, fused[..., 16:40], alone)
        turned = tuple(reversed(range(fused.ndim)))
        permuted = fused.permute(turned).contiguous().permute(turned)
        assert measure(entry_of(alone), operand(entry_of(permuted), cut=(16, 40))) == found


def test_the_same_values_in_another_shape_are_compared_when_asked():
    r = torch.randn(2, 6, 8)
    c = r.reshape(12, 8) + 0.5
    with pytest.raises(Unsupported, match=r"\[2, 6, 8\].*\[12, 8\]"):
        measure(entry_of(r), entry_of(c))
    metrics = measure(entry_of(r), operand(entry_of(c), shape=(2, 6, 8)))
    assert metrics.shape == (2, 6, 8)
    assert metrics.tokens.count == 12
    with pytest.raises(Unsupported, match=r"x:output of shape \[2, 6, 8\] cannot be compared as \[5\]"):
        measure(operand(entry_of(r), shape=(5,)), entry_of(c))


def test_a_cut_that_is_not_there_and_a_record_without_a_tensor_are_refused():
    with pytest.raises(Unsupported, match=r"of shape \[4, 8\] has no part 4:9 along its last axis"):
        measure(operand(entry_of(torch.ones(4, 8)), cut=(4, 9)), torch.ones(4, 5))
    with pytest.raises(Unsupported, match="a summary and no tensor"):
        measure(operand(entry_of(None)), torch.ones(3))


def test_metrics_read_back_from_json():
    r = torch.randint(0, 9, (2, 3, 4))
    metrics = measure(r, r.flip(0))
    assert metrics.tokens is not None
    assert metrics.sets is not None
    assert Metrics.from_json(metrics.to_json()) == metrics


# Records on disk --------------------------------------------------------------------------------


def write(path, tensor):
    """Write a run of one record, and return that record."""
    flat = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    writer = Writer(path, Manifest())
    blob = Blob(str(tensor.dtype)[6:], tuple(tensor.shape), flat.nbytes, lambda: flat)
    writer.write(Point("x"), Moment(), blob=blob)
    assert writer.close().records == 1
    return next(open_run(path).records("x"))


@pytest.mark.parametrize("threads", [1, 3])
def test_records_are_measured_from_their_files(tmp_path, threads, monkeypatch):
    monkeypatch.setattr(operands, "CHUNK", 1000)
    monkeypatch.setattr(MEASURING, "CHUNK", 1000)
    r = torch.randn(3, 50, 96)
    c = (r[..., 32:64] + 0.01).bfloat16()
    sides = operand(write(tmp_path / "a", r), cut=(32, 64)), operand(write(tmp_path / "b", c))
    metrics = measure(*sides, threads=threads)
    assert_true(metrics, r[..., 32:64], c)
    assert metrics == measure(*sides)


def test_a_damaged_file_is_not_measured(tmp_path):
    entry = write(tmp_path / "a", torch.randn(300, 1000))
    assert measure(entry, entry).bitwise
    segment = tmp_path / "a/rank-00000/segment-00000.safetensors"
    raw = bytearray(segment.read_bytes())
    raw[-5000] ^= 4
    segment.write_bytes(raw)
    for threads in (1, 2):
        with pytest.raises(Damaged, match="not what was written"):
            measure(entry, torch.zeros(300, 1000), threads=threads)


def test_a_record_that_gives_fewer_values_than_its_shape_says_is_damaged():
    whole = entry_of(torch.ones(4, 4))
    short = dataclasses.replace(entry_of(torch.ones(3, 4)), shape=(4, 4))
    for sides in ((short, whole), (whole, short), (short, short)):
        with pytest.raises(Damaged, match="of 16 elements only 12"):
            measure(*map(operand, sides))


# For processes of their own: this project's sources may come from the path as well.
TESTS = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
MEMORY = """
import sys
import numpy as np
from growing import growth
from layerscope.compare.measure import measure
from layerscope.store import open_run

folder, threads = sys.argv[1], int(sys.argv[2])
entry = next(open_run(folder).records("x"))
other = np.broadcast_to(np.float32(0.5), entry.shape)
for small in (np.ones((600, 3, 1000), np.float32), np.ones(3)):
    measure(small, small * 2, threads=threads)
next(entry.pieces(10))
different, first = growth(lambda: measure(entry, other, threads=threads))
same, second = growth(lambda: measure(entry, entry, threads=threads))
assert (different.max_abs, same.bitwise) == (0.5, True)
whole, third = growth(lambda: entry.tensor().clone())
print(entry.nbytes / 2**20, max(first, second), third)
"""


def grown(path, megabytes, threads):
    """Size of a record, growth of a process that measures it, and growth of one that reads it whole, in MB."""
    write(path, torch.from_numpy(np.zeros((1, megabytes, 1 << 18), np.float32)))
    command = [sys.executable, "-c", MEMORY, str(path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=TESTS))
    assert done.returncode == 0, done.stderr
    return map(float, done.stdout.split())


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    size, growth, whole = grown(tmp_path / "run", 120, 2)
    assert size == 120
    assert growth < 60
    assert whole > 100  # the check can fail


@pytest.mark.stress
@pytest.mark.parametrize("threads", [1, 4])
def test_memory_does_not_grow_with_a_very_large_tensor(tmp_path, threads):
    size, growth, whole = grown(tmp_path / "run", 2000, threads)
    assert size == 2000
    assert growth < 80
    assert whole > 1900


@pytest.mark.stress
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
def test_more_than_two_to_the_31_elements(dtype):
    r = torch.zeros(2**31 + 11, dtype=dtype)
    c = torch.zeros(1, dtype=dtype).expand(2**31 + 11)
    r[2**31 + 5] = 3
    metrics = measure(r, c, threads=2)
    assert (metrics.count, metrics.equal, metrics.max_abs) == (2**31 + 11, 2**31 + 10, 3.0)
    assert metrics.worst.index == (2**31 + 5,)
