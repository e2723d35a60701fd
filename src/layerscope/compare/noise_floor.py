"""How much error is to be expected at a point without any fault, and by how much a row exceeds it.

    scale = Scale(carried, noise)
    floor = scale.floor(point, moment, numbers, arithmetic="bfloat16", depth=12)
    excess(numbers, floor)

The reference knows best: what it measured on twins of itself, in each class of arithmetic. Noise runs show it too, each
for the class it stands for. Without either it is estimated, so widely that only gross faults stand out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from layerscope.checks import NAMES, ErrorNumbers, largest_of
from layerscope.compare.measure.metrics import Metrics
from layerscope.points import Moment, Point
from layerscope.store.floors import Floors

Key: TypeAlias = "tuple[Point, Moment]"
Step: TypeAlias = "tuple[int | None, int, int]"  # epoch, step, rank

# How many times its floor an error may be. The other numbers' limits go with it.
LIMIT = 2.0
_MEASURED = dict(zip(NAMES, (1.0, 1.0, 1.25, 2.0, 1.0, 1.0), strict=True))
# One noise run is one draw: what few rows or columns do in it says less.
_NOISE = dict(zip(NAMES, (1.0, 1.0, 1.5, 4.0, 2.0, 1.0), strict=True))
_ESTIMATE = dict(zip(NAMES, (1.0, 1.0, 1.5, 8.0), strict=False))

CLASSES = ("float64", "float32", "float16", "bfloat16")
LEAST = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# What an estimate allows for, in roundings: it knows neither width nor outliers nor cancellation.
_WIDE = {"float64": 2048.0, "float32": 512.0, "float16": 64.0, "bfloat16": 24.0}
_CHAOS = 0.5  # where rounding alone makes the half of a value, nothing is to be told
_FEW = 16  # rows, or values
_INDEPENDENT = 16  # roundings that make up a factor: weights that are rounded once make them few
_BROAD = 1.2  # times the median row's floor, from which an error is that of most rows
_RAISED = 2.0  # what a limit is raised by at most because of another point
_OTHER = 2.0  # as much more, on other inputs than the floors were measured on

# The distance between 1 and the next number. A quarter of it is about what rounding to nearest is off by, relatively
# and in the root mean square.
_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "complex32": 2.0**-10,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
    "float4_e2m1fn_x2": 2.0**-1,
}


def rounding(dtype: str) -> float:
    """Return how far off values of a dtype are by rounding, relatively; 0 for integers, which do not round."""
    return _EPSILON.get(dtype, 0.0) / 4


def coarser(one: str, other: str) -> str:
    """Return the coarser of two classes of arithmetic."""
    return max(one, other, key=CLASSES.index)


def class_of(dtype: str) -> str:
    """Return the class of arithmetic that a dtype shows; float64 for what does not round."""
    size = _EPSILON.get(dtype, 0.0)
    return next((name for name in CLASSES if _EPSILON[name] >= size), CLASSES[-1])


def numbers_in(m: Metrics, rerouted: Collection[int] = ()) -> ErrorNumbers:
    """Return what the metrics of a pair say by themselves; the worst of the tokens that were not sent elsewhere."""
    tokens = m.tokens
    rows = (m.relative_l2,) * 3
    if tokens is not None:
        stayed = (error for at, error in tokens.largest if at not in rerouted)
        rows = (tokens.median, tokens.p90, next(stayed, 0.0) if rerouted else tokens.error)
    count = 1 if tokens is None else tokens.count
    return ErrorNumbers(m.relative_l2, *rows, math.nan, abs(m.scale - 1), m.max_abs, count, m.compared)


def step_of(moment: Moment) -> Step:
    """Return the step that a moment belongs to."""
    return moment.epoch, moment.step, moment.rank


@dataclass(frozen=True, slots=True)
class Noise:
    """A noise run, measured against the reference: where it lies, its class of arithmetic, its numbers by point.

    `changed` is the share of rows of an index tensor that noise alone changed.
    """

    address: str
    arithmetic: str
    numbers: Mapping[Key, ErrorNumbers]
    changed: Mapping[Key, float] = field(default_factory=dict)


class Expected(NamedTuple):
    """What is to be expected of one row: numbers, where they come from, and how many times each may be reached."""

    numbers: ErrorNumbers
    source: str
    limits: Mapping[str, float]
    least: float

    @property
    def error(self) -> float:
        """The relative L2 error that is to be expected."""
        known = self.numbers.relative_l2
        return self.least if math.isnan(known) else max(known, self.least)

    @property
    def by_noise(self) -> bool:
        """Whether a run that the user calls noise says so."""
        return self.source not in ("floors", "estimate", "siblings")

    @property
    def chaotic(self) -> bool:
        """Whether rounding alone may change the value beyond recognition."""
        limit = self.limits.get("relative_l2", self.limits.get("worst", 1.0))
        return self.error * limit > _CHAOS and self.source not in ("estimate", "siblings")


class Excess(NamedTuple):
    """The number of a row that is furthest over its limit: how far, which one, what it is, and its floor."""

    times: float
    name: str
    error: float
    floor: float

    def __str__(self) -> str:
        what = _CALLED[self.name]
        if not self.floor:
            return f"{what} {self.error:.3g}, where rounding moves nothing"
        return f"{what} {self.error:.3g} is {self.error / self.floor:.3g} times the floor of {self.floor:.3g}"


_CALLED = {
    "relative_l2": "relative L2",
    "median": "the median row's error",
    "p90": "a tenth of the tokens is off by more than",
    "worst": "the worst row's error",
    "column": "the worst column's error",
    "factor": "the best factor's distance from 1,",
    "largest": "the largest |d|",
}


class Scale:
    """What rows are judged by: floors that a run carries, or noise runs, or an estimate; the surest that there is."""

    def __init__(self, carried: Floors | None = None, noise: Sequence[Noise] = (), *, limit: float = LIMIT) -> None:
        self.carried = carried if carried is not None and carried.twins else None
        self.noise = noise
        self.limit = limit
        self.raised: dict[str, float] = {}  # by class: what leaving one twin out asked for
        self._raised_at: dict[tuple[str, str], float] = {}  # and at a point by itself
        self._largest: dict[str, dict[str, ErrorNumbers]] = {}
        self._shapes = dict(zip(self.carried.points, self.carried.shapes, strict=True)) if self.carried else {}

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of the channels, of points where it is not the last."""
        of = self.carried
        return dict(zip(of.points, of.axes, strict=True)) if of is not None else {}

    def floor(self, key: Key, numbers: ErrorNumbers, shape: Sequence[int], *, arithmetic: str, depth: int) -> Expected:
        """Return what is to be expected of a row that is the `depth`-th to run, in a class of arithmetic."""
        point, moment = key
        if self.carried is not None:
            found = self._measured(str(point), arithmetic)
            if found is not None:
                same_step = (moment.epoch, moment.step, moment.batch, moment.rank) == self.carried.step
                same_shape = self._shapes.get(str(point)) == tuple(shape)
                by = max(self.raised.get(arithmetic, 1.0), self._raised_at.get((arithmetic, str(point)), 1.0))
                limits = self._limits(_MEASURED, numbers, by)
                if not (same_step and same_shape):
                    limits = _elsewhere(limits, numbers.rows, same_step=same_step)
                return Expected(found, "floors", limits, LEAST[arithmetic])
        several = [(n.numbers[key], n.address) for n in self.noise if n.arithmetic == arithmetic and key in n.numbers]
        if several:
            loudest = max(several, key=lambda one: one[0].relative_l2)[1]
            together = largest_of(one for one, _ in several)
            return Expected(together, loudest, self._limits(_NOISE, numbers), LEAST[arithmetic] / 2)
        error = LEAST[arithmetic] * _WIDE[arithmetic] * (1 + math.sqrt(depth) / 2)
        guess = ErrorNumbers(error, error, error, error, math.nan, math.nan, 0.0, numbers.rows, numbers.values)
        return Expected(guess, "estimate", self._limits(_ESTIMATE, numbers), error)

    def _measured(self, point: str, arithmetic: str) -> ErrorNumbers | None:
        assert self.carried is not None
        if arithmetic not in self._largest:
            self._largest[arithmetic] = self.carried.largest(arithmetic)
        return self._largest[arithmetic].get(point)

    def _limits(self, kind: Mapping[str, float], numbers: ErrorNumbers, by: float = 1.0) -> dict[str, float]:
        few = max(1.0, _FEW / max(1, numbers.values))
        return {name: self.limit * times * by * few for name, times in kind.items()}

    # Calibration --------------------------------------------------------------------------------

    def calibrate(self, arithmetic: str, accused: Callable[[Mapping[str, float]], Mapping[str, float]]) -> None:
        """Raise the limits of a class until no twin is accused by the others.

        `accused` takes the excess of each point and returns those of the roots. What a kink or a flipped choice does to
        one point is that point's: all the others' limits go up with it only so far.
        """
        twins = self.carried.twins.get(arithmetic, {}) if self.carried is not None else {}
        if self.carried is None or arithmetic in self.raised or len(twins) < 3:
            return
        self.raised[arithmetic] = 1.0
        for name, own in twins.items():
            others = [twin for other, twin in twins.items() if other != name]
            excesses: dict[str, float] = {}
            for at, point in enumerate(self.carried.points):
                mine, known = own[at], [n for twin in others if (n := twin[at]) is not None]
                if mine is not None and known:
                    limits = self._limits(_MEASURED, mine)
                    expected = Expected(largest_of(known), "floors", limits, LEAST[arithmetic])
                    found = excess(mine, expected)
                    excesses[point] = found.times if found is not None else 0.0
            for point, times in accused(excesses).items():
                self._raised_at[arithmetic, point] = max(times, self._raised_at.get((arithmetic, point), 1.0))
                self.raised[arithmetic] = min(_RAISED, max(times, self.raised[arithmetic]))


