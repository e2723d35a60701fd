"""Exact percentiles are numpy's, to the bit, whatever is sorted at once and however the numbers come."""

import math

import numpy as np
import pytest
import torch

import layerscope as ls
from layerscope.compare.measure import PERCENTILE_BOUND, measure
from layerscope.compare.measure.percentiles import exactly

PERCENTS = (0, 1, 50, 90, 95, 99, 99.9, 100)


def numbers():
    rng = np.random.default_rng(0)
    yield rng.lognormal(sigma=20, size=5000)
    yield np.abs(rng.standard_normal(4999).astype(np.float32)).astype(np.float64)
    yield np.full(3000, 0.1)
    yield np.zeros(100)
    yield np.r_[np.zeros(2000), 5e-324, 1e-310, np.full(1000, 1.7e308)]
    yield np.repeat([1.0, np.nextafter(1.0, 2.0)], 1500)
    yield rng.integers(0, 3, 4000).astype(np.float64)
    yield np.array([3.0])
    yield np.array([1.0, 2.0])


def test_they_are_numpys_to_the_bit_however_few_are_sorted_at_once():
    for values in numbers():
        expected = np.percentile(values, PERCENTS).tolist()
        for few in (1, 100, 1 << 20):
            looks = []

            def parts(values=values, looks=looks):
                looks.append(1)
                return iter(np.array_split(values, 7))

            assert list(exactly(parts, values.size, PERCENTS, few=few)) == expected
            assert len(looks) <= 5
            if few >= values.size:
                assert len(looks) == 1


def test_of_nothing_they_are_nan():
    assert all(math.isnan(value) for value in exactly(lambda: iter(()), 0, (50, 99)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_of_a_pair_they_are_numpys_of_the_differences(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    r, c = (torch.randn(3, 700, generator=generator, dtype=torch.float64) * 100 * scale for _ in range(2))
    r, c = r.to(dtype), c.to(dtype)
    if dtype.is_floating_point:
        r[0, 0], c[1, 1] = math.nan, math.inf
    one, other = (x.to(torch.complex128 if dtype.is_complex else torch.float64).numpy().ravel() for x in (r, c))
    size = np.abs(other - one)[np.isfinite(one) & np.isfinite(other)]
    found = measure(r, c, exact=True)
    assert found.percentile_bound == 0
    assert list(found.percentiles) == np.percentile(size, (50, 90, 95, 99)).tolist()
    rough = measure(r, c)
    if rough.max_abs > 0:
        assert rough.percentile_bound == PERCENTILE_BOUND
        assert rough.percentiles == pytest.approx(found.percentiles, rel=PERCENTILE_BOUND)


def test_magnitudes_that_float64_cannot_square_are_no_exception():
    r, c = np.array([1e300, -1e305, 3.0]), np.array([-1e300, 1.5e308, 3.0])
    found = measure(r, c, exact=True)
    assert list(found.percentiles) == np.percentile(np.abs(c - r), (50, 90, 95, 99)).tolist()


def test_a_comparison_of_first_layer_files_has_them_and_says_so(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {mode: rng.standard_normal((1, 33, 16)).astype(np.float32) for mode in ("fp32", "2-1")}
    for names in ("mode_{}_output", "mode_{}_input"):
        np.savez(tmp_path / "io.npz", **{names.format(mode): array for mode, array in arrays.items()})
        result = ls.compare(f"{tmp_path}/io.npz:fp32", f"{tmp_path}/io.npz:2-1")
        (row,) = result.rows
        size = np.abs(arrays["2-1"].astype(np.float64) - arrays["fp32"])
        assert list(row.metrics.percentiles) == np.percentile(size, (50, 90, 95, 99)).tolist()
        assert row.metrics.percentile_bound == 0
    with ls.record(torch.nn.Identity(), ".", to=tmp_path / "run") as rec:
        rec.model(torch.from_numpy(arrays["fp32"]))
    with ls.record(torch.nn.Identity(), ".", to=tmp_path / "other") as rec:
        rec.model(torch.from_numpy(arrays["2-1"]))
    (row,) = ls.compare(tmp_path / "run", tmp_path / "other").rows
    assert row.metrics.percentile_bound == PERCENTILE_BOUND
