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
from typing import TYPE_CHECKING, cast

from layerscope.checks import Numbers, largest_of, mask_of, numbers_of, rows_kept
from layerscope.compare.alignment import Alignment, Pair, Seen, align
from layerscope.compare.floors import CLASSES, Key, Noise, class_of, coarser, numbers_in, rounding
from layerscope.compare.jobs import Job
from layerscope.compare.likeness import Likeness, form_of
from layerscope.compare.masks import is_mask, seen_alike
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.moments import pair_moments
from layerscope.compare.ordering import Followed, follow_choices
from layerscope.compare.routing import Flips, changed, flips
from layerscope.compare.rows import Kind
from layerscope.compare.rules import Rule
from layerscope.compare.statistics import by_statistics
from layerscope.compare.verdicts import Measured
from layerscope.errors import LayerscopeError, NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.store import Entry, Run
from layerscope.store.floors import Floors

if TYPE_CHECKING:
    import torch

__all__ = ["Plan", "Records", "fitting", "floors_of"]

# What these record after the fact has the leaves of the artefact, which need not be those of the source.
_RENUMBERING = frozenset({"torchscript", "export", "onnx"})
_FEWEST = 0.1  # of the rows, that must be left when choices went elsewhere
_VANISHED = "compilers fold what does not depend on the inputs into constants, and leave out what nobody uses"


