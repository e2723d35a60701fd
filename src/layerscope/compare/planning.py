"""What of one run is measured against another: points and moments that belong together, as jobs.

plan = Plan(Records(reference), Records(candidate), rules)
plan.jobs; plan.told                    # what is to be measured; what is not, and why
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from layerscope.compare.alignment import Alignment, Pair, Seen, align
from layerscope.compare.floors import Key, Noise, Step, rounding, step_of
from layerscope.compare.jobs import Job
from layerscope.compare.likeness import Likeness, form_of
from layerscope.compare.metrics import Metrics
from layerscope.compare.moments import pair_moments
from layerscope.compare.ordering import Followed, follow_choices
from layerscope.compare.routing import Flips, changed, flips
from layerscope.compare.rules import Rule
from layerscope.compare.statistics import by_statistics
from layerscope.compare.verdicts import Measured
from layerscope.errors import LayerscopeError, NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.store import Entry, Reader

__all__ = ["Plan", "Records", "fitting"]

# What these record after the fact has the leaves of the artefact, which need not be those of the source.
_RENUMBERING = frozenset({"torchscript", "export", "onnx"})
_VANISHED = "compilers fold what does not depend on the inputs into constants, and leave out what nobody uses"


class Records:
    """A run's records, by point and in order."""

    def __init__(self, run: Reader) -> None:
        self.run = run
        self.entries = list(run.records())
        self.of: dict[Point, dict[Moment, Entry]] = {}
        for entry in self.entries:
            self.of.setdefault(entry.point, {})[entry.moment] = entry
        self.order = {(entry.point, entry.moment): at for at, entry in enumerate(self.entries)}

    @cached_property
    def beside(self) -> dict[tuple[str, str], list[Point]]:
        """The points of each module and side, whatever the leaf."""
        found: dict[tuple[str, str], list[Point]] = {}
        for point in self.of:
            found.setdefault((point.name, point.side), []).append(point)
        return found

    @property
    def seen(self) -> list[Seen]:
        """The points, as alignment takes them."""
        first = self.first
        return [Seen(point, first[point].shape, len(of), form_of(first[point])) for point, of in self.of.items()]

    @cached_property
    def first(self) -> dict[Point, Entry]:
        """The first record of each point."""
        return {point: next(iter(of.values())) for point, of in self.of.items()}


def fitting(rules: Sequence[Rule], left: Records, rights: Sequence[Records]) -> list[tuple[Records, Sequence[Rule]]]:
    """Give each run the rules that are meant for it; raises NoSuchPoint for a rule that is meant for none."""
    fitting = [(right, _meant_for(rules, left, right)) for right in rights]
    for rule in rules:
        if not any(rule in meant for _, meant in fitting):
            align(left.seen, rights[0].seen, rules=[rule])
    return fitting


def _meant_for(rules: Sequence[Rule], left: Records, right: Records) -> Sequence[Rule]:
    """Return the rules that name something in these two runs."""

    def fits(rule: Rule) -> bool:
        try:
            align(left.seen, right.seen, rules=[rule])
        except NoSuchPoint:
            return False
        return True

    return [rule for rule in rules if fits(rule)]


def _only(alignment: Alignment, asked: Collection[Point] | None) -> Alignment:
    """Leave out what was not asked for, after everything was paired: what is left over decides what pairs in order."""
    if asked is None:
        return alignment
    return replace(
        alignment,
        pairs=tuple(pair for pair in alignment.pairs if pair.reference in asked),
        only_reference=tuple((point, why) for point, why in alignment.only_reference if point in asked),
        only_candidate=(),
        ignored=tuple(point for point in alignment.ignored if point in asked),
    )


