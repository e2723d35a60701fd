"""One run as alignment sees it: its points, what each of them means, and which are still without a partner.

run = RunPoints("reference", [RunPoint(Point("model.layers.0"), (2, 8), 1)])
run.open; run.take(Point("model.layers.0"))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from layerscope.compare.align.names import Names, numbers_of
from layerscope.points import Leaf, Point

Form = tuple[tuple[int, ...], str]
_Key = tuple[str, str, bool]  # name, side, operation
Meaning = tuple[str, str, bool, Leaf | None]


@dataclass(frozen=True, slots=True)
class RunPoint:
    """A point of one run, as alignment sees it: the shape of its first record (None: only statistics were kept).

    `form` is the shape and the kind of numbers, as far as its tensor or its statistics tell.
    """

    point: Point
    shape: tuple[int, ...] | None
    count: int
    form: Form | None = None


# What a module gives or takes first of all, as runtimes and versions write it.
_WHOLE: tuple[Leaf, ...] = ((), (0,), ("last_hidden_state",), ("logits",))
_FIRST: tuple[Leaf, ...] = ((), (0,), ("hidden_states",), ("input",))


def primary(point: Point) -> bool:
    """Tell whether a leaf is what its module gives or takes first of all."""
    return point.leaf in (_FIRST if point.side in ("input", "grad_input") else _WHOLE)


def same_leaf(a: Point, b: Point) -> bool:
    """Tell whether two primary leaves may be one value: one is bare, or one is the first argument and has no name."""
    return () in (a.leaf, b.leaf) or (a.side in ("input", "grad_input") and (0,) in (a.leaf, b.leaf))


class RunPoints:
    """One run's points, and which of them are still free."""

    def __init__(self, role: str, seen: Sequence[RunPoint]) -> None:
        self.role = role
        self.seen = list({each.point: each for each in seen}.values())
        self.free: dict[Point, RunPoint] = {each.point: each for each in self.seen}
        self.all: dict[Point, RunPoint] = dict(self.free)
        self.said: dict[Point, str] = {}
        self.settled: set[Point] = set()
        self.meaning: dict[str, str] = {}
        self._numbers: dict[str, tuple[int, ...]] = {}

    def at(self, name: str, point: Point) -> list[Point]:
        """Return the points of one module or operation and side, whatever the leaf."""
        return self._places.get((name, point.side, point.op), [])

    def like(self, point: Point) -> Point | None:
        """Return the point itself, or the one whose leaf may be meant by it."""
        if point in self.all:
            return point
        found = [each for each in self.at(point.name, point) if primary(each)]
        if len(found) == 1 and primary(point) and same_leaf(found[0], point):
            return found[0]
        return None

    def take(self, point: Point) -> None:
        """Note that a point has found its partner."""
        del self.free[point]

    def say(self, point: Point, why: str) -> None:
        """Keep what a rule found, for the case that no name finds a partner either."""
        self.said.setdefault(point, why)

    def settle(self, point: Point, why: str) -> None:
        """Leave a point without a partner, because a rule says what it is and that cannot be compared."""
        self.said[point] = why
        self.settled.add(point)

    @property
    def open(self) -> list[Point]:
        """The points that may still be paired."""
        return [point for point in self.free if point not in self.settled]

    @cached_property
    def _places(self) -> dict[_Key, list[Point]]:
        found: dict[_Key, list[Point]] = defaultdict(list)
        for point in self.all:
            found[point.name, point.side, point.op].append(point)
        return found

    def means(self, point: Point) -> Meaning:
        """Return what a point is, whatever its name."""
        name = point.name if point.op else self.meaning[point.name]
        return name, point.side, point.op, point.leaf

    def means_place(self, point: Point) -> Meaning:
        """Return what the module or operation and side of a point are, whatever the leaf."""
        return (*self.means(point)[:3], None)

    def means_whole(self, point: Point) -> Meaning | None:
        """Return what a point is, whatever its leaf is called; None for a leaf that is not the value as such."""
        return (*self.means(point)[:3], None) if primary(point) else None

    def numbers(self, point: Point) -> tuple[int, ...]:
        """Return the numbers that count modules in what a point's name means."""
        if point.name not in self._numbers:
            self._numbers[point.name] = numbers_of(self.means(point)[0])
        return self._numbers[point.name]

    @cached_property
    def names(self) -> Names:
        """The names of its modules."""
        return Names.of(dict.fromkeys(point.name for point in self.all if not point.op))


def grouped(points: Iterable[Point], means: Callable[[Point], Meaning | None]) -> dict[Meaning, list[Point]]:
    """Return every point of a run, paired or not, by what it means: what two share, neither is."""
    found: dict[Meaning, list[Point]] = defaultdict(list)
    for point in points:
        if (meaning := means(point)) is not None:
            found[meaning].append(point)
    return found
