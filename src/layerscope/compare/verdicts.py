"""Judge measured pairs: what is the same, what is noise, where the difference is made, what merely inherits it.

    rows = judge(measured, candidate="int8", scale=Scale(run.floors))
    verdict(rows)

Evidence in order: weights that differ, a module whose output is not what its weights make of its input, an excess over
the floor that what it was given does not explain. `roots.py` has the rule, `floors.py` the scale.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from layerscope.checks import ErrorNumbers
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.noise_floor import (
    LIMIT,
    Excess,
    Expected,
    Scale,
    Step,
    class_of,
    coarser,
    excess,
    numbers_in,
    step_of,
)
from layerscope.compare.record_pair import RecordPair
from layerscope.compare.result import PARTED, Floor, Kind, Row, Verdict
from layerscope.compare.roots import Feeds, StepRow, accused, causes
from layerscope.compare.routing import Flips
from layerscope.points import Point
from layerscope.report.writing import many

_NO_PLACE = 3.0  # limits, over which a row that nothing explains makes the verdict, with no place named
_REWRITTEN = 0.3  # relative L2, from which a value that leaves no trace is written otherwise
_ALIKE = 0.8  # of the modules of one kind, which are one finding
_FEWEST_ALIKE = 3


@dataclass(frozen=True, slots=True)
class Checking:
    """What a module's check says of the candidate: its residual, how many limits that is, and more in words."""

    residual: float
    floor: float
    times: float
    kind: str
    said: str = ""

    def __str__(self) -> str:
        own = f"by its own input and weights it is off by {self.residual:.3g}, {self.residual / self.floor:.3g} times "
        return f"{own}what rounding does there{self.said}"


Ties = Callable[[RecordPair], "Flips | None"]
Numbering = Callable[[RecordPair, "frozenset[int]"], "ErrorNumbers | None"]
Checks = Callable[[RecordPair, str], "Checking | None"]


@dataclass(slots=True)
class _Step:
    """What is known of one step so far."""

    depth: int = 0  # how many rows that round have run
    arithmetic: str = "float64"
    flipped: str = ""  # where a choice flipped at a near-tie, in words
    rerouted: set[int] = field(default_factory=set)  # the tokens it sent elsewhere
    choosing: dict[str, int] = field(default_factory=dict)  # modules in which choices flipped, and how many choose
    ordered: bool = False  # whether choices were listed in another order, or flipped, as scores decide


@dataclass(slots=True)
class _Judged:
    """One pair with what it shows by itself."""

    one: RecordPair
    kind: Kind
    because: str
    step: _Step
    arithmetic: str = ""
    numbers: ErrorNumbers | None = None
    expected: Expected | None = None
    excess: Excess | None = None
    checking: Checking | None = None
    exact: bool = False


def judge(
    measured: Iterable[RecordPair],
    *,
    candidate: str,
    scale: Scale | None = None,
    ties: Ties = lambda measured: None,
    numbers: Numbering = lambda measured, rerouted: None,
    checks: Checks = lambda measured, arithmetic: None,
    arithmetic: str = "float64",
) -> list[Row]:
    """Give every pair its kind and its reason, in order.

    `arithmetic` is the class that is declared, or that most modules show; what is stored more coarsely counts as that.
    """
    court = Judge(candidate, scale or Scale(), ties, numbers, checks, arithmetic)
    return court.rows([court.look(one) for one in measured])


