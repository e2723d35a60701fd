"""What can be said of a pair where tensors were not kept: equal fingerprints, and a lower bound of the error.

    by_statistics(reference, candidate)

Equal fingerprints are equal bits. Other statistics show that two tensors differ by at least so much, never that they
are the same: a permutation has the same mean and the same norm.
"""

from __future__ import annotations

import math

from layerscope.compare.noise_floor import rounding
from layerscope.compare.result import Kind
from layerscope.errors import LayerscopeError
from layerscope.stats import Summary, summarize
from layerscope.store import Entry

_DEEP = 72.0  # how many times its rounding a dtype's error may have grown over the depth of a model


def by_statistics(reference: Entry, candidate: Entry) -> tuple[Kind, str]:
    """Judge a pair by its summaries: its kind, and the reason."""
    try:
        mine, theirs = _summary(reference), _summary(candidate)
    except LayerscopeError as error:  # one damaged record does not cost the others
        return "missing", str(error)
    if mine is None or theirs is None:
        which = "reference" if mine is None else "candidate"
        return "missing", f"the {which} kept neither a tensor nor a summary of it"
    if mine.shape != theirs.shape:
        return "unpaired", f"shapes differ, {list(mine.shape or ())} against {list(theirs.shape or ())}"
    if (
        mine.dtype == theirs.dtype
        and None is not mine.fingerprint == theirs.fingerprint
        and mine.placed == theirs.placed
    ):
        return "same", "the fingerprints of all bits are equal; tensors were not kept"
    if (mine.nan, mine.posinf, mine.neginf) != (theirs.nan, theirs.posinf, theirs.neginf):
        return "nonfinite", f"{_odd(theirs)} in the candidate, {_odd(mine)} in the reference"
    if mine.min == mine.max == theirs.min == theirs.max:
        return "same", f"both are {mine.min:.6g} throughout; tensors were not kept"
    if mine.min == mine.max == 0:
        return "degenerate", f"the reference is all zero, the candidate up to {theirs.absmax:.3g}"
    bound = at_least(mine, theirs)
    coarser = max(map(rounding, (mine.dtype or "", theirs.dtype or "", "float32")))
    allowed = _DEEP * coarser
    if bound > allowed:
        return "root", f"statistics alone: relative L2 is {bound:.3g} at least"
    return "noise", f"statistics alone agree within rounding (relative L2 is {bound:.3g} at least)"


def at_least(reference: Summary, candidate: Summary) -> float:
    """Return a lower bound of the relative L2 error: norms and means cannot differ by more than the difference has."""
    norm = reference.l2
    if not norm:
        return math.inf if candidate.l2 else 0.0
    by_norm = abs(candidate.l2 - norm) / norm
    by_mean = abs(candidate.mean - reference.mean) * math.sqrt(reference.finite) / norm
    return max(by_norm, by_mean)


def _summary(entry: Entry) -> Summary | None:
    summary = entry.summary
    return summarize(entry.tensor()) if summary is None and entry.dtype is not None else summary


def _odd(summary: Summary) -> str:
    return f"{summary.nan:,} NaN and {summary.posinf + summary.neginf:,} infinite values"
