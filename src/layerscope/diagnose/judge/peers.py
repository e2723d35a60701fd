"""Layers that all differ alike are quantised, not wrong: their common behaviour is the floor of each.

    standing_out(siblings, among=siblings)
    rows = quantised(rows, passes)

When nearly every module of one kind is beyond its rounding, and by much the same, the dtype's rounding is no longer
what to expect. A module whose error, or whose best-fitting factor, stands out from its siblings' is still to blame.
Modules whose weights lie on a grid are judged by each other too, when there are several: a model may be quantised in
part.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from layerscope.diagnose.judge.evidence import is_quantised
from layerscope.diagnose.judge.rows import Row
from layerscope.diagnose.replay.passes import Passes

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


SEVERAL = 3  # modules on a grid: one or two may be a mistake


def quantised(rows: list[Row], passes: Passes) -> list[Row]:
    """Clear the modules that differ just as their siblings do; those that stand out stay to blame.

    Where one kind of module is quantised, others are judged by their own kind if it differs as a whole, and by that one
    if they are few: an embedding that shares its weight with a quantised head is quantised too.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        if row.judged.call:  # a module that runs twelve times is one module
            continue
        module = passes.ours.modules.by_name[row.judged.name]
        weights = module.parameters(recurse=not row.judged.leaf)
        usable = row.measure is not None and row.measure.shape and row.judged.kind not in ("nonfinite", "random")
        if usable and any(parameter.dim() > 1 for parameter in weights):
            groups[type(module).__name__].append(at)
    siblings = {at: _sibling(rows[at]) for members in groups.values() for at in members}
    known = [kind for kind, members in groups.items() if common([siblings[at] for at in members])]
    if known:
        pool = [siblings[at] for kind in known for at in groups[kind]]
        for kind, members in groups.items():
            own = [siblings[at] for at in members]
            as_a_whole = kind in known or (len(own) > 1 and all(sibling.beyond for sibling in own))
            _clear(rows, members, standing_out(own, among=own if as_a_whole else pool))
        return rows
    marked = [at for at in siblings if rows[at].judged.guilty and is_quantised(rows[at], passes)]
    own = [siblings[at] for at in marked]
    if len(marked) >= SEVERAL and alike(own):
        _clear(rows, marked, standing_out(own, among=own))
    return rows


def _clear(rows: list[Row], members: Collection[int], apart: Mapping[str, str]) -> None:
    cleared = {rows[at].judged.name for at in members}
    for at, row in enumerate(rows):
        judged = row.judged
        if judged.name not in cleared or not judged.guilty:
            continue
        if judged.name in apart:
            judged = replace(judged, kind="root", because=apart[judged.name])
        else:
            judged = replace(judged, kind="quantised", because="off as much as the others that are quantised")
        rows[at] = replace(rows[at], judged=judged)


def _sibling(row: Row) -> Sibling:
    assert row.measure is not None
    return Sibling(row.judged.name, row.measure.error, row.measure.scale, row.judged.guilty)