class Records:
    """A run's records, by point and in order."""

    def __init__(self, run: Run) -> None:
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
        self,
        left: Records,
        right: Records,
        rules: Sequence[Rule],
        asked: Collection[Point] | None = None,
        *,
        tokens: torch.Tensor | None = None,
    ) -> None:
        self.left, self.right = left, right
        apart = Likeness(left.first, right.first) if _renumbered(left.run, right.run) else None
        self.alignment = _only(align(left.seen, right.seen, rules=rules, apart=apart), asked)
        self.jobs: list[Job] = []
        self.told: list[Measured] = []  # what is not measured, and why
        self.found: dict[Job, Metrics] = {}
        self.unread: dict[Job, str] = {}
        self.followed: dict[Job, Followed] = {}
        self.declared_tokens = tokens
        self.computes = CLASSES[0]  # the class that the candidate is known to compute in, where that is coarser
        self._tokens: dict[tuple[int | None, int, int, int], torch.Tensor | None] = {}
        for pair in self.alignment.pairs:
            self._plan(pair)
        self.jobs.sort(key=lambda job: left.order[job.key])

    @property
    def _exact(self) -> bool:
        """Whether percentiles are worth a second look: the users of these layouts know them to the bit, from numpy."""
        return bool({self.left.run.layout, self.right.run.layout} & {"first-layer", "quamba"})

    def _plan(self, pair: Pair) -> None:
        here, there = self.left.of[pair.reference], self.right.of[pair.candidate]
        matched, lone, other = pair_moments(list(here), list(there))
        for mine, theirs, how in matched:
            method = f"{pair.method}, moments {how}" if how else pair.method
            job = Job(pair, here[mine], there[theirs], method, exact=self._exact)
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
        differing = self._differing
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
                    dtypes=self._dtypes(job),
                )
            )
        last = len(self.left.order)
        return sorted(rows, key=lambda row: self.left.order.get((row.point, row.moment), last))

    @cached_property
    def _differing(self) -> set[str]:
        """The modules whose weights differ; of one that is never called, the module whose code uses them."""
        called = {job.reference.point.name for job in self.jobs if job.reference.point.side == "output"}
        found = set()
        for name in _differing_weights(self.left.run, self.right.run):
            while name and name not in called:
                name = name.rpartition(".")[0]
            if name:
                found.add(name)
        return found

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

    def job_of(self, one: Measured) -> Job | None:
        """Return the job that a row was measured by."""
        several = self._by_key.get((one.point, one.moment), ())
        return next((job for job in several if self.found.get(job) is one.metrics), None)

    def numbers(self, one: Measured, rerouted: frozenset[int] = frozenset()) -> Numbers | None:
        """Measure a pair once more, row by row, without padding and without the rows that choices sent elsewhere.

        None where its own metrics say as much: where it was read in another order, or cannot be read twice.
        """
        job = self.job_of(one)
        if job is None or job in self.followed:
            return None
        with contextlib.suppress(LayerscopeError, RuntimeError):
            ours, theirs = (
                _narrowed(side.tensor(), cut)
                for side, cut in ((job.reference, job.pair.reference_cut), (job.candidate, job.pair.candidate_cut))
            )
            shape = tuple(ours.shape)
            axis = self.axes.get(str(job.reference.point), -1)
            kept = rows_kept(self.tokens_at(job), shape, axis)
            rows = prod(shape) // max(1, shape[axis] if shape else 1)
            if rerouted and axis == -1 and max(rerouted) < rows:
                kept = torch_ones(rows) if kept is None else kept.clone()
                kept[sorted(rerouted)] = False
            if kept is not None and float(kept.sum()) < _FEWEST * rows:
                return Numbers._make([*[math.nan] * 6, 0.0, 0, 0])
            return numbers_of(ours, theirs.reshape(shape), axis=axis, kept=kept)
        return None

    def noise(self) -> Noise:
        """Return what a noise run shows, once it is measured."""
        numbers: dict[Key, Numbers] = {}
        changes: dict[Key, float] = {}
        rerouted: dict[tuple[int | None, int, int], frozenset[int]] = {}
        for one in self.measured():
            if one.metrics is None:
                continue
            when = (one.moment.epoch, one.moment.step, one.moment.rank)
            sets = one.metrics.sets
            if sets is not None and sets.rows:
                changes[one.point, one.moment] = sets.changed / sets.rows
                job = self.job_of(one)
                if sets.changed and job is not None:
                    flipped = changed(job.reference.tensor(), job.candidate.tensor())
                    rerouted[when] = rerouted.get(when, frozenset()) | flipped
            elif one.metrics.compared and not math.isnan(one.metrics.relative_l2):
                found = self.numbers(one, rerouted.get(when, frozenset())) or numbers_in(one.metrics)
                before = numbers.get((one.point, one.moment))
                numbers[one.point, one.moment] = found if before is None else largest_of([before, found])
        return Noise(self.right.run.address, self.arithmetic, numbers, changes)

    @cached_property
    def arithmetic(self) -> str:
        """The coarsest class of arithmetic that any dtype on the way shows."""
        found = CLASSES[0]
        for dtype in self.dtypes:
            found = coarser(found, class_of(dtype))
        return found

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of the channels, of points where the reference says that it is not the last."""
        return {point: axis for point, axis in zip(self.carried.points, self.carried.axes, strict=True) if axis != -1}

    @cached_property
    def carried(self) -> Floors:
        """The floors that the reference carries, else the candidate's own; empty where neither has any."""
        return next((found for run in (self.left.run, self.right.run) if (found := floors_of(run)).points), Floors())

    def tokens_at(self, job: Job) -> torch.Tensor | None:
        """Return which tokens count in a step: as declared, as recorded among the inputs, or as the floors say."""
        if self.declared_tokens is not None:
            return self.declared_tokens
        moment = job.reference.moment
        step = (moment.epoch, moment.step, moment.batch, moment.rank)
        if step not in self._tokens:
            self._tokens[step] = self._recorded_tokens(step)
        return self._tokens[step]

    def _recorded_tokens(self, step: tuple[int | None, int, int, int]) -> torch.Tensor | None:
        for point in self.left.beside.get(("", "input"), ()):
            last = str(point.leaf[-1]) if point.leaf else ""
            for moment, entry in self.left.of[point].items():
                if "mask" in last and (moment.epoch, moment.step, moment.batch, moment.rank) == step:
                    with contextlib.suppress(LayerscopeError):
                        return mask_of({last: entry.tensor()})
        carried = self.carried
        return carried.tokens if carried.step == step else None

    def ties(self, one: Measured, noise: Sequence[Noise]) -> Flips | None:
        """Look whether choices flipped at near-ties: the scores stand beside them, in the same module's value."""
        job = self._by_key[one.point, one.moment][0]
        shape = job.reference.shape or ()
        rows = prod(shape[:-1])
        kept = rows_kept(self.tokens_at(job), shape)
        padding = frozenset() if kept is None else frozenset((~kept).nonzero().flatten().tolist())
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
                both = job.reference.tensor(), job.candidate.tensor()
                found = flips(*both, scores.tensor(), error=error, padding=padding)
                if found is not None:
                    return found
        other = changed(job.reference.tensor(), job.candidate.tensor()) - padding
        scored = not other and any(followed.choice is job for followed in self.followed.values())
        return Flips(other, 0, 0.0 if scored else math.nan)

    def _followed(self, job: Job) -> str:
        return f"read in the order of {self.followed[job].choice.reference.point}" if job in self.followed else ""

    def _error_of(self, key: Key, noise: Sequence[Noise]) -> float:
        """Return the error to be expected of scores: what the noise runs show, and at least their own rounding."""
        errors = [run.numbers[key].relative_l2 for run in noise if key in run.numbers]
        measured = self.carried.largest(coarser(self.arithmetic, self.computes)).get(str(key[0]))
        errors += [] if measured is None or math.isnan(measured.relative_l2) else [measured.relative_l2]
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


