"""An attention map as a picture: its heads side by side, dark for nothing, bright for the most.

picture(torch.rand(8, 64, 64))     # uint8, [height, width]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

LEAST, MOST = 64, 256  # how many pixels a head's longer side has
GAP = 2


def picture(attention: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Draw `[heads, queries, keys]` or `[queries, keys]`; queries go down, keys to the right.

    A map larger than a head's share is shown by the largest weight of each block, a smaller one enlarged.
    """
    maps = np.nan_to_num(attention.detach().float().cpu().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    maps = maps.reshape(-1, *maps.shape[-2:])
    heads = [_fitted(one) for one in maps]
    height, width = heads[0].shape
    across = math.ceil(math.sqrt(len(heads)))
    down = math.ceil(len(heads) / across)
    page = np.zeros((down * (height + GAP) - GAP, across * (width + GAP) - GAP), np.float32)
    for at, one in enumerate(heads):
        row, column = divmod(at, across)
        page[row * (height + GAP) :, column * (width + GAP) :][:height, :width] = one
    most = float(page.max())
    bright: npt.NDArray[np.uint8] = np.rint(np.clip(page / most if most > 0 else page, 0, 1) * 255).astype(np.uint8)
    return bright


def _fitted(one: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    block = max(1, math.ceil(max(one.shape) / MOST))
    if block > 1:
        rows, columns = (math.ceil(n / block) for n in one.shape)
        padded = np.zeros((rows * block, columns * block), one.dtype)
        padded[: one.shape[0], : one.shape[1]] = one
        one = padded.reshape(rows, block, columns, block).max(axis=(1, 3))
    times = max(1, LEAST // max(one.shape))
    return one.repeat(times, axis=0).repeat(times, axis=1)
