"""Every stage of every mode against numpy in float64, from the table in `modes/quamba/README.md`.

A layer's mixer is run once; each stage is recomputed from what it was *given*, so that no rounding is carried on.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerscope.models.mamba import Mamba, MambaConfig
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.drawing import drawn_weights
from layerscope.modes.quamba import QUAMBA_MODES, Codes, Scales, calibrate, quantised

CONFIG = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=2)
# mode: what the convolution multiplies, what it gives, what u the scan takes
TABLE = {
    "0": ("int8", "int8", "int8"),
    "2-0": ("int8", "grid", "int8"),
    "2-1": ("int8", "int8", "int8"),
    "2-2": ("int8", "grid", "as it comes"),
    "2-3": ("int8", "float", "int8"),
    "2-4": ("int8", "float", "as it comes"),
    "3": ("int8, scale of the tensor", "float", "as it comes"),
    "1": ("float", "float", "as it comes"),
}


def codes(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    # The division is float32's: it decides on which side of a border a value lies.
    return np.clip(np.rint(x.astype(np.float32) / np.float32(scale)), -127, 127).astype(np.float64)


def weight(w: torch.Tensor) -> np.ndarray:
    """A weight on its grid, one scale for each output channel."""
    rows = w.detach().flatten(1).numpy()
    scale = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    return codes(rows, scale) * scale


def projection(x: np.ndarray, linear: torch.nn.Linear, scale: float) -> np.ndarray:
    bias = 0.0 if linear.bias is None else linear.bias.detach().double().numpy()
    return codes(x, scale) * np.float64(np.float32(scale)) @ weight(linear.weight).T + bias


def convolved(x: np.ndarray, taps: np.ndarray, bias: np.ndarray) -> np.ndarray:
    kernel = taps.shape[1]
    past = np.pad(x, ((0, 0), (kernel - 1, 0), (0, 0)))
    out = sum(past[:, k : k + x.shape[1]] * taps[:, k] for k in range(kernel)) + bias
    return out / (1 + np.exp(-out))


def scanned(u, delta, a, b, c, d) -> np.ndarray:
    state, y = np.zeros((len(u), *a.shape)), np.zeros_like(u)
    for t in range(u.shape[1]):
        state = np.exp(delta[:, t, :, None] * a) * state + (delta[:, t] * u[:, t])[..., None] * b[:, t, None, :]
        y[:, t] = (state * c[:, t, None, :]).sum(-1) + d * u[:, t]
    return y


def as_numpy(value: object) -> np.ndarray:
    return (value.codes * value.scale if isinstance(value, Codes) else value).detach().double().numpy()


def on_grid(x: np.ndarray, scale: float) -> np.ndarray:
    return codes(x, scale) * np.float64(np.float32(scale))


@pytest.fixture(scope="module")
def model() -> Mamba:
    return assembled(CONFIG, drawn_weights(CONFIG, seed=0), source="tests")


def stages_of(variant: Mamba) -> dict[str, tuple[list[np.ndarray], object]]:
    """What each stage of layer 1's mixer was given, and gave."""
    found: dict[str, tuple[list[np.ndarray], object]] = {}
    for name, stage in variant.backbone.layers[1].mixer.named_children():
        stage.register_forward_hook(
            lambda _, args, out, name=name: found.update({name: ([as_numpy(arg) for arg in args], out)})
        )
    with torch.no_grad():
        variant(torch.randint(32, (2, 48), generator=torch.Generator().manual_seed(1)))
    return found


@pytest.mark.parametrize("mode", TABLE)
def test_each_stage_is_what_the_table_says_of_it(model, mode):
    assert set(TABLE) == set(QUAMBA_MODES)
    calibration = calibrate(model, [torch.randint(32, (4, 64), generator=torch.Generator().manual_seed(0))])
    scales: Scales = calibration.layers[1]
    own = model.backbone.layers[1].mixer
    seen = stages_of(quantised(model, mode, calibration))
    multiplies, gives, takes = TABLE[mode]

    steps = {"in_proj": scales.in_proj, "x_proj": scales.u, "dt_proj": scales.dt_proj, "out_proj": scales.out_proj}
    for name, scale in steps.items():
        (x,), got = seen[name]
        np.testing.assert_allclose(as_numpy(got), projection(x, getattr(own, name), scale), rtol=1e-4, atol=1e-5)

    (x,), u = seen["conv1d"]
    bias, taps = own.conv1d.bias.detach().double().numpy(), own.conv1d.weight.detach().double().numpy()[:, 0]
    if multiplies != "float":
        step = np.abs(x).max() / 127 if "of the tensor" in multiplies else scales.conv1d
        x, taps = on_grid(x, step), weight(own.conv1d.weight)
    expected = convolved(x, taps, bias)
    assert isinstance(u, Codes) == (gives == "int8")
    if gives != "float":
        # A value on the border of two codes may take either; all others take this one.
        part = expected / scales.u
        clear = np.abs(part - np.floor(part) - 0.5) > 1e-3
        assert clear.mean() > 0.98
        np.testing.assert_allclose(as_numpy(u)[clear], on_grid(expected, scales.u)[clear], rtol=1e-6)
    else:
        np.testing.assert_allclose(as_numpy(u), expected, rtol=1e-4, atol=1e-5)
        assert not np.allclose(as_numpy(u), on_grid(expected, scales.u), rtol=1e-4, atol=1e-5)

    (given_u, delta, a, b, c, d), y = seen["scan"]
    if mode != "1":
        delta, b, c = on_grid(delta, scales.delta), on_grid(b, scales.B), on_grid(c, scales.C)
    taken = on_grid(given_u, scales.u) if takes == "int8" else given_u
    oracle = scanned(taken, delta, a, b, c, d)
    assert np.linalg.norm(as_numpy(y) - oracle) <= 1e-5 * np.linalg.norm(oracle)