def _renumbered(*runs: Run) -> bool:
    """Tell whether the names of leaves are those of a compiler, in one of the runs."""
    return any(run.manifest.runtime in _RENUMBERING for run in runs)


def _not_measurable(job: Job) -> Measured | None:
    """Return the row of a pair that has no two tensors of one shape; None when it has."""
    point, moment = job.key
    if job.reference.dtype is None or job.candidate.dtype is None:
        return by_statistics(job.reference, job.candidate, method=job.method)
    if is_mask(job.reference) and is_mask(job.candidate):
        return _as_masks(job)
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


def _as_masks(job: Job) -> Measured:
    """Return the row of two masks: they are evidence of nothing by themselves, and say what they show."""
    point, moment = job.key
    found = seen_alike(job.reference, job.candidate)
    if found is None:
        kind, why = "noise", f"masks of {list(job.reference.shape or ())} and {list(job.candidate.shape or ())}"
    elif found[0]:
        kind, why = "noise", f"masks: {found[0]:,} of {found[1]:,} positions are seen by one side alone"
    else:
        kind, why = "same", "masks: the same may be seen"
    return Measured(point, moment, job.pair.candidate, job.method, kind=cast("Kind", kind), because=why)


def _recorded(entry: Entry, run: Run) -> str:
    """Return what a tensor was recorded in: a dump may say that its layout stored it in another dtype."""
    said = None if run.layout == "layerscope" else entry.note.get("recorded_dtype")
    return str(said or entry.dtype)


def _differing_weights(reference: Run, candidate: Run) -> set[str]:
    """Return the modules whose fingerprints tell that their weights differ, when those are the exception.

    Weights that are the reference's, cast to another dtype, do not differ.
    """
    mine, theirs = reference.manifest.weights, candidate.manifest.weights
    cast = floors_of(reference).weights.values()
    both = mine.keys() & theirs.keys()
    differing = {name for name in both if theirs[name] not in (mine[name], *(of.get(name) for of in cast))}
    return differing if 2 * len(differing) < len(both) else set()


def floors_of(run: Run) -> Floors:
    """Return the floors that a run carries; none where they cannot be read, which its notes say."""
    try:
        return run.floors
    except LayerscopeError as error:
        said = f"its floors are left out: {error}"
        if said not in run.notes:
            run.notes.append(said)
        return Floors()


def _narrowed(tensor: torch.Tensor, cut: tuple[int, int] | None) -> torch.Tensor:
    return tensor if cut is None else tensor[..., cut[0] : cut[1]]


def torch_ones(rows: int) -> torch.Tensor:
    """Return a mask that keeps every row."""
    import torch

    return torch.ones(rows, dtype=torch.bool)
