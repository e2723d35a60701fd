"""What of one run is measured against another: points and moments that belong together.

plan = Plan(Records(reference), Records(candidate), rules)
plan.pairs; plan.told                   # what is to be measured; what is not, and why
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING

from layerscope.checks import ErrorNumbers, largest_of, mask_of, numbers_of, rows_kept
from layerscope.compare.align.alignment import Alignment, Pair, align
from layerscope.compare.align.experts import grouped, rows_together
from layerscope.compare.align.moments import pair_moments
from layerscope.compare.align.pairing import PairingRule
from layerscope.compare.align.positions import Positions, SharedRows, StepKey, by_position, positions_of, step_key
from layerscope.compare.align.run_points import RunPoint
from layerscope.compare.align.similarity import Similarity, form_of
from layerscope.compare.measure.masks import is_mask, seen_alike
from layerscope.compare.noise_floor import CLASSES, Key, Noise, class_of, coarser, numbers_in, rounding
from layerscope.compare.record_pair import RecordPair
from layerscope.compare.result import Kind
from layerscope.compare.routing import Flips, changed, flips
from layerscope.compare.run_statistics import by_statistics
from layerscope.errors import LayerscopeError
from layerscope.points import Moment, Point
from layerscope.store import Entry, Run
from layerscope.store.floors import Floors

if TYPE_CHECKING:
    import torch


# What these record after the fact has the leaves of the artefact, which need not be those of the source.
_RENUMBERING = frozenset({"torchscript", "export", "onnx"})
_FEWEST = 0.1  # of the rows, that must be left when choices went elsewhere
_VANISHED = "compilers fold what does not depend on the inputs into constants, and leave out unused values"


class RunRecords:
    """A run's records, by point and in order."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.of: dict[Point, dict[Moment, Entry]] = {}
        for entry in run.records():
            self.of.setdefault(entry.point, {})[entry.moment] = entry

    @cached_property
    def beside(self) -> dict[tuple[str, str], list[Point]]:
        """The points of each module and side, whatever the leaf."""
        found: dict[tuple[str, str], list[Point]] = {}
        for point in self.of:
            found.setdefault((point.name, point.side), []).append(point)
        return found

    @property
    def seen(self) -> list[RunPoint]:
        """The points, as alignment takes them."""
        first = self.first
        return [RunPoint(point, first[point].shape, len(of), form_of(first[point])) for point, of in self.of.items()]

    @cached_property
    def first(self) -> dict[Point, Entry]:
        """The first record of each point."""
        return {point: next(iter(of.values())) for point, of in self.of.items()}


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


