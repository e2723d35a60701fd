"""Judge measured pairs: what is the same, what is noise, where the difference is made, what merely inherits it.

    rows = judge(measured, candidate="int8", noise=noise, limit=LIMIT)
    verdict(rows)

Rows come in the order the reference ran. The first that differs by more than the floor explains is the root; what
follows inherits, unless its own inputs were recorded and agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from layerscope.compare.floors import ESTIMATED, Expected, Noise, Step, expected, off_most, step_of
from layerscope.compare.metrics import Metrics
from layerscope.compare.routing import Flips
from layerscope.compare.rows import PARTED, Floor, Kind, Row, Verdict
from layerscope.points import Moment, Point
from layerscope.report.writing import many

__all__ = ["LIMIT", "Measured", "Ties", "judge", "verdict"]

# A candidate's error may be this many times the floor. Measured on five architectures: healthy kernels and dtypes stay
# below 1.1, a Linear scaled by 1.05 gives 5 and more.
LIMIT = 1.5
# What a few tokens may exceed the floor by, before it counts without the others.
_P90 = 2.0
_WORST = 8.0
# After a choice has flipped, or where one element has most of the error, what looks systematic must show in most
# tokens as well.
_BROAD = 1.2
# A factor other than 1 that explains the error is systematic; rounding's own is smaller than its error by the root of
# how many independent roundings there are, and weights that are rounded once make them few.
_INDEPENDENT = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """One aligned pair at one moment, measured or not; `because` says why not, or what was odd about measuring it.

    Without metrics, `kind` is what the row is: `missing`, `unpaired`, or `same` and the like where statistics alone
    were kept. `rounded` is the rounding of the coarser dtype of the two.
    """

    point: Point
    moment: Moment
    counterpart: Point | None
    method: str
    metrics: Metrics | None = None
    kind: Kind = "unpaired"
    because: str = ""
    reference_has: bool = True
    weights_differ: bool = False
    rounded: float = 0.0


Ties = Callable[[Measured], Flips | None]


@dataclass(slots=True)
class _Step:
    """What has parted in one step so far."""

    depth: int = 0  # how many rows that round have run
    root: Row | None = None
    inside: dict[tuple[str, str], Row] = field(default_factory=dict)  # the first of each module's parts, by side
    seen_inputs: dict[tuple[str, int], list[Row]] = field(default_factory=dict)  # by module and call
    flipped: str = ""  # where a choice flipped at a near-tie, in words
    rerouted: set[int] = field(default_factory=set)  # the tokens it sent elsewhere


def judge(
    measured: Iterable[Measured],
    *,
    candidate: str,
    noise: Sequence[Noise] = (),
    limit: float = LIMIT,
    ties: Ties = lambda measured: None,
) -> list[Row]:
    """Give every pair its kind and its reason, in order."""
    court = _Court(candidate, noise, limit, ties)
    return [court.row(one) for one in measured]


class _Court:
    def __init__(self, candidate: str, noise: Sequence[Noise], limit: float, ties: Ties) -> None:
        self._candidate, self._noise, self._limit, self._ties = candidate, noise, limit, ties
        self._steps: dict[Step, _Step] = {}
        self._roots: dict[str, Row] = {}  # the first root of each point
        self._floor: Floor | None = None
        self._coarsest = 0.0

    def row(self, one: Measured) -> Row:
        step = self._steps.setdefault(step_of(one.moment), _Step())
        metrics = one.metrics
        if metrics is None:
            return self._told(one, step)
        if not metrics.bitwise:
            step.depth += 1
            self._coarsest = max(self._coarsest, one.rounded)
        known = expected(
            (one.point, one.moment),
            metrics,
            noise=self._noise,
            depth=step.depth,
            coarsest=self._coarsest,
            before=self._floor,
        )
        if known.floor.source != "estimate":
            self._floor = known.floor
        ratio = metrics.relative_l2 / known.floor.error if known.floor.error else math.nan
        kind, because = self._kind(one, metrics, known, step)
        because = f"{because}; {one.because}" if one.because else because
        if kind == "root":
            kind, because = self._whose(one, because, step)
        elif kind == "nonfinite":
            kind, because = self._whose(one, because, step, own="nonfinite")
        row = self._made(one, kind, because, known.floor, None if _whole_numbers(metrics) else ratio)
        self._remember(row, step)
        return row

    def _told(self, one: Measured, step: _Step) -> Row:
        if step.flipped and one.kind == "unpaired" and one.counterpart is not None:
            return self._made(one, "noise", f"{one.because}: {step.flipped}")
        row = self._made(one, one.kind, one.because)
        if one.kind in ("root", "nonfinite"):
            kind, because = self._whose(one, one.because, step, own=one.kind)
            row = self._made(one, kind, because)
        self._remember(row, step)
        return row

    def _made(
        self, one: Measured, kind: Kind, because: str, floor: Floor | None = None, ratio: float | None = None
    ) -> Row:
        if kind in PARTED and one.method.startswith("order"):
            because += "; the two were paired by order and shape alone"
        return Row(
            one.point,
            one.moment,
            self._candidate,
            kind,
            because,
            one.counterpart,
            one.method,
            one.metrics,
            floor,
            ratio,
            one.reference_has,
        )

    # What one pair shows by itself --------------------------------------------------------------

    def _kind(self, one: Measured, m: Metrics, known: Expected, step: _Step) -> tuple[Kind, str]:
        if m.bitwise:
            return "same", "every bit is equal" if m.count else "both are empty"
        if m.equal == m.count:
            return "same", f"every value is equal, as {m.reference.dtype} and {m.candidate.dtype}"
        if m.nonfinite.differing:
            return "nonfinite", _nonfinite(m)
        if not m.compared:
            return "degenerate", "no element is finite on both sides"
        if m.sets is not None or _whole_numbers(m):
            return self._flipped(one, m, known, step)
        if _constant(m):
            what = "all zero" if m.reference.max == 0 else f"constant ({m.reference.max:.6g})"
            return "degenerate", f"the reference is {what}: no relative error means anything; max |d| {m.max_abs:.3g}"
        if math.isnan(m.relative_l2):
            return "root", f"the reference vanishes beside the candidate: max |d| {m.max_abs:.3g} has no ratio to it"
        excess = _excess(m, known, self._limit, step)
        if excess:
            return "root", excess
        ratio = m.relative_l2 / known.floor.error
        if step.flipped and ratio > self._limit:
            return "noise", f"relative L2 {m.relative_l2:.3g}, {ratio:.3g} times the floor: {step.flipped}"
        return "noise", f"relative L2 {m.relative_l2:.3g} is {ratio:.3g} times the floor of {known.floor.error:.3g}"

    def _flipped(self, one: Measured, m: Metrics, known: Expected, step: _Step) -> tuple[Kind, str]:
        """Judge choices and other whole numbers: there is no rounding in them, but rounding may have decided them."""
        different = m.count - m.equal
        said = f"{different:,} of {m.count:,} whole numbers differ"
        if m.sets is not None and m.sets.rows:
            flips = self._ties(one)
            if not m.sets.changed:
                said = f"the same numbers in another order, in {m.sets.reordered:,} of {m.sets.rows:,} rows"
                if flips is None or not flips.scored:  # token ids, say: their order matters
                    return "root", said
                return "noise", f"{said}: choices, whose order the scores beside them decide"
            said = f"{m.sets.changed:,} of {m.sets.rows:,} choices differ"
            if flips is not None and flips.at_near_ties:
                step.flipped = step.flipped or f"a choice at {one.point.place} flipped at a near-tie"
                step.rerouted |= flips.changed
                return "noise", f"{said}, each a flip at a near-tie: scores at most {flips.gap:.3g} apart"
            if flips is not None and flips.scored:
                return (
                    "root",
                    f"{said}, {len(flips.changed) - flips.tied:,} of them no near-tie (up to {flips.gap:.3g} apart)",
                )
            share = m.sets.changed / m.sets.rows
            if known.changed is not None and share <= 2 * known.changed:
                step.flipped = f"choices at {one.point.place} flip under noise as well"
                step.rerouted |= flips.changed if flips is not None else frozenset()
                return "noise", f"{said}; noise alone changes {known.changed:.1%}"
        return "root", said

    # What the rows before it say ----------------------------------------------------------------

    def _whose(self, one: Measured, excess: str, step: _Step, own: Kind = "root") -> tuple[Kind, str]:
        """Tell where a difference was made from where it is merely seen."""
        name, side, call = one.point.name, one.point.side, one.moment.call
        excess = f"{excess}; its weights differ" if one.weights_differ else excess
        inner = step.inside.get((name, side)) if side in ("output", "grad_input") else None
        if inner is not None:
            return "inherited", f"{excess}; its part {inner} parted before it"
        before, after = ("grad_output", "grad_input") if side.startswith("grad") else ("input", "output")
        inputs = step.seen_inputs.get((name, call), []) if side == after else []
        bad = next((row for row in inputs if row.parted), None)
        if bad is not None:
            return "inherited", f"{excess}; its {bad.point.side} differs already"
        agree = [row.kind in ("same", "noise") for row in inputs if row.point.side == before]
        if agree and all(agree) and not one.point.op:
            return own, f"{excess}; its {before} agrees"
        if step.root is not None:
            return "inherited", f"{excess}; {step.root} parted before it"
        earlier = next(iter(self._roots.values()), None)
        if earlier is not None and str(one.point) not in self._roots:
            return "inherited", f"{excess}; {earlier} parted at {earlier.moment}"
        return own, excess

    def _remember(self, row: Row, step: _Step) -> None:
        name, side, call = row.point.name, row.point.side, row.moment.call
        if side in ("input", "grad_output"):
            step.seen_inputs.setdefault((name, call), []).append(row)
        if row.parted:
            for whole in _wholes(name):
                step.inside.setdefault((whole, side), row)
        if row.kind in ("root", "nonfinite"):
            step.root = step.root or row
            self._roots.setdefault(str(row.point), row)


def _wholes(name: str) -> Iterator[str]:
    """Name the modules that a module is a part of: their outputs show its own."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _excess(m: Metrics, known: Expected, limit: float, step: _Step) -> str:
    """Say by how much a row exceeds its floor; nothing when it does not.

    A moderate excess must be that of most tokens: one massive activation that rounds the other way moves the norm of a
    whole tensor. A few tokens count by themselves when they exceed the floor by far. Tokens that a choice at a near-tie
    sent elsewhere do not count, and what they told the others is allowed for.
    """
    floor, flipped = known.floor, bool(step.flipped)
    estimated = floor.source == "estimate"
    allowed = limit * (ESTIMATED if estimated else 1.0) * (1 + 2 / math.sqrt(m.compared))
    ratio = m.relative_l2 / floor.error
    whole = f"relative L2 {m.relative_l2:.3g} is {ratio:.3g} times the floor of {floor.error:.3g}"
    tokens, usual = m.tokens, known.tokens
    if tokens is None or (usual is None and not estimated):
        if flipped:
            return ""
        return whole if ratio > allowed else _scaled(m, known, whole)
    median, p90, worst = usual if usual is not None else (floor.error,) * 3
    if tokens.median > (2 if flipped else 1) * allowed * median:
        return whole
    if ratio > allowed and m.relative_l2 > 1.001 * tokens.error and not flipped:
        return f"{whole}, more than any token's own: it is where the reference's tokens are zero"
    at, error = off_most(tokens, step.rerouted) or (0, 0.0)
    if error > (2 if flipped else 1) * _WORST * allowed * worst:
        return f"token {at} of {tokens.count} is off by {error:.3g}, its floor is {worst:.3g}"
    if tokens.p90 > _P90 * allowed * p90 and not flipped:
        return f"{whole}; a tenth of the tokens is off by more than {tokens.p90:.3g}"
    if flipped and tokens.median <= _BROAD * median:
        return ""
    return _scaled(m, known, whole, broad=tokens.median > _BROAD * median)