class Judge:
    """Looks at pairs one by one, then tells what they say together."""

    def __init__(
        self, candidate: str, scale: Scale, ties: Ties, numbers: Numbering, checks: Checks, arithmetic: str
    ) -> None:
        self._candidate, self._scale, self._ties = candidate, scale, ties
        self._numbers, self._checks, self._arithmetic = numbers, checks, arithmetic
        self._steps: dict[Step, _Step] = {}
        self._feeds = Feeds.read(scale.carried.fed) if scale.carried is not None else Feeds()

    # What one pair shows by itself --------------------------------------------------------------

    def look(self, one: RecordPair) -> _Judged:
        """Tell what one pair shows by itself."""
        step = self._steps.setdefault(step_of(one.moment), _Step(arithmetic=self._arithmetic))
        m = one.metrics
        if m is None:
            if step.flipped and one.kind == "unpaired" and one.counterpart is not None:
                return _Judged(one, "noise", f"{one.because}: {step.flipped}", step)
            return _Judged(one, one.kind, one.because, step, exact=one.kind in ("root", "nonfinite"))
        for dtype in one.dtypes or (m.reference.dtype, m.candidate.dtype):
            step.arithmetic = coarser(step.arithmetic, class_of(dtype))
        if not m.bitwise:
            step.depth += 1
        found = _Judged(one, "noise", "", step, step.arithmetic)
        if self._scale.carried is not None:
            self._scale.calibrate(step.arithmetic, lambda excesses: accused(excesses, self._feeds))
        self._judge(found, m, step)
        if one.because:
            found.because = f"{found.because}; {one.because}"
        return found

    def _judge(self, found: _Judged, m: Metrics, step: _Step) -> None:
        one = found.one
        if m.bitwise:
            found.kind, found.because = "same", "every bit is equal" if m.count else "both are empty"
        elif m.equal == m.count:
            found.kind = "same"
            found.because = f"every value is equal, as {m.reference.dtype} and {m.candidate.dtype}"
        elif m.nonfinite.differing:
            found.kind, found.because, found.exact = "nonfinite", _nonfinite(m), True
        elif not m.compared:
            found.kind, found.because = "degenerate", "no element is finite on both sides"
        elif m.sets is not None or _whole_numbers(m):
            kind, found.because = self._flipped(one, m, step)
            found.kind, found.exact = kind, kind == "root"
        else:
            self._weigh(found, m, step)

    def _weigh(self, found: _Judged, m: Metrics, step: _Step) -> None:
        """Set a row's numbers against its floor, and its module's output against its weights."""
        one = found.one
        numbers = self._numbers(one, frozenset(step.rerouted)) or numbers_in(m, step.rerouted)
        key = one.point, one.moment
        expected = self._scale.floor(key, numbers, m.shape, arithmetic=step.arithmetic, depth=step.depth)
        found.numbers, found.expected = numbers, expected
        found.checking = self._checks(one, step.arithmetic)
        if _constant(m):
            what = "all zero" if m.reference.max == 0 else f"constant ({m.reference.max:.6g})"
            found.kind = "degenerate"
            found.because = f"the reference is {what}: no relative error means anything; max |d| {m.max_abs:.3g}"
            return
        if math.isnan(m.relative_l2):
            found.exact = True
            found.because = f"the reference vanishes beside the candidate: max |d| {m.max_abs:.3g} has no ratio to it"
            return
        if math.isnan(numbers.relative_l2):
            found.because = f"relative L2 {m.relative_l2:.3g}, in rows that a choice or a mask leaves out"
            return
        if expected.chaotic:
            found.because = (
                f"rounding alone makes {expected.error:.3g} here in {step.arithmetic}: nothing can be told of "
                f"relative L2 {numbers.relative_l2:.3g}"
            )
            return
        if any(one.point.name.startswith(f"{w}.") and numbers.rows != n for w, n in step.choosing.items()):
            found.because = f"relative L2 {m.relative_l2:.3g}, in experts whose rows are other tokens'"
            return
        lone = m.max_abs**2 > m.mse * m.compared / 2
        found.excess = excess(numbers, expected, flipped=bool(step.flipped), lone=lone)
        found.because = _in_words(found.excess, m) if found.excess else f"relative L2 {numbers.relative_l2:.3g}"
        if step.flipped:
            found.because += f": {step.flipped}"

    def _flipped(self, one: RecordPair, m: Metrics, step: _Step) -> tuple[Kind, str]:
        """Judge choices and other whole numbers: there is no rounding in them, but rounding may have decided them."""
        different = m.count - m.equal
        said = f"{different:,} of {m.count:,} whole numbers differ"
        if m.sets is not None and m.sets.rows:
            flips = self._ties(one)
            if not m.sets.changed:
                said = f"the same numbers in another order, in {m.sets.reordered:,} of {m.sets.rows:,} rows"
                if not step.ordered and (flips is None or not flips.scored):  # token ids, say: their order matters
                    return "root", said
                step.ordered = True
                return "noise", f"{said}: choices, whose order the scores beside them decide"
            said = f"{m.sets.changed:,} of {m.sets.rows:,} choices differ"
            if flips is not None and not flips.changed:
                step.choosing[one.point.name.rpartition(".")[0]] = m.sets.rows
                return "noise", f"{said}, of padding alone"
            step.ordered = True
            if flips is not None and (flips.at_near_ties or step.rerouted.issuperset(flips.changed)):
                step.choosing[one.point.name.rpartition(".")[0]] = m.sets.rows
            if flips is not None and step.rerouted.issuperset(flips.changed):
                return "noise", f"{said}: {step.flipped}"
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
            shares = [
                n.changed[one.point, one.moment] for n in self._scale.noise if (one.point, one.moment) in n.changed
            ]
            if shares and share <= 2 * max(shares):
                step.flipped = f"choices at {one.point.place} flip under noise as well"
                step.rerouted |= flips.changed if flips is not None else frozenset()
                return "noise", f"{said}; noise alone changes {max(shares):.1%}"
        return "root", said

    # What the rows say together -----------------------------------------------------------------

    def rows(self, judged: list[_Judged]) -> list[Row]:
        """Tell where a difference was made from where it is merely seen, step by step; `judged` is used up."""
        together: dict[int, list[_Judged]] = defaultdict(list)
        for one in judged:
            together[id(one.step)].append(one)
        made: dict[int, str] = {}
        parted: dict[str, _Judged] = {}  # the first root of each point, over the steps
        for several in together.values():
            first: _Judged | None = None
            seen = [_seen(one) for one in several]
            at_root = dict(causes(seen, self._feeds))
            for at, one in enumerate(several):
                evidence = at_root.get(at)
                over = one.exact or (one.excess is not None and one.excess.times > 1)
                if evidence is not None:
                    earlier = next(iter(parted.values()), None)
                    known = str(one.one.point) in parted
                    if earlier is not None and not known and first is None and evidence == "excess":
                        one.kind = "inherited"
                        one.because += f"; {_short(earlier.one.point)} parted at {earlier.one.moment}"
                        continue
                    made[id(one)] = evidence
                    first = first or one
                    parted.setdefault(str(one.one.point), one)
                    if one.kind not in ("nonfinite",):
                        one.kind = "root"
                    one.because = _reason(one, evidence, several[:at])
                elif over and first is None and str(one.one.point) in parted and one.kind != "nonfinite":
                    one.kind, first, made[id(one)] = "root", one, "excess"  # once more
                elif over and one.kind in ("noise", "root", "nonfinite"):
                    part = _part(one, several[:at], made)
                    given = _given(one, several[:at])
                    if part is not None:
                        one.kind = "inherited"
                        one.because += f"; its part {_short(part.one.point)} parted before it"
                    elif given is not None and (first is not None or parted):
                        one.kind = "inherited"
                        one.because += f"; its {given.one.point.side} differs already"
                    elif first is not None or parted:
                        cause = first or next(iter(parted.values()))
                        one.kind = "inherited"
                        one.because += f"; {_short(cause.one.point)} parted before it"
                    elif one.kind != "nonfinite" and not one.exact:
                        one.because += "; what it was given explains it"
        together.clear()
        judged.reverse()
        rows = []
        while judged:  # each goes as its row comes
            one = judged.pop()
            rows.append(self._made(one, made.get(id(one), "")))
        return rows

    def _made(self, found: _Judged, evidence: str) -> Row:
        one, expected = found.one, found.expected
        because = found.because
        if found.kind in PARTED and one.method.startswith("order"):
            because += "; the two were paired by order and shape alone"
        floor = ratio = None
        if found.kind == "same" and one.metrics is not None and not _whole_numbers(one.metrics):
            ratio = 0.0
        if expected is not None and found.numbers is not None:
            floor = Floor(expected.error, expected.source)
            ratio = found.numbers.relative_l2 / expected.error
        return Row(
            one.point,
            one.moment,
            self._candidate,
            found.kind,
            because,
            one.counterpart,
            one.method,
            one.metrics,
            floor,
            ratio,
            one.reference_has,
            excess=found.excess.times if found.excess is not None else None,
            evidence=evidence,
            checked=found.checking.times if found.checking is not None else None,
            arithmetic=found.arithmetic,
            chaotic=expected is not None and expected.chaotic,
            numbers=found.numbers,
        )


