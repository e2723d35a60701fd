"""Tell modules that are quantised from modules that are wrong.

    rows = quantised(rows, passes)

Layers that all differ alike are judged by each other (`siblings`). So are those whose weights lie on a grid, when there
are several: a model may be quantised in part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from layerscope.diagnose.evidence import is_quantised
from layerscope.diagnose.passes import Passes
from layerscope.diagnose.rows import Row
from layerscope.diagnose.siblings import Sibling, alike, common, standing_out

__all__ = ["quantised"]

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
