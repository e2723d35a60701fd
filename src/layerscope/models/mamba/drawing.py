"""Weights drawn from a seed, the same on every machine and with every version of torch and numpy.

    weights = drawn_weights(config, seed=0)

Each weight has a stream of bits of its own, named by the seed and the weight; bits become floats by exact arithmetic.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch

from layerscope.models.mamba.assembly import shapes
from layerscope.models.mamba.mamba_config import MambaConfig

# A trained Mamba's B and C are of the order of one; drawn like the other projections they would be a hundredth.
_GAINS = {"x_proj.weight": 4.0, "conv1d.weight": 2.0}
_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 1e-1


def drawn_weights(config: MambaConfig, *, seed: int) -> dict[str, torch.Tensor]:
    """Return every weight in float32, as a training of Mamba begins with them."""
    return {name: torch.from_numpy(_drawn(name, shape, seed=seed)) for name, shape in shapes(config).items()}


def _drawn(name: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    kind = ".".join(name.split(".")[-2:])
    if kind == "mixer.A_log":
        return np.log(np.broadcast_to(np.arange(1.0, shape[1] + 1), shape)).astype(np.float32)
    if kind in ("mixer.D", "norm.weight", "norm_f.weight"):
        return np.ones(shape, np.float32)
    numbers = _uniform(shape, seed=seed, name=name)
    if kind == "dt_proj.bias":
        # softplus(bias) is a time step between a thousandth and a tenth, evenly spread on a logarithmic scale.
        span = math.log(_LONGEST_STEP / _SHORTEST_STEP)
        steps = _SHORTEST_STEP * np.exp((numbers.astype(np.float64) + 1) / 2 * span)
        return (steps + np.log(-np.expm1(-steps))).astype(np.float32)
    if kind.endswith(".bias"):
        return numbers * np.float32(0.1)
    return numbers * np.float32(_GAINS.get(kind, 1.0) / math.sqrt(math.prod(shape[1:])))


def _uniform(shape: tuple[int, ...], *, seed: int, name: str) -> np.ndarray:
    """Return float32 numbers in [-1, 1) that the seed and the name decide, 24 random bits each."""
    # The raw streams of numpy's bit generators are promised never to change (NEP 19); its distributions are not.
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    count = math.prod(shape)
    raw = stream.random_raw((count + 1) // 2).astype("<u8").view("<u4")[:count] >> np.uint32(8)
    return (raw.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)).reshape(shape)