class Plan:
    """What of one run is measured against the reference, and what came of it."""

    def __init__(
        self, left: Records, right: Records, rules: Sequence[Rule], asked: Collection[Point] | None = None
    ) -> None:
        self.left, self.right = left, right
        apart = Likeness(left.first, right.first) if _renumbered(left.run, right.run) else None
        self.alignment = _only(align(left.seen, right.seen, rules=rules, apart=apart), asked)
        self.jobs: list[Job] = []
        self.told: list[Measured] = []  # what is not measured, and why
        self.found: dict[Job, Metrics] = {}
        self.unread: dict[Job, str] = {}
        self.followed: dict[Job, Followed] = {}
        for pair in self.alignment.pairs:
            self._plan(pair)
        self.jobs.sort(key=lambda job: left.order[job.key])

    @property
    def metrics(self) -> dict[Key, Metrics]:
        """What was measured, by the reference's point and moment; of several parts of one point, the worst."""
        several = sorted(self.found.items(), key=lambda item: max(0.0, item[1].relative_l2))  # a NaN is none
        return {job.key: metrics for job, metrics in several}

    def _plan(self, pair: Pair) -> None:
        here, there = self.left.of[pair.reference], self.right.of[pair.candidate]
        matched, lone, other = pair_moments(list(here), list(there))
        for mine, theirs, how in matched:
            method = f"{pair.method}, moments {how}" if how else pair.method
            job = Job(pair, here[mine], there[theirs], method)
            reason = _not_measurable(job)
            if reason is None:
                self.jobs.append(job)
            else:
                self.told.append(reason)
        for moment in lone:
            why = f"the candidate has no record of it at {moment}"
            self.told.append(Measured(pair.reference, moment, None, pair.method, kind="unpaired", because=why))
        for moment in other:
            why = f"the reference has no record of it at {moment}"
            self.told.append(Measured(pair.candidate, moment, None, pair.method, because=why, reference_has=False))

    @property
    def dtypes(self) -> set[str]:
        """Every dtype on the way."""
        return {dtype for job in self.jobs for dtype in self._dtypes(job)}

    def _dtypes(self, job: Job) -> tuple[str, str]:
        return _recorded(job.reference, self.left.run), _recorded(job.candidate, self.right.run)

    def measured(self) -> list[Measured]:
        """Return every row, in the order the reference ran; what only the candidate has comes last."""
        rows = [*self.told, *self._lonely()]
        differing = _differing_weights(self.left.run, self.right.run)
        for job in self.jobs:
            point, moment = job.key
            rows.append(
                Measured(
                    point,
                    moment,
                    job.pair.candidate,
                    job.method,
                    metrics=self.found.get(job),
                    kind="missing",
                    because=self.unread.get(job) or self._followed(job),
                    weights_differ=point.name in differing,
                    rounded=max(map(rounding, self._dtypes(job))),
                )
            )
        last = len(self.left.order)
        return sorted(rows, key=lambda row: self.left.order.get((row.point, row.moment), last))

    def _lonely(self) -> Iterator[Measured]:
        lost = {Point.parse(m.point): m.reason for m in self.right.run.missing}
        for point, why in self.alignment.only_reference:
            moment = self.left.first[point].moment
            if point in lost:
                yield Measured(point, moment, None, "", kind="missing", because=f"the candidate lost it: {lost[point]}")
            elif self._vanished(point):
                why = f"{self.right.run.manifest.runtime} has nothing of this module: {_VANISHED}"
                yield Measured(point, moment, None, "", kind="missing", because=why)
            else:
                yield Measured(point, moment, None, "", because=why)
        for point, why in self.alignment.only_candidate:
            yield Measured(point, self.right.first[point].moment, None, "", because=why, reference_has=False)

    def _vanished(self, point: Point) -> bool:
        """Tell whether nothing is left, in an artefact that was asked for the same, of a module of the reference."""
        mine, theirs = self.left.run.manifest, self.right.run.manifest
        return _renumbered(self.right.run) and mine.taps == theirs.taps and point.name not in self._modules

    @cached_property
    def _modules(self) -> set[str]:
        """The modules of the reference of which something has a partner, or could have one."""
        lonely = {point.name for point, _ in self.alignment.only_candidate}
        return lonely | {pair.reference.name for pair in self.alignment.pairs}

    def follow_choices(self) -> None:
        """Measure once more what lies in the order of choices, where the candidate lists them in another."""
        self.followed = follow_choices(self.found)
        self.found |= {job: followed.metrics for job, followed in self.followed.items()}

    def rerouted(self) -> dict[Step, frozenset[int]]:
        """Return the tokens of each step for which a choice came out otherwise."""
        found: dict[Step, frozenset[int]] = {}
        for job, metrics in self.found.items():
            if metrics.sets is not None and metrics.sets.changed:
                step = step_of(job.reference.moment)
                found[step] = found.get(step, frozenset()) | changed(job.reference.tensor(), job.candidate.tensor())
        return found

    def ties(self, one: Measured, noise: Sequence[Noise]) -> Flips | None:
        """Look whether choices flipped at near-ties: the scores stand beside them, in the same module's value."""
        job = self._by_key[one.point, one.moment][0]
        shape = job.reference.shape or ()
        rows = prod(shape[:-1])
        for point in self.left.beside[one.point.name, one.point.side]:
            scores = self.left.of[point].get(one.moment)
            if (
                scores is None
                or scores.shape is None
                or not rounding(scores.dtype or "")
                or prod(scores.shape[:-1]) != rows
                or scores.shape[-1] <= shape[-1]
            ):
                continue
            with contextlib.suppress(LayerscopeError):  # scores that cannot be read tell nothing
                error = self._error_of((point, one.moment), noise)
                found = flips(job.reference.tensor(), job.candidate.tensor(), scores.tensor(), error=error)
                if found is not None:
                    return found
        other = changed(job.reference.tensor(), job.candidate.tensor())
        scored = not other and any(followed.choice is job for followed in self.followed.values())
        return Flips(other, 0, 0.0 if scored else math.nan)

    def _followed(self, job: Job) -> str:
        return f"read in the order of {self.followed[job].choice.reference.point}" if job in self.followed else ""

    def _error_of(self, key: Key, noise: Sequence[Noise]) -> float:
        """Return the error to be expected of scores: what the noise runs show, and at least their own rounding."""
        errors = [run.metrics[key].relative_l2 for run in noise if key in run.metrics]
        stored = [rounding(dtype) for job in self._by_key.get(key, ()) for dtype in self._dtypes(job)]
        return max([*errors, *stored]) if errors else 2 * self._coarsest

    @cached_property
    def _by_key(self) -> dict[Key, list[Job]]:
        found: dict[Key, list[Job]] = {}
        for job in self.jobs:
            found.setdefault(job.key, []).append(job)
        return found

    @cached_property
    def _coarsest(self) -> float:
        return max(map(rounding, self.dtypes))


