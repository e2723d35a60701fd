"""Layers that all differ alike are quantised, not wrong: their common behaviour is the floor of each.

    standing_out(siblings, among=siblings)

When nearly every module of one kind is beyond its rounding, and by much the same, the dtype's rounding is no longer
what to expect. A module whose error, or whose best-fitting factor, stands out from its siblings' is still to blame.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Sibling", "common", "standing_out"]

LEAST = 6  # siblings that it takes to know what is common
SHARE = 0.8  # of them that are beyond their floor
LARGEST = 0.5  # an error of which half the value is left is no quantisation
APART = 3.0  # times the middle error, at least
SPREADS = 5.0  # times the usual scatter of the siblings, at least
FACTOR = 0.01  # the least that a factor of its own must be


class Sibling(NamedTuple):
    """One module of a kind: its isolated error, its best-fitting factor, and whether it is beyond its floor."""

    name: str
    error: float
    scale: float
    beyond: bool


def common(siblings: Sequence[Sibling]) -> bool:
    """Tell whether these modules differ alike, as quantised ones do."""
    usable = [s for s in siblings if math.isfinite(s.error)]
    beyond = [s for s in usable if s.beyond]
    if len(usable) < LEAST or len(beyond) < SHARE * len(usable):
        return False
    return alike(beyond)


def alike(beyond: Sequence[Sibling]) -> bool:
    """Tell whether errors are of a size that a grid makes, and no factor is common to them."""
    middle = statistics.median(s.error for s in beyond)
    drift = statistics.median(abs(s.scale - 1) for s in beyond)
    return middle < LARGEST and drift < max(0.25 * middle, 1e-3)


def standing_out(siblings: Sequence[Sibling], *, among: Sequence[Sibling]) -> dict[str, str]:
    """Return the modules that stand out from others, each with the reason."""
    beyond = [s for s in among if s.beyond]
    logs = [math.log(s.error) for s in beyond if 0 < s.error < math.inf]
    middle = statistics.median(logs)
    scatter = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    limit = max(math.log(APART), SPREADS * scatter)
    drift = statistics.median(abs(s.scale - 1) for s in beyond)
    found: dict[str, str] = {}
    for s in (s for s in siblings if s.beyond):
        if not math.isfinite(s.error) or (s.error > 0 and math.log(s.error) - middle > limit):
            found[s.name] = f"its error is {s.error / math.exp(middle):.1f}x that of its siblings"
        elif abs(s.scale - 1) > max(10 * drift, FACTOR):
            found[s.name] = f"it is the reference's times {s.scale:.3f}, its siblings are within {max(drift, 1e-4):.0e}"
    return found
