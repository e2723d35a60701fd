"""Two 64-bit fingerprints of a sequence of words: one that order does not change, one that it does.

    free, placed = fingerprints(mixed(words), 0)

`free` is the sum of every word mixed; `placed` the same sum with each term weighted by its position, all modulo
2**64, so both add up over tensors. The mixer is a bijection of 64 bits and every weight is odd, so
changing any single word, by one bit or many, always changes both. Anything else (a permutation, say) goes unseen
with a chance of about 2**-60. They tell accidents apart; they are no defence against an attacker who wants a collision.

The weight of position i is a scrambled number for i % BLOCK times one for i // BLOCK. Weights that grow evenly, or
Weyl sequences, would be cheaper and are blind to exchanging two rows that hold the same values in another order,
such as those of a one-hot matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 1024
MIX_FIRST = 0x9E3779B97F4A7C15
MIX_ADD = 0x2545F4914F6CDD1D
MIX_SECOND = 0xD6E8FEB86659FD93

Words = npt.NDArray[Any]


def mixed(
    words: Words, *, out: npt.NDArray[np.uint64] | None = None, spare: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.uint64]:
    """Scramble unsigned words of any width into 64 bits, one to one; `out` and `spare` save two allocations."""
    x = np.empty(words.shape, np.uint64) if out is None else out
    x[...] = words
    x *= np.uint64(MIX_FIRST)
    x += np.uint64(MIX_ADD)
    x ^= np.right_shift(x, np.uint64(32), out=spare)
    x *= np.uint64(MIX_SECOND)
    x ^= np.right_shift(x, np.uint64(32), out=spare)
    return x


# Complemented, so that no weight within a block is also the weight of a block.
WEIGHTS = mixed(~np.arange(BLOCK, dtype=np.uint64)) | np.uint64(1)


def fingerprints(terms: npt.NDArray[np.uint64], start: int) -> tuple[int, int]:
    """Return both fingerprints of mixed words that stand at positions `start`, `start` + 1 and so on."""
    lead = start % BLOCK
    rows = -(-(lead + terms.size) // BLOCK)
    if lead or terms.size % BLOCK:
        padded = np.zeros(rows * BLOCK, np.uint64)
        padded[lead : lead + terms.size] = terms
        terms = padded
    weights = mixed(np.arange(start // BLOCK, start // BLOCK + rows, dtype=np.uint64)) | np.uint64(1)
    placed = np.einsum("ij,j->i", terms.reshape(rows, BLOCK), WEIGHTS) * weights
    return int(terms.sum()), int(placed.sum())