def _scaled(m: Metrics, known: Expected, whole: str, *, broad: bool = False) -> str:
    """Say by which factor the candidate is off, where rounding does not move it as far.

    A factor that one massive activation sets by itself counts only where the error is `broad`, that of most tokens.
    """
    if known.scale is None:
        return ""
    by_chance = max(known.scale, known.floor.error / math.sqrt(min(m.compared, _INDEPENDENT)))
    lone = m.max_abs**2 > m.mse * m.compared / 2
    if abs(m.scale - 1) <= 2 * by_chance or (lone and not broad):
        return ""
    return f"scaled by {m.scale:.6g}: rounding gives {1 + known.scale:.6g} at most; {whole}"


def _nonfinite(m: Metrics) -> str:
    r, c = m.reference, m.candidate
    where = f"first at {list(m.nonfinite.first or ())}"
    if r.finite:
        what = ", ".join(f"{n:,} {w}" for n, w in ((c.nan, "NaN"), (c.posinf, "+inf"), (c.neginf, "-inf")) if n)
        return f"{what} in the candidate, {where}; the reference is finite"
    if c.finite:
        return f"the reference itself has {r.nan:,} NaN and {r.posinf + r.neginf:,} infinite values, {where}"
    return f"{m.nonfinite.differing:,} values are not finite in the same way, {where}"


