"""The fast arithmetic against integers and float64 in numpy."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from integers import convolution, products, random_codes, scan
from layerscope.modes.quamba import fast
from layerscope.modes.quamba.fast import FAST
from layerscope.modes.quamba.int8 import Codes


@pytest.mark.parametrize(("rows", "inner", "outs"), [(1, 1, 1), (5, 48, 33), (64, 768, 80), (3, 1536, 7), (1, 3000, 2)])
def test_sums_of_products_are_exact(rows, inner, outs):
    x, weight = random_codes(2, rows, inner), random_codes(outs, inner, seed=1)
    found = FAST.products(x, weight)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), products(x, weight))


@pytest.mark.parametrize("exact", [True, False], ids=["as this CPU is", "without VNNI"])
def test_sums_of_the_largest_codes_are_exact_on_any_cpu(exact, monkeypatch):
    if not exact:
        monkeypatch.setattr(torch, "_int_mm", _saturating)
    fast._int_mm_is_exact.cache_clear()
    try:
        ends = torch.full((3, 1536), 127, dtype=torch.int8)
        ends[1] = -127
        assert FAST.products(ends, ends).tolist() == [[s * 1536 * 127**2 for s in row] for row in _SIGNS]
        assert exact or not fast._int_mm_is_exact()
    finally:
        fast._int_mm_is_exact.cache_clear()


_SIGNS = [[1, -1, 1], [-1, 1, -1], [1, -1, 1]]


def _saturating(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add pairs of products in 16 bits, of unsigned with signed numbers as `vpmaddubsw` does, and shift back."""
    pairs = ((x[:, :, None].int() + 128) * weight[None].int()).unflatten(1, (-1, 2)).sum(2)
    return (pairs.clamp(-(2**15), 2**15 - 1).sum(1) - 128 * weight.int().sum(0)).to(torch.int32)


@pytest.mark.stress
@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_sums_are_exact_whatever_instructions_onednn_may_use(isa):
    code = (
        "import torch\nfrom layerscope.modes.quamba.fast import FAST\n"
        "x, w = (torch.randint(-127, 128, (n, 768), dtype=torch.int8) for n in (200, 90))\n"
        "print(torch.equal(FAST.products(x, w), (x.double() @ w.double().t()).int()))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa}, capture_output=True, text=True
    )
    assert said.stdout.split() == ["True"], said.stderr


@pytest.mark.parametrize(("length", "kernel"), [(1, 4), (3, 4), (40, 4), (17, 2), (5, 1)])
def test_convolution_sums_are_exact_and_see_the_past_alone(length, kernel):
    x, weight = random_codes(2, length, 6), random_codes(6, kernel, seed=1)
    found = FAST.convolution(x, weight)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), convolution(x, weight))


def test_convolution_of_the_largest_codes_does_not_overflow():
    ends = torch.full((1, 4, 1), -127, dtype=torch.int8)
    weight = torch.full((1, 4), 127, dtype=torch.int8)
    assert FAST.convolution(ends, weight).flatten().tolist() == [-16129, -32258, -48387, -64516]


@pytest.mark.parametrize("length", [1, 7, 200])
def test_the_scan_of_codes_agrees_with_float64_on_the_same_codes(length):
    given = scanned(length)
    u, delta, A, B, C, D = given  # noqa: N806
    found = FAST.scan(Codes(*u), Codes(*delta), A, Codes(*B), Codes(*C), D)
    oracle = scan(*given)
    assert found.dtype == torch.float32
    assert np.linalg.norm(found.numpy() - oracle) <= 1e-5 * np.linalg.norm(oracle)


def scanned(length: int, *, channels: int = 10, states: int = 8):
    """Codes of u, delta, B and C with scales of a usual size, and A and D; some time steps are zero, some long."""
    return (
        (random_codes(2, length, channels), torch.tensor(0.03)),
        (random_codes(2, length, channels, low=0, seed=1), torch.tensor(0.004)),
        -torch.arange(1.0, states + 1).repeat(channels, 1),
        (random_codes(2, length, states, seed=2), torch.tensor(0.02)),
        (random_codes(2, length, states, seed=3), torch.tensor(0.05)),
        torch.linspace(-1, 2, channels),
    )