class ComparisonPlan:
    """What of one run is measured against the reference, and what came of it."""

    def __init__(
        self,
        left: RunRecords,
        right: RunRecords,
        rules: Sequence[PairingRule],
        asked: Collection[Point] | None = None,
        *,
        tokens: torch.Tensor | None = None,
    ) -> None:
        self.left, self.right = left, right
        self._regrouping = _renumbered(left.run, right.run)
        apart = Similarity(left.first, right.first) if self._regrouping else None
        self.alignment = _only(align(left.seen, right.seen, rules=rules, apart=apart, every_rule=False), asked)
        self.pairs: list[RecordPair] = []
        self.told: list[RecordPair] = []  # what is not measured, and why
        self.declared_tokens = tokens
        self.computes = CLASSES[0]  # the class that the candidate is known to compute in, where that is coarser
        self._tokens: dict[StepKey, torch.Tensor | None] = {}
        self._sharing: dict[tuple[StepKey, StepKey], bool | None] = {}
        self._shared: dict[tuple[StepKey, StepKey], SharedRows | None] = {}
        for pair in self.alignment.pairs:
            self._plan(pair)
        self.pairs.sort(key=attrgetter("place"))
        differing = self._differing
        for one in self.pairs:
            one.weights_differ = one.point.name in differing

    @property
    def _exact(self) -> bool:
        """Whether percentiles are worth a second look: the users of these layouts know them to the bit, from numpy."""
        return bool({self.left.run.layout, self.right.run.layout} & {"first-layer", "quamba"})

    def _plan(self, pair: Pair) -> None:
        here, there = self.left.of[pair.reference], self.right.of[pair.candidate]
        found = pair_moments(list(here), list(there))
        matched, lone, other = by_position(found, self._share) if all(self._positions) else found
        fits = not lone and not other and all(here[mine].shape == there[its].shape for mine, its, _ in matched)
        regrouped = set() if fits else self._regrouped(pair, here, there)
        matched = [each for each in matched if step_key(each[0]) not in regrouped]
        lone, other = ([m for m in left if step_key(m) not in regrouped] for left in (lone, other))
        seen: set[Moment] = set()
        for mine, theirs, how in matched:
            method = f"{pair.method}, moments {how}" if how else pair.method
            dtypes = _both(_recorded(here[mine], self.left.run), _recorded(there[theirs], self.right.run))
            records = self._same_tokens(here[mine], there[theirs])
            both = records or (here[mine], there[theirs])
            paired = replace(pair, flat=True) if self._regrouping and _regrouped_axes(*both) else pair
            one = RecordPair.of(paired, *both, method, dtypes=dtypes)
            if mine in seen:  # one step here is several there
                one.moment, one.place = theirs, len(self.left.run) + there[theirs]._at
            seen.add(mine)
            measurable = _measurable(one)
            if records is not None:
                one.because = "; ".join(filter(None, (one.because, "rows are paired by token position")))
            (self.pairs if measurable else self.told).append(one)
        for moment in lone:
            why = f"the candidate has no record of it at {moment}"
            self.told.append(RecordPair(pair.reference, moment, None, pair.method, because=why, place=here[moment]._at))
        for moment in other:
            why = f"the reference has no record of it at {moment}"
            self.told.append(RecordPair(pair.candidate, moment, None, pair.method, because=why, reference_has=False))

    def _regrouped(self, pair: Pair, here: Mapping[Moment, Entry], there: Mapping[Moment, Entry]) -> set[StepKey]:
        """Plan the steps in which experts are called otherwise, all rows together; return them."""
        sides: dict[StepKey, tuple[list[Entry], list[Entry]]] = {}
        for at, entries in enumerate((here, there)):
            for moment in sorted(entries):
                sides.setdefault(step_key(moment), ([], []))[at].append(entries[moment])
        found = set()
        for step, (ours, theirs) in sides.items():
            if not ours or not theirs or [e.shape for e in ours] == [e.shape for e in theirs]:
                continue
            rows = rows_together(ours)
            if rows is not None and rows == rows_together(theirs) and rows in self._chosen(pair.reference.name, step):
                dtypes = _both(_recorded(ours[0], self.left.run), _recorded(theirs[0], self.right.run))
                one = RecordPair.of(pair, *grouped(ours, theirs), pair.method, dtypes=dtypes)
                if one.shapes[0] == one.shapes[1]:
                    one.because = "the rows of experts are paired by their values, over all calls"
                    self.pairs.append(one)
                    found.add(step)
        return found

    def _chosen(self, name: str, step: StepKey) -> set[int]:
        """Return how many choices of experts were made in a step, in the modules around one."""
        return {n for within, at, n in self._choices if at == step and name.startswith(f"{within}.")}

    @cached_property
    def _choices(self) -> list[tuple[str, StepKey, int]]:
        """The module around each choice of the reference, its step, and how many were chosen."""
        return [
            (point.name.rpartition(".")[0], step_key(moment), prod(entry.shape or ()))
            for point, entries in self.left.of.items()
            for moment, entry in entries.items()
            if point.name and len(entry.shape or ()) == 2 and (entry.dtype or "").startswith("int")
        ]

    @cached_property
    def _positions(self) -> tuple[dict[StepKey, Positions], dict[StepKey, Positions]]:
        """Which tokens each step of both runs has, where their inputs tell."""
        return positions_of(self.left.of), positions_of(self.right.of)

    def _share(self, mine: Moment, other: Moment) -> bool | None:
        """Tell whether two steps have a token in common, None where their inputs do not tell."""
        steps = step_key(mine), step_key(other)
        if steps not in self._sharing:
            ours, theirs = (of.get(step) for of, step in zip(self._positions, steps, strict=True))
            self._sharing[steps] = None if ours is None or theirs is None else ours.share(theirs)
        return self._sharing[steps]

    def _same_tokens(self, mine: Entry, other: Entry) -> tuple[Entry, Entry] | None:
        """Return two records' rows of the same tokens; None where these stand in the same places."""
        steps = step_key(mine.moment), step_key(other.moment)
        ours, theirs = (of.get(step) for of, step in zip(self._positions, steps, strict=True))
        if ours is None or theirs is None:
            return None
        if steps not in self._shared:
            self._shared[steps] = None if ours.alike(theirs) else SharedRows(ours, theirs)
        shared = self._shared[steps]
        return None if shared is None else shared.of(mine, other)

    @property
    def dtypes(self) -> set[str]:
        """Every dtype on the way."""
        return {dtype for one in self.pairs for dtype in one.dtypes}

    @property
    def unread(self) -> list[str]:
        """Why records could not be read."""
        return [one.because for one in self.pairs if one.kind == "missing"]

    def measure(self, one: RecordPair, *, threads: int = 1) -> None:
        """Measure a pair; one damaged record does not cost the others."""
        try:
            one.measure(threads=threads, exact=self._exact)
        except LayerscopeError as error:
            one.kind, one.because = "missing", str(error)

    def rows(self) -> list[RecordPair]:
        """Return every pair, measured or not, in the reference's order; what only the candidate has comes last."""
        return sorted([*self.told, *self._lonely(), *self.pairs], key=attrgetter("place"))

    @cached_property
    def _differing(self) -> set[str]:
        """The modules whose weights differ; of one that is never called, the module whose code uses them."""
        called = {one.point.name for one in self.pairs if one.point.side == "output"}
        found = set()
        for name in _differing_weights(self.left.run, self.right.run):
            while name and name not in called:
                name = name.rpartition(".")[0]
            if name:
                found.add(name)
        return found

    def _lonely(self) -> Iterator[RecordPair]:
        lost = {Point.parse(m.point): m.reason for m in self.right.run.missing}
        for point, why in self.alignment.only_reference:
            first = self.left.first[point]
            one = RecordPair(point, first.moment, None, "", because=why, place=first._at)
            if point in lost:
                one.kind, one.because = "missing", f"the candidate lost it: {lost[point]}"
            elif self._vanished(point):
                one.kind = "missing"
                one.because = f"{self.right.run.manifest.runtime} has nothing of this module: {_VANISHED}"
            yield one
        for point, why in self.alignment.only_candidate:
            yield RecordPair(point, self.right.first[point].moment, None, "", because=why, reference_has=False)

    def _vanished(self, point: Point) -> bool:
        """Tell whether nothing is left, in an artefact that was asked for the same, of a module of the reference."""
        mine, theirs = self.left.run.manifest, self.right.run.manifest
        return _renumbered(self.right.run) and mine.taps == theirs.taps and point.name not in self._modules

    @cached_property
    def _modules(self) -> set[str]:
        """The modules of the reference of which something has a partner, or could have one."""
        lonely = {point.name for point, _ in self.alignment.only_candidate}
        return lonely | {pair.reference.name for pair in self.alignment.pairs}

    def numbers(self, one: RecordPair, rerouted: frozenset[int] = frozenset()) -> ErrorNumbers | None:
        """Measure a pair once more, row by row, without padding and without the rows that choices sent elsewhere.

        None where its own metrics say as much: where it was read in another order, or cannot be read twice.
        """
        if one.choice is not None or one.records is None:
            return None
        import torch

        with contextlib.suppress(LayerscopeError, RuntimeError):
            ours, theirs = (_narrowed(side.tensor(), cut) for side, cut in zip(one.records, one.cuts, strict=True))
            shape = tuple(ours.shape)
            axis = self.axes.get(str(one.point), -1)
            kept = rows_kept(self.tokens_at(one), shape, axis)
            rows = prod(shape) // max(1, shape[axis] if shape else 1)
            if rerouted and axis == -1 and max(rerouted) < rows:
                kept = torch.ones(rows, dtype=torch.bool) if kept is None else kept.clone()
                kept[sorted(rerouted)] = False
            if kept is not None and float(kept.sum()) < _FEWEST * rows:
                return ErrorNumbers._make([*[math.nan] * 6, 0.0, 0, 0])
            return numbers_of(ours, theirs.reshape(shape), axis=axis, kept=kept)
        return None

    def noise(self) -> Noise:
        """Return what a noise run shows, once it is measured."""
        numbers: dict[Key, ErrorNumbers] = {}
        changes: dict[Key, float] = {}
        rerouted: dict[tuple[int | None, int, int], frozenset[int]] = {}
        for one in self.pairs:
            if one.metrics is None:
                continue
            when = (one.moment.epoch, one.moment.step, one.moment.rank)
            sets = one.metrics.sets
            if sets is not None and sets.rows:
                changes[one.point, one.moment] = sets.changed / sets.rows
                if sets.changed:
                    flipped = changed(one.reference.tensor(), one.candidate.tensor())
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

    def tokens_at(self, one: RecordPair) -> torch.Tensor | None:
        """Return which tokens count in a step: as declared, as recorded among the inputs, or as the floors say."""
        if one.by_token:
            return None  # padding is not among them
        if self.declared_tokens is not None:
            return self.declared_tokens
        step = step_key(one.moment)
        if step not in self._tokens:
            self._tokens[step] = self._recorded_tokens(step)
        return self._tokens[step]

    def _recorded_tokens(self, step: StepKey) -> torch.Tensor | None:
        for point in self.left.beside.get(("", "input"), ()):
            last = str(point.leaf[-1]) if point.leaf else ""
            for moment, entry in self.left.of[point].items():
                if "mask" in last and step_key(moment) == step:
                    with contextlib.suppress(LayerscopeError):
                        return mask_of({last: entry.tensor()})
        carried = self.carried
        return carried.tokens if carried.step == step else None

    def ties(self, one: RecordPair, noise: Sequence[Noise]) -> Flips | None:
        """Look whether choices flipped at near-ties: the scores stand beside them, in the same module's value."""
        shape = one.reference.shape or ()
        rows = prod(shape[:-1])
        kept = rows_kept(self.tokens_at(one), shape)
        padding = frozenset() if kept is None else frozenset((~kept).nonzero().flatten().tolist())
        for point in self.left.beside[one.point.name, one.point.side]:
            paired = self._by_key.get((point, one.moment))
            scores = paired[0].reference if paired else self.left.of[point].get(one.moment)
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
                both = one.reference.tensor(), one.candidate.tensor()
                found = flips(*both, scores.tensor(), error=error, padding=padding)
                if found is not None:
                    return found
        other = changed(one.reference.tensor(), one.candidate.tensor()) - padding
        scored = not other and one.leads
        return Flips(other, 0, 0.0 if scored else math.nan)

    def _error_of(self, key: Key, noise: Sequence[Noise]) -> float:
        """Return the error to be expected of scores: what the noise runs show, and at least their own rounding."""
        errors = [run.numbers[key].relative_l2 for run in noise if key in run.numbers]
        measured = self.carried.largest(coarser(self.arithmetic, self.computes)).get(str(key[0]))
        errors += [] if measured is None or math.isnan(measured.relative_l2) else [measured.relative_l2]
        errors += [rounding(dtype) for one in self._by_key.get(key, ()) for dtype in one.dtypes]
        return max(errors) if errors else 2 * max(map(rounding, self.dtypes))

    @cached_property
    def _by_key(self) -> dict[Key, list[RecordPair]]:
        found: dict[Key, list[RecordPair]] = {}
        for one in self.pairs:
            found.setdefault(one.key, []).append(one)
        return found


