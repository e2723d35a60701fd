"""What the caller wants to see: taps, and the plan they make on a given model.

Tap("model.layers.*", keep="summary", when=every(100))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from layerscope.errors import BadText
from layerscope.patterns import Pattern, Place, op_name, select, select_op, split
from layerscope.points import Leaf, Moment, Point, Side
from layerscope.recorder.conditions import Condition, condition_of
from layerscope.schedules import ALWAYS, Schedule

if TYPE_CHECKING:
    import torch

Level = Literal["full", "moments"]
Keep = Literal["tensor", "summary", "both"]


@dataclass(frozen=True)
class Tap:
    """Points, what to keep of them, and when.

    `patterns` is one pattern or several; `keep` is `"tensor"`, `"summary"`, `"both"`, a function of a tensor, or None
    for what `record` was told; `when` is a schedule or its text; `statistics="moments"` leaves out the quantile sketch
    and the fingerprints, which is faster, and `"channels"` or `"channels(axis=1)"` adds the statistics of each channel.
    `if_value` leaves out the records whose value does not meet it: `"absmax > 100"`, `"nonfinite > 0"`, or a function
    of the tensor, which must not change it.
    """

    patterns: str | tuple[str, ...]
    keep: Keep | Callable[[torch.Tensor], Any] | None = None
    when: Schedule | str | None = None
    alias: str | None = None
    statistics: str | None = None
    if_value: Condition | str | None = None

    def __post_init__(self) -> None:
        patterns = (self.patterns,) if isinstance(self.patterns, str) else tuple(self.patterns)
        if not patterns:
            raise BadText("a tap without a pattern sees nothing; give it one, such as 'model.layers.*'.")
        for pattern in patterns:
            Pattern.parse(pattern)
        if not (self.keep is None or callable(self.keep) or self.keep in ("tensor", "summary", "both")):
            raise ValueError(
                f"keep={self.keep!r} is not known; use 'tensor', 'summary', 'both' or a function of a tensor."
            )
        if self.statistics is not None:
            level_of(self.statistics)
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "when", schedule_of(self.when))
        object.__setattr__(self, "if_value", condition_of(self.if_value))

    @property
    def schedule(self) -> Schedule:
        """The schedule as a value, whichever way it was given."""
        assert not isinstance(self.when, str)
        return ALWAYS if self.when is None else self.when

    def __str__(self) -> str:
        text = ", ".join(self.patterns)
        extra = [f"as {self.alias}"] if self.alias else []
        if self.keep is not None:
            extra.append(f"keep {getattr(self.keep, '__name__', self.keep)}")
        if self.schedule != ALWAYS:
            extra.append(f"when {self.schedule}")
        if self.if_value is not None:
            extra.append(f"if {getattr(self.if_value, '__name__', self.if_value)}")
        return f"{text} ({', '.join(extra)})" if extra else text


@dataclass(frozen=True, slots=True)
class Want:
    """What is wanted of one point, over all taps that are due."""

    tensor: bool = False
    summary: bool = False
    level: Level = "moments"
    function: Callable[[torch.Tensor], Any] | None = None
    axis: int | None = None  # of the channels that are wanted
    conditional: tuple[tuple[Condition, Want], ...] = ()  # what is wanted of values that meet a condition

    def __or__(self, other: Want) -> Want:
        return Want(
            self.tensor or other.tensor,
            self.summary or other.summary,
            "full" if "full" in (self.level, other.level) else "moments",
            self.function or other.function,
            other.axis if self.axis is None else self.axis,
            self.conditional + other.conditional,
        )

    def __bool__(self) -> bool:
        return self.tensor or self.summary or self.function is not None or bool(self.conditional)

    @property
    def asks_user(self) -> bool:
        """Whether a function of the user's is called before anything is taken."""
        return self.function is not None or bool(self.conditional)

    def of(self, tensor: torch.Tensor) -> Want:
        """Return what is wanted of this value; every condition is asked."""
        whole = replace(self, conditional=())
        for condition, want in self.conditional:
            if condition(tensor):
                whole |= want
        return whole


_NOTHING = Want()


@dataclass(slots=True, eq=False)
class Request:
    """One point, what the taps that are due want of it, and whether it has a record by now."""

    point: Point
    want: Want | None
    recorded: bool = False


