"""Pairs that kernels go through have the CPU's metrics: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module

import numpy as np
import pytest
import torch

from layerscope.compare.measure import measure
from layerscope.diagnose import measuring

PAIRS = import_module("layerscope.compare.device.pairs")
MEASURING = import_module("layerscope.compare.measure")  # the package exports the function under the same name

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where it plays the device's arithmetic

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
REAL = DEVICE.type == "cuda"  # the interpreter takes a second for what a device does in microseconds
NAN, INF = math.nan, math.inf
LARGE = 1_000_003 if REAL else 2_300

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
EXACT = {
    "shape", "count", "compared", "bitwise", "equal", "worst", "max_abs", "percentiles", "percentile_bound",
    "nonfinite", "dtype", "min", "max", "nan", "posinf", "neginf", "zeros", "sets",
}  # fmt: skip


def refuse(*_, **__):
    raise AssertionError("the pair was not gone through on the device")


@pytest.fixture
def there():
    """Whatever is asked meanwhile is answered by kernels, or not at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MEASURING, "_passed", refuse)
        patch.setattr(measuring, "_sums", refuse)
        if not REAL:
            patch.setattr(MEASURING, "elsewhere", lambda side: True)
            patch.setattr(measuring, "elsewhere", lambda side: True)
            patch.setattr(PAIRS, "_there", lambda tensor: True)
            patch.setattr(PAIRS, "_ROWS", 512)  # tiles and rims in fewer elements
            patch.setattr(PAIRS, "_LONGEST", 512)
        yield lambda function, *tensors: function(*(tensor.to(DEVICE) for tensor in tensors))


def some(dtype, shape, *, seed=0):
    rng = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(rng.standard_normal(shape) > 0)
    if not dtype.is_floating_point:
        return torch.from_numpy(rng.integers(0 if not dtype.is_signed else -100, 100, shape)).to(dtype)
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def assert_like_the_cpu(found, reference, candidate):
    assert_alike(dataclasses.asdict(found), dataclasses.asdict(HOST(reference, candidate)))


def assert_alike(found, expected):
    """Counts, extremes, places and buckets to the bit; sums to 1e-9 of what was added up."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict) and name not in EXACT:
            assert_alike(found[name], value)
        elif name in EXACT or value is None or isinstance(value, int):
            assert repr(found[name]) == repr(value), name  # which takes NaN for NaN
        else:
            slack = {"mean": expected.get("mae", expected.get("mean_abs", 0.0)), "correlation": 1.0, "cosine": 1.0}
            slack |= {"sqnr": 1.0, "scale": 1.0, "std": 1e-3 * expected.get("mae", 0.0)}
            got, wanted = np.atleast_1d(found[name]).ravel(), np.atleast_1d(value).ravel()
            scale = slack.get(name, 0.0)
            room = 1e-9 * scale if math.isfinite(scale) else 0.0
            assert got == pytest.approx(wanted, rel=1e-9, abs=room, nan_ok=True), name


def _host_measure():
    """The CPU's own pass, kept aside from what a test puts in its place."""
    passed = MEASURING._passed

    def through(reference, candidate):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MEASURING, "_passed", passed)
            patch.setattr(MEASURING, "elsewhere", lambda side: False)
            return measure(reference, candidate)

    return through


HOST = _host_measure()


# Every metric -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_tensors_have_the_metrics_of_the_cpu(dtype, there):
    for size in (1, 9, 1025, 9001, LARGE) if REAL else (LARGE,):
        r, c = some(dtype, (size,), seed=1), some(dtype, (size,), seed=2)
        assert_like_the_cpu(there(measure, r, c), r, c)


