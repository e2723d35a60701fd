"""INT8 arithmetic in numpy, by the definitions: the oracle of `layerscope.modes.quamba`, which it does not import."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["convolution", "grid", "products", "random_codes", "scan"]


def random_codes(*shape: int, low: int = -127, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(low, 128, shape).astype(np.int8))


def grid(x: torch.Tensor, scale: float | torch.Tensor) -> np.ndarray:
    """The nearest codes, ties to even, saturated at 127."""
    steps = x.numpy().astype(np.float32) / np.asarray(scale, np.float32)
    return np.clip(np.rint(steps), -127, 127).astype(np.int64)


def products(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    return np.asarray(x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T)


def convolution(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    codes, taps = x.numpy().astype(np.int64), weight.numpy().astype(np.int64)
    sums = np.zeros_like(codes)
    for t in range(codes.shape[1]):
        for k in range(taps.shape[1]):
            before = t - (taps.shape[1] - 1) + k
            if before >= 0:
                sums[:, t] += codes[:, before] * taps[:, k]
    return sums


def scan(u, delta, A, B, C, D) -> np.ndarray:  # noqa: N803
    """Step by step in float64; u, delta, B and C are pairs of codes and scale."""
    u, delta, b, c = (codes.numpy().astype(np.float64) * float(scale) for codes, scale in (u, delta, B, C))
    a, d = A.numpy().astype(np.float64), D.numpy().astype(np.float64)
    state = np.zeros((u.shape[0], *a.shape))
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        state = np.exp(delta[:, t, :, None] * a) * state + (delta[:, t] * u[:, t])[:, :, None] * b[:, t, None, :]
        y[:, t] = (state * c[:, t, None, :]).sum(-1) + d * u[:, t]
    return y
