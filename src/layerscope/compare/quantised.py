"""Quantised candidates have a scale of their own: each layer is held against its siblings.

if grid := grid_of(plan):                  # "int8", as the candidate says
    scale = Siblings(plan)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from layerscope.checks import NAMES, Numbers
from layerscope.compare.noise_floor import LIMIT, Expected, Key, Scale, numbers_in
from layerscope.compare.plan import Plan
from layerscope.points import Point

_GRID = re.compile(
    r"(?<![a-z])(int[248]|u?int4|fp[48]|float8|nf4|w[248]a\d+|w8|w4|gptq|awq)(?![0-9])|quantis|quantiz", re.I
)
_FEWEST = 3
# Layers of one kind, one of which stands out among the others: their errors grow with depth, by a few times.
_TIMES = dict(zip(NAMES, (4.0, 4.0, 5.0, 12.0), strict=False))


def grid_of(plan: Plan) -> str:
    """Say that a candidate is quantised, in words, where it says so, the reference does not, and its outputs show it.

    A grid changes what every layer gives. Where half of the outputs or more are equal, the word is not taken for it.
    """
    said = [_grid(run.run.manifest.mode, run.run.manifest.settings) for run in (plan.left, plan.right)]
    if not said[1] or said[0]:
        return ""
    outputs = [one.metrics for one in plan.pairs if one.point.side == "output" and one.metrics is not None]
    off = [m.relative_l2 > 0 for m in outputs if m.compared]
    return said[1] if 2 * sum(off) > len(off) else ""


def _grid(mode: str | None, settings: object) -> str:
    stated = settings.get("quantised") if isinstance(settings, dict) else None
    if isinstance(stated, str):
        return stated
    return mode if mode and _GRID.search(mode) else ""


class Siblings(Scale):
    """What layers of one kind have in common, as the scale for each of them."""

    def __init__(self, plan: Plan, *, limit: float = LIMIT) -> None:
        super().__init__(plan.carried, limit=limit)
        kinds: dict[tuple[str, ...], list[Numbers]] = {}
        self._kind: dict[str, tuple[str, ...]] = {}
        for one in plan.pairs:
            if one.metrics is not None and one.metrics.compared and one.metrics.relative_l2 > 0:
                kinds.setdefault(self._kind_of(one.point), []).append(numbers_in(one.metrics))
        every = [n for several in kinds.values() for n in several]
        self._all = _median(every) if every else None
        self._usual = {kind: _median(several) for kind, several in kinds.items() if len(several) >= _FEWEST}

    def floor(self, key: Key, numbers: Numbers, shape: Sequence[int], *, arithmetic: str, depth: int) -> Expected:
        """Return what its siblings have."""
        found = self._usual.get(self._kind_of(key[0]))
        limits = _TIMES if found is not None else {name: 4 * times for name, times in _TIMES.items()}
        return Expected(found or self._all or numbers, "siblings", limits, 2.0**-24)

    def _kind_of(self, point: Point) -> tuple[str, ...]:
        text = str(point)
        if text not in self._kind:
            self._kind[text] = (re.sub(r"(?<![^.])\d+(?![^.:])", "*", text),)
        return self._kind[text]


def _median(several: Sequence[Numbers]) -> Numbers:
    columns = []
    for at in range(7):
        values = sorted(n[at] for n in several if not math.isnan(n[at]))
        columns.append(values[len(values) // 2] if values else math.nan)
    return Numbers._make([*columns, several[0].rows, several[0].values])
