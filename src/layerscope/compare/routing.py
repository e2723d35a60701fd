"""Whether a choice that came out otherwise (a routed expert, a top-k index) was a near-tie.

    flips(reference_indices, candidate_indices, scores, error=3e-3)

Rounding alone turns a choice between two scores that are almost equal. Such a flip changes the token that was routed,
and is no fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


# How many times the expected error of a score two scores may lie apart and still be called tied: the extremes of a few
# thousand roundings lie four to five standard deviations out, and both scores move.
_TIED = 8.0


@dataclass(frozen=True, slots=True)
class Flips:
    """The rows whose set of choices changed, how many of them at a near-tie, and the widest gap among them.

    `gap` is NaN where there are no scores to tell.
    """

    changed: frozenset[int]
    tied: int
    gap: float

    @property
    def at_near_ties(self) -> bool:
        """Whether every change was one that rounding can make."""
        return 0 < self.tied == len(self.changed)

    @property
    def scored(self) -> bool:
        """Whether scores tell how near a tie the choices were."""
        return not math.isnan(self.gap)


def flips(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    scores: torch.Tensor,
    *,
    error: float,
    padding: frozenset[int] = frozenset(),
) -> Flips | None:
    """Look at each row whose choice changed, and how far apart the reference's scores of what left and what came are.

    `error` is the relative L2 error to be expected of the scores; rows of `padding` do not count. None when the scores
    do not fit the choices: another number of rows, or an index beyond them.
    """
    chosen = _rows(reference)
    other = _rows(candidate.reshape(reference.shape))
    worth = np.asarray(scores.double().numpy()).reshape(-1, scores.shape[-1]) if scores.ndim else np.empty((0, 0))
    if len(worth) != len(chosen) or not worth.size or not _within(worth.shape[1], chosen, other):
        return None
    chosen_scores = np.take_along_axis(worth, chosen, axis=1)
    if np.mean(chosen_scores.mean(1) > worth.mean(1)) < 0.5:
        return None  # what lies beside them is not what they were chosen by
    tolerance = _TIED * error * float(np.sqrt(np.mean(worth**2)))
    rows: list[int] = []
    tied, gap = 0, 0.0
    for row, (before, after) in enumerate(zip(chosen.tolist(), other.tolist(), strict=True)):
        left, came = set(before) - set(after), set(after) - set(before)
        if not left or row in padding:
            continue
        rows.append(row)
        apart = max(abs(float(worth[row, i] - worth[row, j])) for i in left for j in came) if came else float("inf")
        gap = max(gap, apart)
        tied += apart <= tolerance
    return Flips(frozenset(rows), tied, gap)


def changed(reference: torch.Tensor, candidate: torch.Tensor) -> frozenset[int]:
    """Return the rows whose set of choices is another."""
    pairs = zip(_rows(reference).tolist(), _rows(candidate.reshape(reference.shape)).tolist(), strict=True)
    return frozenset(row for row, (before, after) in enumerate(pairs) if set(before) != set(after))


def _within(number: int, *indices: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> bool:
    return all(each.min() >= 0 and each.max() < number for each in indices)


def _rows(indices: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    array: np.ndarray[tuple[int, int], np.dtype[np.int64]] = np.asarray(indices.long().numpy())
    return array.reshape(-1, indices.shape[-1] if indices.ndim else 1)
