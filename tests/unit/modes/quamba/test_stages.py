"""Each INT8 stage against integers in numpy; what it gives, and what its repr says of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from integers import convolution, grid, products, scan
from layerscope.models.mamba import CausalConv, selective_scan
from layerscope.modes.quamba.calibration import Scales
from layerscope.modes.quamba.fast import FAST
from layerscope.modes.quamba.int8 import Codes, quantise
from layerscope.modes.quamba.plain import PLAIN
from layerscope.modes.quamba.stages import Convolution, FloatScan, Int8Scan, Projection

SCALES = Scales(in_proj=0.02, conv1d=0.02, u=0.03, dt_proj=0.02, delta=0.004, B=0.02, C=0.05, out_proj=0.02)
GRIDS = {"delta": SCALES.delta, "B": SCALES.B, "C": SCALES.C}
BOTH = pytest.mark.parametrize("arithmetic", [FAST, PLAIN], ids=lambda one: one.name)


@BOTH
def test_codes_and_sums_of_a_projection_are_the_integers_of_the_oracle(arithmetic):
    linear, x = nn.Linear(40, 12), torch.randn(2, 9, 40)
    stage = Projection(linear, scale=0.02, arithmetic=arithmetic)
    weight_scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    np.testing.assert_array_equal(stage.weight.numpy(), grid(linear.weight.detach(), weight_scale))
    sums = products(torch.from_numpy(grid(x, 0.02)), stage.weight)
    np.testing.assert_array_equal(stage.sums(quantise(x, stage.input_scale)).numpy(), sums)
    expected = sums * 0.02 * weight_scale[:, 0].double().numpy() + linear.bias.detach().double().numpy()
    np.testing.assert_allclose(stage(x).detach().numpy(), expected, rtol=1e-6, atol=1e-6)


@BOTH
def test_what_a_projection_gives_is_requantised_to_the_integers_of_the_oracle_ties_and_all(arithmetic):
    # With powers of two as scales every float is exact, so that the oracle can be integers from end to end.
    linear = nn.Linear(24, 16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-127, 128, (16, 24)) / 64)
        linear.weight[:, 0] = 127 / 64
    x = torch.randint(-127, 128, (300, 24)) / 32
    stage = Projection(linear, scale=1 / 32, arithmetic=arithmetic)
    found = quantise(stage(x), torch.tensor(0.5)).codes.numpy()
    sums = (x.numpy() * 32).astype(np.int64) @ (linear.weight.detach().numpy() * 64).astype(np.int64).T
    whole, rest = np.divmod(sums, 1024)  # a sum stands for sum / 2048, and a step of the new grid is 1/2
    nearest = whole + ((rest > 512) | ((rest == 512) & (whole % 2 == 1)))
    assert (rest == 512).any()
    np.testing.assert_array_equal(found, np.clip(nearest, -127, 127))


@BOTH
def test_a_convolution_without_a_scale_puts_the_largest_of_its_input_on_the_last_code(arithmetic):
    conv, x = _conv(), torch.randn(2, 30, 10)
    stage = Convolution(conv, scale=None, out=0.01, gives="floats", arithmetic=arithmetic)
    step = np.float32(x.abs().max()) / np.float32(127)
    sums = convolution(torch.from_numpy(grid(x, step)), stage.weight)
    floats = sums * float(step) * stage.weight_scale.double().numpy() + conv.bias.detach().double().numpy()
    np.testing.assert_allclose(stage(x).detach().numpy(), floats / (1 + np.exp(-floats)), rtol=1e-5, atol=1e-6)
    assert stage(torch.zeros(1, 5, 10)).isfinite().all()


@BOTH
def test_a_projection_multiplies_codes_as_they_come(arithmetic):
    stage = Projection(nn.Linear(40, 12), scale=0.5, arithmetic=arithmetic)
    given = quantise(torch.randn(2, 9, 40), torch.tensor(0.02))
    np.testing.assert_array_equal(stage.sums(given).numpy(), products(given.codes, stage.weight))
    finer = Projection(nn.Linear(40, 12), scale=0.02, arithmetic=arithmetic)
    finer.load_state_dict({**stage.state_dict(), "input_scale": torch.tensor(0.02)})
    assert torch.equal(stage(given), finer(given.floats()))  # its own grid was not asked


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_codes_and_sums_of_the_convolution_are_the_integers_of_the_oracle(arithmetic, bias):
    conv, x = _conv(bias=bias), torch.randn(2, 30, 10)
    stage = Convolution(conv, scale=0.02, out=0.01, gives="codes", arithmetic=arithmetic)
    coded = quantise(x, stage.input_scale)
    sums = convolution(torch.from_numpy(grid(x, 0.02)), stage.weight)
    np.testing.assert_array_equal(stage.sums(coded).numpy(), sums)
    u = stage(x)
    assert isinstance(u, Codes)
    floats = sums * 0.02 * stage.weight_scale.double().numpy() + (conv.bias.detach().double().numpy() if bias else 0)
    steps = floats / (1 + np.exp(-floats)) / 0.01
    clear = np.abs(steps - np.floor(steps) - 0.5) > 1e-3  # a tie in float64 may be none in float32
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(u.codes.numpy()[clear], np.clip(np.rint(steps), -127, 127)[clear])


def test_a_convolution_that_gives_floats_gives_those_its_codes_stand_for():
    conv, x = _conv(), torch.randn(2, 30, 10)
    codes, floats = (
        Convolution(conv, scale=0.02, out=0.01, gives=gives, arithmetic=FAST)(x)
        for gives in ("codes", "floats on the grid")
    )
    assert torch.equal(floats, codes.codes * 0.01)


@BOTH
@pytest.mark.parametrize("comes_as", ["codes", "floats"])
def test_the_int8_scan_agrees_with_float64_on_the_codes_of_its_inputs(arithmetic, comes_as):
    u, delta, A, B, C, D = _scanned()  # noqa: N806
    given = quantise(u, torch.tensor(SCALES.u)) if comes_as == "codes" else u
    found = Int8Scan(SCALES, arithmetic=arithmetic)(given, delta, A, B, C, D)
    on_grids = [
        (torch.from_numpy(grid(x, s)), s)
        for x, s in ((u, SCALES.u), (delta, SCALES.delta), (B, SCALES.B), (C, SCALES.C))
    ]
    oracle = scan(on_grids[0], on_grids[1], A, on_grids[2], on_grids[3], D)
    assert np.linalg.norm(found.numpy() - oracle) <= 1e-5 * np.linalg.norm(oracle)
    exact = selective_scan(u, delta, A, B, C, D)
    assert (found - exact).norm() > 1e-3 * exact.norm()  # rounding shows: this was not the float scan


def test_the_float_scan_takes_u_as_it_comes_and_rounds_delta_b_and_c():
    u, *others = _scanned()
    on_grid = torch.from_numpy(grid(u, SCALES.u)).float() * SCALES.u
    in_int8 = Int8Scan(SCALES, arithmetic=FAST)(u, *others)
    assert (FloatScan(**GRIDS)(on_grid, *others) - in_int8).norm() <= 1e-6 * in_int8.norm()
    assert (FloatScan(**GRIDS)(u, *others) - in_int8).norm() > 1e-4 * in_int8.norm()
    exact = selective_scan(u, *others)
    assert (FloatScan(**GRIDS)(u, *others) - exact).norm() > 1e-4 * exact.norm()


def test_each_stage_says_what_is_int8():
    linear, conv = nn.Linear(40, 12), _conv()
    assert repr(Projection(linear, scale=0.02, arithmetic=FAST)) == (
        "Projection(40 -> 12, INT8 weight, INT8 input (scale 0.02), int32 sums (fast))"
    )
    said = repr(Convolution(conv, scale=0.02, out=0.01, gives="codes", arithmetic=PLAIN))
    assert said == (
        "Convolution(10, kernel=4, INT8 weight, INT8 input (scale 0.02), int32 sums (plain), INT8 output (scale 0.01))"
    )
    grid_said = repr(Convolution(conv, scale=0.02, out=0.01, gives="floats on the grid", arithmetic=FAST))
    assert "float output on the INT8 grid (scale 0.01)" in grid_said
    assert repr(Int8Scan(SCALES, arithmetic=FAST)) == (
        "Int8Scan(INT8 u, delta, B, C (scales 0.03, 0.004, 0.02, 0.05), float32 state (fast))"
    )
    floats = repr(Convolution(conv, scale=None, out=0.01, gives="floats", arithmetic=FAST))
    assert "INT8 input (scale of the tensor), int32 sums (fast), float output)" in floats
    assert repr(FloatScan(**GRIDS)) == (
        "FloatScan(delta, B, C on the INT8 grid (scales 0.004, 0.02, 0.05), all else float)"
    )


def _conv(*, bias: bool = True) -> CausalConv:
    conv = CausalConv(10, kernel=4, bias=bias)
    for parameter in conv.parameters():
        nn.init.normal_(parameter, std=0.5)
    return conv


def _scanned() -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(2, 60, 10),
        torch.rand(2, 60, 10) * 0.5,
        -torch.arange(1.0, 9).repeat(10, 1),
        torch.randn(2, 60, 8),
        torch.randn(2, 60, 8),
        torch.linspace(-1, 2, 10),
    )