def _in_words(found: Excess, m: Metrics) -> str:
    if found.name == "factor":
        return f"scaled by {m.scale:.6g}: {found}"
    tokens = m.tokens
    if found.name == "worst" and tokens is not None and found.times > 1:
        at = next((at for at, error in tokens.largest if error <= found.error * 1.01), tokens.worst)
        times = found.error / found.floor if found.floor else math.inf
        return f"token {at} of {tokens.count} is off by {found.error:.3g}, {times:.3g} times its floor"
    return str(found)


def _seen(found: _Judged) -> StepRow:
    one = found.one
    differs = found.kind not in ("same", "missing", "unpaired")
    if found.expected is not None and found.expected.by_noise and found.excess is not None and found.excess.times <= 1:
        differs = False  # a run that the user calls noise differs as much
    return StepRow(
        one.point,
        one.moment.call,
        found.excess.times if found.excess is not None else None,
        exact=found.exact,
        checked=_checked(found),
        unknown=found.kind in ("missing", "unpaired"),
        weights=one.weights_differ and differs and one.point.side == "output",
    )


def _checked(found: _Judged) -> bool | None:
    """Tell whether a module agrees with its weights; None where its check could not have seen what stands out."""
    if found.checking is None:
        return None
    narrow = found.excess is not None and found.excess.name in ("column", "worst") and found.excess.times > 1
    return None if narrow and found.checking.times <= 1 else found.checking.times <= 1