def _renumbered(*runs: Reader) -> bool:
    """Tell whether the names of leaves are those of a compiler, in one of the runs."""
    return any(run.manifest.runtime in _RENUMBERING for run in runs)


def _not_measurable(job: Job) -> Measured | None:
    """Return the row of a pair that has no two tensors of one shape; None when it has."""
    point, moment = job.key
    if job.reference.dtype is None or job.candidate.dtype is None:
        return by_statistics(job.reference, job.candidate, method=job.method)
    shape, other = job.shapes
    if shape == other or (job.pair.flat and prod(shape) == prod(other)):
        return None
    way = (
        f"; if they are the same values in the same order, declare `flat {point.place}`"
        if prod(shape) == prod(other)
        else ""
    )
    why = f"shapes differ, {list(shape)} against {list(other)}{way}"
    return Measured(point, moment, job.pair.candidate, job.method, because=why)


def _recorded(entry: Entry, run: Reader) -> str:
    """Return what a tensor was recorded in: a dump may say that its layout stored it in another dtype."""
    said = None if run.layout == "layerscope" else entry.note.get("recorded_dtype")
    return str(said or entry.dtype)


def _differing_weights(reference: Reader, candidate: Reader) -> set[str]:
    """Return the modules whose fingerprints tell that their weights differ, when those are the exception."""
    mine, theirs = reference.manifest.weights, candidate.manifest.weights
    both = mine.keys() & theirs.keys()
    differing = {name for name in both if mine[name] != theirs[name]}
    return differing if 2 * len(differing) < len(both) else set()
