"""A byte-trigram model with Witten-Bell backoff: what a language model has to beat to have learnt anything.

bits = Trigram.of(train).bits(windows)     # of each byte, given the two before it
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Trigram"]


class Trigram(NamedTuple):
    """Counts of one, two and three bytes in a row, by their codes."""

    ones: np.ndarray
    twos: np.ndarray
    threes: np.ndarray

    @classmethod
    def of(cls, text: bytes) -> Trigram:
        """Count a text."""
        codes = _codes(np.frombuffer(text, np.uint8))
        return cls(*(np.bincount(code, minlength=256**n) for n, code in enumerate(codes, start=1)))

    def bits(self, windows: np.ndarray) -> np.ndarray:
        """Return what each byte costs from the third of each window on, in bits; a window is a row of bytes.

        Each order is mixed with the one below it in the ratio of how often its context was seen to how many different
        bytes followed it.
        """
        probability = np.array(1 / 256)
        for counts, codes in zip(self, _codes(windows), strict=True):
            codes = codes[..., -(windows.shape[-1] - 2) :]
            contexts, where = np.unique(codes >> 8, return_inverse=True)
            followers = counts.reshape(-1, 256)[contexts]
            seen, kinds = (total[where.reshape(codes.shape)] for total in (followers.sum(1), (followers > 0).sum(1)))
            mixed = (counts[codes] + kinds * probability) / np.maximum(seen + kinds, 1)
            probability = np.where(seen > 0, mixed, probability)
        return -np.log2(probability)


def _codes(text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each byte along the last axis; each two, as one number; each three."""
    ones = text.astype(np.int64)
    twos = ones[..., :-1] << 8 | ones[..., 1:]
    return ones, twos, twos[..., :-1] << 8 | ones[..., 2:]
