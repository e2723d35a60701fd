"""Which rows of a tensor are tokens, and which only padding.

mask = mask_of({"attention_mask": tensor})     # (batch, tokens), or None
rows_kept(mask, value.shape)                   # of the tensor's rows, those that are tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASKS = ("attention_mask", "padding_mask", "decoder_attention_mask")


def mask_of(given: Mapping[str, object]) -> torch.Tensor | None:
    """Return which tokens count, by a mask among a model's inputs; None when there is none, or it hides nothing."""
    import torch

    for name in MASKS:
        mask = given.get(name)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.is_complex():
            seen = mask.cpu() != 0
            if bool(seen.any()) and not bool(seen.all()):
                return seen
    return None


def rows_kept(mask: torch.Tensor | None, shape: tuple[int, ...], axis: int = -1) -> torch.Tensor | None:
    """Return which rows of a tensor belong to tokens that count, by its shape; None when every row may."""
    if mask is None or axis != -1:
        return None
    batch, length = mask.shape
    lead = tuple(shape[:-1])
    if lead[:2] == (batch, length):
        return mask.reshape(batch, length, 1).expand(batch, length, prod(lead[2:])).reshape(-1)
    if lead == (batch * length,):
        return mask.reshape(-1)
    if len(lead) == 3 and (lead[0], lead[2]) == (batch, length):
        return mask[:, None].expand(lead).reshape(-1)
    return None