@dataclass(slots=True)
class TapPlan:
    """Taps resolved against a model: which sides of which modules, which operations, and what is due when."""

    taps: list[Tap]
    points: list[list[Point]]  # of each tap; a leaf of () stands for every leaf
    ops: list[tuple[Pattern, ...]]  # of each tap
    default: Want
    when: Schedule | None = None  # for taps without a schedule of their own
    _due: dict[tuple[bool, ...], dict[Point, Request]] = field(default_factory=dict)
    _requests: dict[tuple[bool, ...], dict[int, Request]] = field(default_factory=dict)
    _asking: dict[tuple[str, Side, bool], list[tuple[Leaf, int]]] = field(default_factory=dict)
    wants: list[Want] = field(default_factory=list)  # of each tap
    conditions: list[Condition | None] = field(default_factory=list)  # of each tap
    _own: list[Schedule | None] = field(default_factory=list)  # the schedules of the taps that have one
    _shares: bool = False  # whether any tap has none,
    _differs: bool = False  # and whether any has one
    _all: tuple[bool, ...] = ()  # what is due where all taps are,
    _none: tuple[bool, ...] = ()  # and where none is

    def __post_init__(self) -> None:
        self.wants = [self._of(tap) for tap in self.taps]
        self.conditions = [condition_of(tap.if_value) for tap in self.taps]
        self._own = [None if tap.when is None else tap.schedule for tap in self.taps]
        self._shares = any(own is None for own in self._own)
        self._differs = any(own is not None for own in self._own)
        self._all, self._none = (True,) * len(self.taps), (False,) * len(self.taps)
        self._resolve()

    def _resolve(self) -> None:
        """Find who asks for each place: its leaves are only known once it is seen, and there is no time then."""
        asking: dict[tuple[str, Side, bool], list[tuple[Leaf, int]]] = {}
        for tap, points in enumerate(self.points):
            for asked in points:
                asking.setdefault((asked.name, asked.side, asked.op), []).append((asked.leaf, tap))
        self._asking = asking  # in one go: other threads may be looking

    @property
    def expected(self) -> list[Point]:
        """Every module point asked for, once, in order."""
        return list(dict.fromkeys(point for points in self.points for point in points if not point.op))

    @property
    def sides(self) -> dict[str, set[Side]]:
        """The sides to watch of each module."""
        wanted: dict[str, set[Side]] = {}
        for point in self.expected:
            wanted.setdefault(point.name, set()).add(point.side)
        return wanted

    @property
    def counts(self) -> bool:
        """Whether any tap asks for statistics."""
        return any(want.summary for want in self.wants)

    @property
    def counts_channels(self) -> bool:
        """Whether any tap asks for statistics of channels."""
        return any(want.summary and want.axis is not None for want in self.wants)

    @property
    def aliases(self) -> dict[str, list[str]]:
        """What each alias stands for, in text; an operation under the pattern that asks for it."""
        return {
            tap.alias: [*map(str, points), *map(str, ops)]
            for tap, points, ops in zip(self.taps, self.points, self.ops, strict=True)
            if tap.alias is not None
        }

    def due(self, moment: Moment, raised: Callable[[int, Moment, Exception], None] | None = None) -> tuple[bool, ...]:
        """Tell for each tap whether its schedule says yes; the same object again where they say the same.

        A schedule that raises says no, for its own taps alone; `raised` is told which.
        """
        usual: bool | Exception = self._shares
        if usual and self.when is not None:
            usual = _says(self.when, moment)
        if not self._differs and isinstance(usual, bool):
            return self._all if usual else self._none
        due = [usual if own is None else _says(own, moment) for own in self._own]
        for tap, answer in enumerate(due):
            if isinstance(answer, Exception):
                if raised is None:
                    raise answer
                raised(tap, moment, answer)
        return tuple([answer is True for answer in due])

    def op_named(self, qualified: str) -> str | None:
        """Return the name under which an operation that ran is recorded, None when no tap wants it."""
        wanted = False
        for points, patterns in zip(self.points, self.ops, strict=True):
            found = select_op(patterns, qualified) if patterns else []
            points += (point for point in found if point not in points)
            wanted |= bool(found)
        if wanted:
            self._resolve()
            self._due.clear()
            for requests in self._requests.values():  # emptied, not replaced: steps under way hold them
                requests.clear()
        return op_name(qualified) if wanted else None

    def requests(self, due: tuple[bool, ...]) -> dict[int, Request]:
        """Return the requests that `request` has found so far, by the id of their points.

        A point is hashed by its parts; its id is quicker, and cannot come to mean another while the request holds it.
        """
        return self._requests.setdefault(due, {})

    def request(self, due: tuple[bool, ...], point: Point) -> Request:
        """Return what the taps that are due want of a point; the answer is remembered."""
        known = self._due.setdefault(due, {})
        request = known.get(point)
        if request is None:
            request = known[point] = Request(point, self.want(due, point) or None)
            self.requests(due)[id(point)] = request
        return request

    def want(self, due: tuple[bool, ...], point: Point) -> Want:
        """Add up what the taps that are due want of a point, or of a value it is part of."""
        want = _NOTHING
        for leaf, tap in self._asking.get((point.name, point.side, point.op), ()):
            if due[tap] and point.leaf[: len(leaf)] == leaf:
                own, condition = self.wants[tap], self.conditions[tap]
                own = own if condition is None else Want(conditional=((condition, own),))
                want = own if want is _NOTHING else want | own
        return want

    def _of(self, tap: Tap) -> Want:
        default = self.default
        level, axis = (default.level, default.axis) if tap.statistics is None else level_of(tap.statistics)
        if tap.keep is None:
            asks = tap.statistics is not None and axis is not None
            return Want(default.tensor, default.summary or asks, level, default.function, axis)
        if callable(tap.keep):
            return Want(summary=default.summary, level=level, function=tap.keep, axis=axis)
        return Want(tap.keep in ("tensor", "both"), tap.keep in ("summary", "both"), level, axis=axis)


