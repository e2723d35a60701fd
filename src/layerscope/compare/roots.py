"""Where in a step a difference is made: roots by excess, by a module's check, by its weights.

    for row, root in roots(seen, fed): ...

A row is a root when its excess is over 1 and over twice that of what its module was given. What was not recorded of
that is stood in for by the output that fed it, else by the largest excess of what ran before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layerscope.points import Point

# Of one that is not explained by what it was given.
_MORE = 2.0
# Once there is a root, an excess must be that large to be another.
_SECOND = 5.0


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row as roots are looked for: its point and call, its excess, and whether its module's own check failed.

    `excess` is None where nothing can be told; `exact` is a difference that no rounding makes (a non-finite value, an
    index). `checked` is None where nothing was checked, else whether the module agrees with its weights.
    """

    point: Point
    call: int
    excess: float | None
    exact: bool = False
    checked: bool | None = None
    weights: bool = False
    unknown: bool = False  # not compared at all


@dataclass(frozen=True, slots=True)
class Feeds:
    """Which output each input of a module is, by module and call; None where it is none."""

    of: Mapping[tuple[str, int], Sequence[tuple[str, tuple[str, int] | None]]] = field(default_factory=dict)

    @classmethod
    def read(cls, fed: Iterable[tuple[str, int, str | None, int]]) -> Feeds:
        """Sort what a reference noted by module."""
        found: dict[tuple[str, int], list[tuple[str, tuple[str, int] | None]]] = {}
        for text, call, feeder, its in fed:
            of = (Point.parse(text).name, call)
            found.setdefault(of, []).append((text, None if feeder is None else (feeder, its)))
        return cls(found)


def causes(rows: Sequence[StepRow], feeds: Feeds) -> Iterator[tuple[int, str]]:
    """Yield the rows of one step that a difference is made at, in order, and by which evidence."""
    known: dict[tuple[str, int], StepRow] = {}
    inputs: dict[tuple[str, str, int], list[StepRow]] = {}
    found: list[StepRow] = []
    earlier: list[StepRow] = []  # those that stand out
    for at, row in enumerate(rows):
        point = row.point
        known[str(point), row.call] = row
        before, after = ("grad_output", "grad_input") if point.side.startswith("grad") else ("input", "output")
        if point.side == before:
            inputs.setdefault((point.name, before, row.call), []).append(row)
        why = _evidence(row, earlier, found, known, inputs.get((point.name, before, row.call), ()), feeds, after)
        if why:
            found.append(row)
            yield at, why
        if row.exact or (row.excess is not None and row.excess > 1 / (2 * _MORE)):
            earlier.append(row)


def _evidence(
    row: StepRow,
    earlier: Sequence[StepRow],
    found: Sequence[StepRow],
    known: Mapping[tuple[str, int], StepRow],
    given: Sequence[StepRow],
    feeds: Feeds,
    after: str,
) -> str:
    point = row.point
    within = f"{point.name}." if point.name else ""
    if point.side == after and any(r.point.name.startswith(within) and r.point.name != point.name for r in found):
        return ""  # of nested ones the innermost
    if row.weights:
        return "weights"
    if row.checked is False:
        return "check"
    if row.checked and not row.exact:
        return ""
    over = row.exact or (row.excess is not None and row.excess > (_SECOND if found else 1.0))
    if not over:
        return ""
    if any(r.point.name == point.name and r.call == row.call and r.point.side == point.side for r in found):
        return ""  # another leaf of one value
    if found and not feeds.of and not given:
        return ""  # nothing says that it is not the first one's doing
    times = float("inf") if row.exact else row.excess or 0.0
    explained = max((_weight(r) for r in _explaining(row, earlier, known, given, feeds, after)), default=0.0)
    return "excess" if times > _MORE * explained else ""


def _weight(row: StepRow) -> float:
    return float("inf") if row.exact else row.excess or 0.0


def _explaining(
    row: StepRow,
    earlier: Sequence[StepRow],
    known: Mapping[tuple[str, int], StepRow],
    given: Sequence[StepRow],
    feeds: Feeds,
    after: str,
) -> Iterator[StepRow]:
    """Yield what a row's excess may come from."""
    point = row.point
    within = f"{point.name}."
    if point.side == after:
        yield from given
        given = () if any(r.unknown for r in given) else given
        if point.side == "grad_input":
            yield from (r for r in earlier if not r.point.side.startswith("grad"))
        if point.side == "output":
            recorded = {str(r.point) for r in given}
            feeding = feeds.of.get((point.name, row.call))
            if feeding is not None:
                rest = [feeder for text, feeder in feeding if text not in recorded]
                yield from (known[feeder] for feeder in rest if feeder is not None and feeder in known)
                if all(feeder is not None and feeder in known for feeder in rest):
                    return
            elif given:
                return
        elif given:
            return
        yield from (r for r in earlier if not (r.point.name.startswith(within) or r.point.name == point.name))
        return
    feeding = feeds.of.get((point.name, row.call), ())
    feeder = next((feeder for text, feeder in feeding if text == str(point)), None)
    if feeder is not None and feeder in known:
        yield known[feeder]
        return
    yield from earlier


def accused(excesses: Mapping[str, float], feeds: Feeds) -> dict[str, float]:
    """Return the roots of a twin and their excesses; calls count as one."""
    rows = [StepRow(Point.parse(text), 0, times) for text, times in excesses.items()]
    texts = list(excesses)
    return {texts[at]: excesses[texts[at]] for at, _ in causes(rows, feeds)}