def _reason(found: _Judged, evidence: str, before: Sequence[_Judged]) -> str:
    one = found.one
    because = found.because
    if evidence == "check" and found.checking is not None:
        return f"{found.checking}; {because}" if because else str(found.checking)
    if one.weights_differ:
        because += "; its weights differ"
    given = [o for o in before if (o.one.point.name, o.one.moment.call) == (one.point.name, one.moment.call)]
    given = [o for o in given if o.one.point.side == ("grad_output" if "grad" in one.point.side else "input")]
    if given and all(o.kind in ("same", "noise") for o in given) and one.point.side in ("output", "grad_input"):
        because += f"; its {given[0].one.point.side} agrees"
    return because


def _given(found: _Judged, before: Sequence[_Judged]) -> _Judged | None:
    """Return what a module was given that is over its limit already."""
    point, call = found.one.point, found.one.moment.call
    side = "grad_output" if point.side == "grad_input" else "input" if point.side == "output" else ""
    own = (o for o in before if (o.one.point.name, o.one.point.side, o.one.moment.call) == (point.name, side, call))
    return next((o for o in own if o.exact or (o.excess is not None and o.excess.times > 1)), None)


def _part(found: _Judged, before: Sequence[_Judged], made: dict[int, str]) -> _Judged | None:
    point = found.one.point
    if point.side not in ("output", "grad_input"):
        return None
    within = f"{point.name}." if point.name else ""
    parts = (o for o in before if id(o) in made and o.one.point.name.startswith(within))
    return next((o for o in parts if o.one.point.name != point.name), None)


def _short(point: Point) -> str:
    text = str(point)
    return text.removesuffix(":output") if point.side == "output" and not point.leaf else text


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


def verdict(rows: Sequence[Row], *, grid: str = "") -> Verdict:
    """Sum up the rows of one candidate; `grid` says in words that it is quantised."""
    compared = [row for row in rows if row.kind not in ("missing", "unpaired")]
    shapes = [row for row in rows if row.kind == "unpaired" and row.counterpart is not None]
    roots = [row for row in rows if row.kind in ("root", "nonfinite")]
    written = _written_otherwise(roots, rows)
    roots = [row for row in roots if row not in written]
    final = _final(rows)
    if roots:
        return Verdict("differs", _headline(roots, rows))
    parted = None if written else next((row for row in rows if row.parted), None)
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
    far = max((r for r in compared if r.excess is not None), key=lambda r: r.excess or 0.0, default=None)
    if not written and far is not None and (far.excess or 0.0) > _NO_PLACE:
        return Verdict("differs", f"no place stands out, but {far} is {far.excess:.3g} times its limit: {far.because}")
    if kinds["same"] == len(compared):
        left = len(rows) - len(compared)
        but = f"; {many(left, 'more row')} could not be compared" if left else ""
        return Verdict("same", f"every value of {many(len(compared), 'row')} is equal{but}")
    if grid:
        error = None if final is None or final.metrics is None else final.metrics.relative_l2
        off = "was not compared" if error is None else f"is off by {error:.3g}"
        if error is not None and error >= 1:
            return Verdict("differs", f"{grid}, no layer stands out, and nothing is left of {final}: it {off}")
        return Verdict("quantised", f"{grid}, and no layer stands out; its final output {off}")
    if final is not None and final.chaotic:
        return Verdict("cannot tell", f"{final} cannot be judged: {final.because}")
    measured = [row for row in compared if row.ratio is not None and math.isfinite(row.ratio) and row.kind == "noise"]
    worst = max(measured, key=lambda row: row.ratio or 0.0, default=None)
    said = f"what differs is noise; the largest error is {worst.ratio:.3g} times its floor, at {worst}" if worst else ""
    said = said or "what differs has no relative error"
    if written:
        said += f"; {written[0]} is written otherwise, and what comes after it agrees: {written[0].because}"
    elif far is not None and (far.excess or 0.0) > 1:
        said += f"; {far} is over its limit, and nothing makes it: {far.because}"
    if final is not None and worst is not None and final is not worst:
        said += f"; {_final_said(final)}"
    if uncertain:
        verb = "differs" if len(uncertain) == 1 else "differ"
        said += f"; {many(len(uncertain), 'degenerate row')} {verb}, see {uncertain[0]}"
    return Verdict("noise", said)