@pytest.mark.parametrize("size", [1, 9, 1025, 9001])
def test_the_sums_are_numpys_in_float64(size, there):
    r = torch.randn(size)
    c = (r + 0.01 * torch.randn(size)).bfloat16()
    found = there(measure, r, c)
    x, y = r.double().numpy(), c.double().numpy()
    d = y - x
    assert found.mse == pytest.approx((d * d).mean(), rel=1e-9)
    assert found.mae == pytest.approx(abs(d).mean(), rel=1e-9)
    assert found.mean == pytest.approx(d.mean(), rel=1e-9, abs=1e-9 * abs(d).mean())
    assert found.relative_l2 == pytest.approx(np.linalg.norm(d) / np.linalg.norm(x), rel=1e-9)
    assert found.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-9)
    assert found.mean_relative == pytest.approx((abs(d) / (abs(x) + 1e-8)).mean(), rel=1e-9)
    assert found.candidate.std == pytest.approx(y.std(), rel=1e-9)
    assert (found.max_abs, found.worst.index) == (abs(d).max(), (int(abs(d).argmax()),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
        (torch.int64, torch.float32),
        (torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_two_dtypes_are_compared_as_the_cpu_does(one, other, there):
    r, c = some(one, (LARGE,), seed=1), some(other, (LARGE,), seed=2)
    assert_like_the_cpu(there(measure, r, c), r, c)
    if REAL:
        assert_like_the_cpu(there(measure, c, r), c, r)


@pytest.mark.parametrize(
    "shape", [(2, 3, 5), (1, 70, 1), (3, 3, 300), (2, 4, 256), (1, 3, 768), (1, 5, 9000)][: 6 if REAL else 5], ids=str
)
def test_tokens_have_their_own_errors(shape, there):
    r, c = torch.randn(shape), torch.randn(shape).bfloat16()
    r[0, 0] = c[0, 0].float()
    found = there(measure, r, c)
    assert_like_the_cpu(found, r, c)
    rows_r, rows_c = (t.double().numpy().reshape(-1, shape[-1]) for t in (r, c))
    errors = np.linalg.norm(rows_c - rows_r, axis=1) / np.linalg.norm(rows_r, axis=1)
    assert (found.tokens.count, found.tokens.worst) == (len(errors), errors.argmax())
    assert found.tokens.error == pytest.approx(errors.max(), rel=1e-9)


# What is not plain ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_is_not_finite_is_left_out_counted_and_located(dtype, there):
    r, c = some(dtype, (3, 5, LARGE // 15), seed=1), some(dtype, (3, 5, LARGE // 15), seed=2)
    for side, place, bad in ((c, 700, NAN), (c, 3, INF), (r, 3, INF), (r, 2100, -INF), (r, 9, NAN), (c, 9, NAN)):
        side.view(-1)[place] = bad
    found = there(measure, r, c)
    assert_like_the_cpu(found, r, c)
    assert (found.nonfinite.either, found.nonfinite.differing) == (4, 2)
    assert found.nonfinite.first == tuple(map(int, np.unravel_index(700, r.shape)))


def test_nothing_finite_at_all_has_an_answer(there):
    r, c = torch.full((2, 3, 700), NAN), torch.full((2, 3, 700), -INF)
    found = there(measure, r, c)
    assert_like_the_cpu(found, r, c)
    assert (found.compared, found.worst) == (0, None)


def test_equal_bits_are_exactly_zero_apart(there):
    r = torch.randn(LARGE).bfloat16()
    r[5] = NAN
    found = there(measure, r, r.clone())
    assert found.bitwise
    assert (found.equal, found.mse, found.correlation, found.sqnr, found.worst) == (LARGE, 0.0, 1.0, INF, None)
    assert found.reference == found.candidate
    other = r.clone()
    other.view(torch.int16)[-1] ^= 1
    assert not there(measure, r, other).bitwise


def test_zeros_of_either_sign_are_equal_and_not_the_same_bits(there):
    zeros = torch.zeros(LARGE)
    found = there(measure, zeros, -zeros)
    assert (found.bitwise, found.equal, found.mse, found.reference.zeros) == (False, LARGE, 0.0, LARGE)
    assert_like_the_cpu(found, zeros, -zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constants_and_constant_differences_have_no_spread(dtype, there):
    r, c = torch.full((300,), 0.1, dtype=dtype), torch.rand(300, dtype=dtype)
    found = there(measure, r, c)
    assert math.isnan(found.correlation)
    assert (found.reference.std, found.reference.mean) == (0.0, float(r[0]))
    steps = torch.arange(LARGE, dtype=dtype)
    found = there(measure, steps, steps + 0.5)
    assert (found.mean, found.std, found.mae, found.max_abs) == (0.5, 0.0, 0.5, 0.5)


def test_a_mean_far_from_zero_costs_no_digits(there):
    r = torch.randn(LARGE, dtype=torch.float64) + 1e6
    c = r + torch.randn(LARGE, dtype=torch.float64) * 0.1 + 100.0
    assert_like_the_cpu(there(measure, r, c), r, c)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e38), (torch.bfloat16, 1e-38), (torch.float64, 1e300), (torch.float64, 1e-300)],
)
def test_the_ends_of_the_range_are_no_problem(dtype, scale, there):
    r = (torch.rand(LARGE, dtype=torch.float64) * scale).to(dtype)
    c = (torch.rand(LARGE, dtype=torch.float64) * -scale).to(dtype)
    assert_like_the_cpu(there(measure, r, c), r, c)


def test_differences_outside_of_the_window_of_the_counters_are_counted_as_well(there):
    r = torch.full((LARGE,), 1e-30, dtype=torch.float64)
    r[::2] = 1e10
    c = r * (1 + torch.rand(LARGE, dtype=torch.float64))
    assert_like_the_cpu(there(measure, r, c), r, c)


def test_of_equally_bad_elements_the_first_is_the_worst(there):
    r = torch.zeros(LARGE)
    for places in ((3, 4), (LARGE - 1, 10), (2049, 70)):
        c = r.clone()
        c[list(places)] = torch.tensor([2.0, -2.0])
        assert there(measure, r, c).worst.index == (min(places),)


def test_tensors_that_do_not_lie_in_order_are_what_they_stand_for(there):
    r, c = torch.randn(30, 75), torch.randn(75, 30)
    assert_like_the_cpu(there(measure, r.t(), c), r.t(), c)
    r, c = torch.randn(101)[1:], torch.randn(100)
    assert_like_the_cpu(there(measure, r, c), r, c)


@pytest.mark.skipif(not REAL, reason="copies of what lies on a GPU")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(3, 40, dtype=torch.complex64), torch.randn(3, 40)),
        (torch.arange(24).view(6, 4), torch.arange(24).flip(0).view(6, 4)),
        (torch.empty(0, 3), torch.empty(0, 3)),
    ],
    ids=["complex", "sets", "empty"],
)
def test_what_kernels_do_not_take_is_measured_on_a_copy(one, other):
    found = measure(one.to(DEVICE), other.to(DEVICE))
    assert repr(found) == repr(measure(one, other))
    assert repr(measure(one, other.to(DEVICE))) == repr(found)


