"""Check each weighted module of a candidate on the candidate's own recorded input, by what the reference kept of it.

checker = Checker(plan, run.floors)
checker.arithmetic("float32")        # the finest class that explains most modules
checker(measured, "bfloat16")        # one module's, or None
"""

from __future__ import annotations

import math
import statistics
from functools import cached_property
from typing import NamedTuple

from layerscope.checks import rows_kept
from layerscope.compare.comparison_plan import ComparisonPlan
from layerscope.compare.noise_floor import CLASSES, LIMIT
from layerscope.compare.record_pair import RecordPair
from layerscope.compare.verdicts import Checking
from layerscope.errors import LayerscopeError
from layerscope.store import Entry
from layerscope.store.floors import Checked, Floors

# What an output's own rounding leaves, at the least; check rows are kept in float32.
_LEAST = {"float64": 2.0**-24, "float32": 2.0**-24, "float16": 2.0**-13, "bfloat16": 2.0**-10}
_EXPLAINED = 0.8  # of the modules, by the class that a candidate is said to compute in
_FEWEST = 4
_STANDS_OUT = 3.0  # of a quantised module's own error, among its siblings


class _Residual(NamedTuple):
    value: float
    values: int
    checked: Checked


class Checker:
    """The checks of one candidate; `quantised` ones are held against each other."""

    def __init__(
        self, plan: ComparisonPlan, carried: Floors | None, *, limit: float = LIMIT, quantised: bool = False
    ) -> None:
        self._plan, self._carried, self._limit, self._quantised = plan, carried, limit, quantised

    def __call__(self, one: RecordPair, arithmetic: str) -> Checking | None:
        """Check the module that a row is the output of."""
        found = self._residuals.get(one)
        if found is None:
            return None
        kind = found.checked.check.kind
        if self._quantised:
            usual = self._typical.get(kind, max(self._typical.values(), default=math.inf))
            floor = max(usual, self._floor(found, arithmetic))
            times = found.value / (floor * _STANDS_OUT)
            return Checking(found.value, floor, times, kind, said=", among its siblings")
        floor = self._floor(found, arithmetic)
        times = found.value / (floor * self._limit * (1 + 2 / math.sqrt(max(1, found.values))))
        said = self._other_function(one, found, floor) if times > 1 and found.checked.check.is_activation else ""
        return Checking(found.value, floor, times, kind, said=said)

    def arithmetic(self, stored: str) -> str:
        """Return the finest class, no finer than what is stored, that explains most modules; else that one."""
        several = [r for r in self._residuals.values() if r.checked.check.kind in ("linear", "conv")]
        if self._quantised or len(several) < _FEWEST:
            return stored
        for name in CLASSES[CLASSES.index(stored) :]:
            fine = sum(r.value <= self._floor(r, name) * self._limit * 1.1 for r in several)
            if name == stored and fine >= len(several) / 2:
                return stored
            if fine >= _EXPLAINED * len(several):
                return name
        return stored

    @property
    def checked(self) -> int:
        """How many modules were checked."""
        return len({one.point.name for one in self._residuals})

    def _floor(self, found: _Residual, arithmetic: str) -> float:
        terms = max(1.0, math.sqrt(found.checked.check.terms) / 4)
        least = _LEAST[arithmetic] * (terms if arithmetic in ("float64", "float32") else 1.0)
        return max(found.checked.floors.get(arithmetic, 0.0), least)

    def _other_function(self, one: RecordPair, found: _Residual, floor: float) -> str:
        from layerscope.checks.forms import other_form

        x = self._input_of(one)
        name = None if x is None else other_form(x.tensor(), one.whole.tensor(), within=4 * max(floor, 1e-6))
        if name is None or name == found.checked.check.kind:
            return f"; the reference's function is {found.checked.check.kind}"
        return f"; it computes {name}, the reference {found.checked.check.kind}"

    @cached_property
    def _typical(self) -> dict[str, float]:
        kinds: dict[str, list[float]] = {}
        for found in self._residuals.values():
            kinds.setdefault(found.checked.check.kind, []).append(found.value)
        return {kind: statistics.median(values) for kind, values in kinds.items() if len(values) >= _FEWEST}

    @cached_property
    def _residuals(self) -> dict[RecordPair, _Residual]:
        found: dict[RecordPair, _Residual] = {}
        for one in self._plan.pairs if self._carried is not None else ():
            residual = self._residual(one)
            if residual is not None and not math.isnan(residual.value):
                found[one] = residual
        return found

    def _residual(self, one: RecordPair) -> _Residual | None:
        point = one.point
        assert self._carried is not None
        checked = self._carried.checks.get(point.name)
        metrics = one.metrics
        if checked is None or metrics is None or metrics.bitwise or metrics.nonfinite.either:
            return None
        if point.side != "output" or point.leaf or point.op or one.cuts != (None, None):
            return None
        given = self._input_of(one)
        if given is None:
            return None
        try:
            x, y = given.tensor(), one.whole.tensor()
        except LayerscopeError:
            return None
        kept = rows_kept(self._plan.tokens_at(one), tuple(y.shape))
        values = y.numel() // max(1, y.shape[-1] if y.ndim else 1) * 8
        return _Residual(checked.check.residual(x, y, kept), values, checked)

    def _input_of(self, one: RecordPair) -> Entry | None:
        """Return what the candidate's module was given, where that was recorded: its first tensor."""
        point, moment = one.candidate.point, one.candidate.moment
        run = self._plan.right
        entries = (run.of[other].get(moment) for other in run.beside.get((point.name, "input"), ()))
        return next((entry for entry in entries if entry is not None and entry.dtype is not None), None)