def _headline(roots: Sequence[Row], rows: Sequence[Row]) -> str:
    """Name the first root, and beside it the one that does the most damage, or all that are off alike."""
    first = roots[0]
    said = f"{first} parts first{_when(first, rows)}: {first.because}"
    kind = _kind_of(first)
    alike = {row.name for row in roots if _kind_of(row) == kind}
    every = {row.name for row in rows if _kind_of(row) == kind and row.kind not in ("missing", "unpaired")}
    if len(alike) >= max(_FEWEST_ALIKE, _ALIKE * len(every)):
        return (
            f"{said}; {len(alike)} of the {len(every)} {kind} are off alike: a formula or a grid rather than one fault"
        )
    worst = max(roots, key=_damage)
    if worst.name != first.name and _damage(worst) > 2 * _damage(first):
        said += f"; {worst} does the most damage: {worst.because}"
    return said


def _damage(row: Row) -> float:
    return math.inf if row.kind == "nonfinite" else max(row.excess or 0.0, row.checked or 0.0)


def _kind_of(row: Row) -> str:
    """Name the modules that are alike but for their number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", str(row))


def _final(rows: Sequence[Row]) -> Row | None:
    """Return the row of the model's own output, else of what ran last."""
    outputs = [row for row in rows if row.point.side == "output" and row.metrics is not None and row.reference_has]
    outputs = [row for row in outputs if row.ratio is not None or row.kind == "same"]
    return next((row for row in outputs if not row.name), outputs[-1] if outputs else None)


def _final_said(row: Row | None) -> str:
    if row is None or row.metrics is None:
        return "its final output was not compared"
    if row.ratio is None:
        return f"its final output {row} is equal"
    of = f" in {row.arithmetic}" if row.arithmetic else ""
    error = row.ratio * row.floor.error if row.floor is not None else row.metrics.relative_l2
    return f"its final output {row} is off by {error:.3g}, {row.ratio:.2g} of the floor{of}"


def _rewritten(row: Row) -> bool:
    """Tell whether a value is another altogether: a scale moved elsewhere, another order; a small fault is none."""
    return (row.excess or 0.0) > 1 and row.metrics is not None and row.metrics.relative_l2 > _REWRITTEN


def _written_otherwise(roots: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return the roots after which everything is back within the floor: another way to write the same function."""
    if not roots or any(row.kind == "nonfinite" or not _rewritten(row) for row in roots):
        return []
    within = {row.name for row in roots}
    after = False
    holds = []
    for row in rows:
        after = after or row is roots[0]
        if not after or row.point.side != "output" or (row.excess is None and row.kind != "same"):
            continue
        if not row.name or any(name.startswith(f"{row.name}.") for name in within):
            holds.append(row)
    own = [row for row in holds if not row.name]
    outputs = [row for row in rows if row.point.side == "output" and row not in roots]
    if not holds or not own or any((row.excess or 0.0) > 1 for row in (*holds, *outputs)):
        return []
    judged = all(row.kind == "same" or (row.floor is not None and row.floor.source == "floors") for row in own)
    return list(roots) if judged else []


def _when(row: Row, rows: Sequence[Row]) -> str:
    several = len({(r.moment.epoch, r.moment.step, r.moment.batch) for r in rows}) > 1
    return f" at {row.moment}" if several else ""


def _grave(row: Row, compared: Sequence[Row]) -> bool:
    """Whether a degenerate row is off by more than rounding could be, or by a hundredth of what is usual here."""
    if row.metrics is None or not row.metrics.compared:
        return row.metrics is None
    if row.ratio is not None and math.isfinite(row.ratio):
        return row.ratio > LIMIT * 6
    usual = [other.metrics.reference.rms for other in compared if other.metrics is not None]
    usual = sorted(rms for rms in usual if rms > 0)
    return row.metrics.max_abs > (usual[len(usual) // 2] / 100 if usual else 0.0)