def _regrouped_axes(mine: Entry, other: Entry) -> bool:
    """Tell whether one shape is the other with neighbouring axes taken together: compilers drop such a reshape."""
    few, many = sorted((mine.shape or (), other.shape or ()), key=len)
    if len(few) == len(many) or not few or prod(few) != prod(many):
        return False
    axes = [*many]
    for size in few:
        held = 1
        while axes and held < size:
            held *= axes.pop(0)
        if held != size:
            return False
    return prod(axes) == 1


def _renumbered(*runs: Run) -> bool:
    """Tell whether the names of leaves are those of a compiler, in one of the runs."""
    return any(run.manifest.runtime in _RENUMBERING for run in runs)


def _measurable(one: RecordPair) -> bool:
    """Tell whether a pair has two tensors of one shape; say what is to be said of it where it has not."""
    if one.reference.dtype is None or one.candidate.dtype is None:
        one.kind, one.because = by_statistics(one.reference, one.candidate)
        return False
    if is_mask(one.reference) and is_mask(one.candidate):
        one.kind, one.because = _as_masks(one)
        return False
    shape, other = one.shapes
    if shape == other or (one.flat and prod(shape) == prod(other)):
        return True
    way = (
        f"; if they are the same values in the same order, declare `flat {one.point.place}`"
        if prod(shape) == prod(other)
        else ""
    )
    one.because = f"shapes differ, {list(shape)} against {list(other)}{way}"
    return False


def _as_masks(one: RecordPair) -> tuple[Kind, str]:
    """Say what two masks show: they are evidence of nothing by themselves."""
    found = seen_alike(one.reference, one.candidate)
    if found is None:
        return "noise", f"masks of {list(one.reference.shape or ())} and {list(one.candidate.shape or ())}"
    if found[0]:
        return "noise", f"masks: {found[0]:,} of {found[1]:,} positions are seen by one side alone"
    return "same", "masks: the same may be seen"


def _recorded(entry: Entry, run: Run) -> str:
    """Return what a tensor was recorded in: a dump may say that its layout stored it in another dtype."""
    said = None if run.layout == "layerscope" else entry.note.get("recorded_dtype")
    return str(said or entry.dtype)


@cache
def _both(*dtypes: str) -> tuple[str, ...]:
    return dtypes  # one object for all pairs


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