# The numbers of a diagnosis ---------------------------------------------------------------------


def assert_measured_alike(there, wanted, got):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "elsewhere", lambda side: False)
        patch.setattr(measuring, "_sums", SUMS)
        expected = dataclasses.asdict(measuring.measured(wanted, got))
    found = dataclasses.asdict(there(measuring.measured, wanted, got))
    for name in ("error", "scale", "worst", "peak"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-5, abs=1e-7), name
    assert found == expected


SUMS = measuring._sums


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool], ids=str
)
def test_a_diagnosis_has_the_numbers_of_the_cpu(dtype, there):
    for size in (1, 9, LARGE):
        wanted = torch.randn(size)
        got = (wanted * 1.02 + 0.01 * torch.randn(size)).to(dtype)
        assert_measured_alike(there, wanted if dtype.is_floating_point else wanted.to(dtype), got)
    value = torch.randn(1501).to(dtype)
    assert there(measuring.measured, value, value.clone()).equal
    octets = value.view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(octets[at : at + 8], "little") for at in range(0, len(octets) // 8 * 8, 8)]
    total = sum(word * (2 * at + 1) * 0x9E3779B1 for at, word in enumerate(words)) % 2**64
    digest = (total - 2**64 if total >= 2**63 else total) ^ hash(octets[len(words) * 8 :])
    assert there(measuring.measured, value, value.clone()).digest == digest
    assert there(measuring.bits, value) == digest


def test_a_diagnosis_leaves_out_what_is_masked_or_not_finite(there):
    wanted = torch.randn(1500)
    got = wanted.bfloat16()
    wanted[3:40] = -1e9
    got[5:50] = -INF
    got[100], got[101], wanted[101], wanted[102] = NAN, NAN, NAN, INF
    assert_measured_alike(there, wanted, got)
    assert there(measuring.measured, wanted, got).nonfinite == 2
    assert there(measuring.measured, wanted, got).changed == 12 / 1500


def test_a_diagnosis_of_complex_values_takes_their_parts(there):
    wanted = torch.randn(700, dtype=torch.complex64)
    assert there(measuring.measured, wanted, wanted * 1.5).error == pytest.approx(0.5, rel=1e-6)
    assert there(measuring.measured, wanted, wanted.clone()).equal