def _says(schedule: Schedule, moment: Moment) -> bool | Exception:
    try:
        return bool(schedule(moment))
    except Exception as error:
        return error


def level_of(statistics: str) -> tuple[Level, int | None]:
    """Read which statistics are asked for: how much of each tensor, and the axis of its channels, if of any.

    >>> level_of("channels(axis=1)")
    ('full', 1)
    """
    match statistics:
        case "full" | "moments":
            return statistics, None
        case "channels":
            return "full", -1
    stated = re.fullmatch(r"channels\(axis=(-?\d{1,2})\)", str(statistics).replace(" ", ""))
    if stated is None:
        raise ValueError(
            f"statistics={statistics!r} is not known; use 'full', 'moments', 'channels' or 'channels(axis=1)'."
        )
    return "full", int(stated[1])


def schedule_of(when: Any) -> Schedule | None:
    """Read a schedule: a value, or its text."""
    if when is None or isinstance(when, Schedule):
        return when
    if isinstance(when, str):
        return Schedule.parse(when)
    raise BadText(f"when={when!r} is not a schedule; write every(100) | first(3), its text, or when(function).")


def taps_of(taps: Any) -> list[Tap]:
    """Read the forms in which `record` takes its taps: a pattern, a tap, a list of them, or alias -> pattern."""
    if isinstance(taps, Tap):
        return [taps]
    if isinstance(taps, (str, Pattern)):
        return [Tap(str(taps))]
    if isinstance(taps, Mapping):
        named = [_aliased(str(alias), wanted) for alias, wanted in taps.items()]
        if not named:
            raise BadText("the mapping of taps is empty; give alias -> pattern, such as {'last': 'model.layers.-1'}.")
        return named
    if isinstance(taps, Iterable):
        items = list(taps)
        plain = tuple(str(item) for item in items if not isinstance(item, Tap))
        whole = [item for item in items if isinstance(item, Tap)]
        if not items:
            raise BadText("the list of taps is empty; give at least one pattern, such as 'model.layers.*'.")
        return ([Tap(plain)] if plain else []) + whole
    raise BadText(f"{taps!r} is not a tap; give a pattern, a list of them, a mapping alias -> pattern, or a Tap.")


def plan(
    taps: list[Tap],
    places: Sequence[Place],
    shared: Mapping[str, str],
    *,
    default: Want,
    when: Schedule | None = None,
) -> TapPlan:
    """Resolve taps against the places of a model; every pattern must match something.

    Operations are only known once they run, so a pattern for operations is checked when the recording ends.
    """
    points: list[list[Point]] = []
    ops: list[tuple[Pattern, ...]] = []
    for tap in taps:
        found = select(tap.patterns, places)
        canonical = (Point(shared.get(p.name, p.name), p.side, p.leaf) for p in found)
        points.append(list(dict.fromkeys(canonical)))
        ops.append(split(tap.patterns).ops)
    whole = TapPlan(taps, points, ops, default, when)
    _refuse_conflicts(whole)
    return whole


def _aliased(alias: str, wanted: Any) -> Tap:
    if isinstance(wanted, Tap):
        return replace(wanted, alias=alias)
    return Tap(str(wanted) if isinstance(wanted, (str, Pattern)) else tuple(map(str, wanted)), alias=alias)


def _refuse_conflicts(whole: TapPlan) -> None:
    """Two taps may overlap; two functions of one point cannot both be its record, nor channels of two axes."""
    kept: dict[Point, Any] = {}
    axes: dict[Point, int] = {}
    for tap, points, want in zip(whole.taps, whole.points, whole.wants, strict=True):
        for point in points:
            if want.axis is not None and axes.setdefault(point, want.axis) != want.axis:
                raise BadText(
                    f"two taps want channels of {point} along axis {axes[point]} and axis {want.axis}; "
                    "exclude it from one of them with '!...'."
                )
            before = kept.setdefault(point, tap.keep)
            if before is not tap.keep and before != tap.keep and (callable(before) or callable(tap.keep)):
                raise BadText(
                    f"two taps keep different things of {point}: {_what(before)} and {_what(tap.keep)}; "
                    "exclude it from one of them with '!...'."
                )


def _what(keep: Any) -> str:
    return getattr(keep, "__name__", None) or repr(keep)