def _constant(m: Metrics) -> bool:
    """Whether the reference is all zero, or one number over and over; the extremes of complex numbers are of moduli."""
    low, high = m.reference.min, m.reference.max
    return low == high and (high == 0 or (m.count > 1 and not m.reference.dtype.startswith("complex")))


def _whole_numbers(m: Metrics) -> bool:
    kinds = ("int", "uint", "bool")
    return m.reference.dtype.startswith(kinds) and m.candidate.dtype.startswith(kinds)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Sum up the rows of one candidate."""
    compared = [row for row in rows if row.kind not in ("missing", "unpaired")]
    shapes = [row for row in rows if row.kind == "unpaired" and row.counterpart is not None]
    parted = next((row for row in rows if row.kind in ("root", "nonfinite")), None)
    parted = parted or next((row for row in rows if row.parted), None)
    if parted is not None:
        return Verdict("differs", f"{parted} parts first{_when(parted, rows)}: {parted.because}")
    if shapes:
        return Verdict("differs", f"{shapes[0]} cannot be compared: {shapes[0].because}")
    if not compared:
        return Verdict("differs", "nothing could be compared")
    kinds = Counter(row.kind for row in compared)
    uncertain = [row for row in compared if row.kind == "degenerate"]
    grave = next((row for row in uncertain if _grave(row, compared)), None)
    if grave is not None:
        return Verdict("differs", f"{grave} is degenerate and far off: {grave.because}")
    if kinds["same"] == len(compared):
        left = len(rows) - len(compared)
        but = f"; {many(left, 'more row')} could not be compared" if left else ""
        return Verdict("same", f"every value of {many(len(compared), 'row')} is equal{but}")
    measured = [row for row in compared if row.ratio is not None and math.isfinite(row.ratio) and row.kind == "noise"]
    worst = max(measured, key=lambda row: row.ratio or 0.0, default=None)
    said = f"what differs is noise; the largest error is {worst.ratio:.3g} times its floor, at {worst}" if worst else ""
    said = said or "what differs has no relative error"
    if uncertain:
        verb = "differs" if len(uncertain) == 1 else "differ"
        said += f"; {many(len(uncertain), 'degenerate row')} {verb}, see {uncertain[0]}"
    return Verdict("noise", said)


def _when(row: Row, rows: Sequence[Row]) -> str:
    several = len({(r.moment.epoch, r.moment.step, r.moment.batch) for r in rows}) > 1
    return f" at {row.moment}" if several else ""


def _grave(row: Row, compared: Sequence[Row]) -> bool:
    """Whether a degenerate row is off by more than rounding could be, or by a hundredth of what is usual here."""
    if row.metrics is None or not row.metrics.compared:
        return row.metrics is None
    if row.ratio is not None and math.isfinite(row.ratio):
        return row.ratio > LIMIT * ESTIMATED
    usual = [other.metrics.reference.rms for other in compared if other.metrics is not None]
    usual = sorted(rms for rms in usual if rms > 0)
    return row.metrics.max_abs > (usual[len(usual) // 2] / 100 if usual else 0.0)