def _elsewhere(limits: Mapping[str, float], rows: int, *, same_step: bool) -> dict[str, float]:
    """Return the limits where floors were measured on another shape, or on other inputs."""
    if rows < _FEW:
        return {"worst": limits["worst"] * (1.0 if same_step else _OTHER)}
    return {name: limits[name] * (1.0 if same_step else _OTHER) for name in ("relative_l2", "median", "p90")}


def excess(numbers: ErrorNumbers, expected: Expected, *, flipped: bool = False, lone: bool = False) -> Excess | None:
    """Return the number that is furthest over its limit, in limits; None where nothing can be told.

    After a choice has `flipped`, the rows that it did not send elsewhere are allowed twice as much. A `lone` element
    that has most of the error moves the norm and the factor of many rows, and says nothing of them.
    """
    if numbers.zero or expected.chaotic:
        return None
    told = set(NAMES)
    broad = numbers.median > _BROAD * max(expected.numbers.median, expected.least)
    if flipped:
        told -= {"relative_l2", "column"} | (set() if broad else {"factor"})
    if lone and numbers.rows >= _FEW:
        told -= {"relative_l2", "column"} | (set() if broad else {"factor"})
    found = {e.name: e for e in _excesses(numbers, expected, told, flipped=flipped)}
    worst = max(found.values(), key=lambda e: e.times, default=None)
    one = found.get("worst")
    if one is not None and one.times > 1 and "median" in found and found["median"].times <= 1:
        return one._replace(times=worst.times if worst is not None else one.times)  # a few rows are what is off
    return worst


def _excesses(numbers: ErrorNumbers, expected: Expected, told: set[str], *, flipped: bool) -> Iterator[Excess]:
    for name, limit in expected.limits.items():
        if name not in told:
            continue
        error, floor = getattr(numbers, name), getattr(expected.numbers, name)
        if math.isnan(error) or (name != "factor" and math.isnan(floor)):
            continue
        floor = max(floor, expected.least)
        if name == "factor":
            if math.isnan(floor):
                continue
            chance = expected.error / math.sqrt(min(max(1, numbers.values), _INDEPENDENT))
            floor = max(0.0 if math.isnan(expected.numbers.factor) else expected.numbers.factor, chance)
        twice = 2 if flipped and name != "factor" else 1
        yield Excess(error / (floor * limit * twice), name, error, floor)
