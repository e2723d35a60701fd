"""What happened to everything that was asked for: the account that completeness is stated from.

coverage.recorded(point)                # it has a record
coverage.missing(plan, why_silent)      # what has none, and why
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterable

from layerscope.log import log
from layerscope.patterns import Pattern, op_name
from layerscope.points import Moment, Point
from layerscope.recorder.taps import TapPlan
from layerscope.store import Missing


class Coverage:
    """Counts, kept while the model runs; every method is quick and may be called from any thread."""

    def __init__(self) -> None:
        self.forwards = 0  # counted by the thread that begins one, under the sink's lock
        self.failed_forwards = 0
        self.recomputed = 0
        self._lock = threading.Lock()
        self._points: set[Point] = set()
        self._passed: set[Point] = set()
        self._declined: dict[Point, int] = {}
        self._empty: dict[Point, str] = {}
        self._failures: dict[Point, str] = {}
        self.called: set[str] = set()  # modules, in forwards in which something was due
        self.last: tuple[bool, ...] | None = None  # the taps that were last told to be due
        self._due: set[int] = set()
        self._unscheduled: dict[int, tuple[str, int]] = {}  # by tap: what was raised first, and how often
        self._ops: set[str] = set()

    @property
    def any_recorded(self) -> bool:
        """Whether there is a single record."""
        return bool(self._points)

    @property
    def any_declined(self) -> bool:
        """Whether a value was seen that did not meet its condition."""
        return bool(self._declined)

    @property
    def any_due(self) -> bool:
        """Whether any tap's schedule ever said yes, or failed to say."""
        return bool(self._due) or bool(self._unscheduled)

    def are_due(self, due: tuple[bool, ...]) -> None:
        """Take down the taps that are due in a forward."""
        with self._lock:
            self.last = due
            self._due.update(tap for tap, on in enumerate(due) if on)

    def unscheduled(self, tap: int, moment: Moment, error: Exception) -> None:
        """Take down that the schedule of a tap raised, and say it the first time."""
        with self._lock:
            first = not self._unscheduled
            why = f"its schedule raised {type(error).__name__}: {error} (at step {moment.step}"
            known, times = self._unscheduled.get(tap, (why, 0))
            self._unscheduled[tap] = known, times + 1
        if first:
            log.warning("a schedule raised %s: %s; its taps are not recorded then", type(error).__name__, error)

    def were_called(self, names: Iterable[str]) -> None:
        """Take down which modules a forward called, where something was due in it."""
        with self._lock:
            self.called.update(names)

    def forward_failed(self) -> None:
        """Count a forward that raised."""
        with self._lock:
            self.failed_forwards += 1

    def repeated(self) -> None:
        """Count a call that activation checkpointing repeated."""
        with self._lock:
            self.recomputed += 1

    def recorded(self, point: Point) -> None:
        """Take down that a point has a record."""
        self._points.add(point)

    def passed(self, point: Point) -> None:
        """Take down that a point was seen, and not wanted."""
        self._passed.add(point)

    def declined(self, point: Point) -> None:
        """Take down that a value was seen, and did not meet its condition."""
        with self._lock:
            self._declined[point] = self._declined.get(point, 0) + 1

    def ran(self, op: str) -> None:
        """Take down that an operation ran."""
        self._ops.add(op)

    def empty(self, point: Point, because: str) -> None:
        """Take down why a side that ran has no record."""
        self._empty.setdefault(point, because)

    def failed(self, point: Point, error: Exception) -> None:
        """Take down that looking at a point raised, and say it the first time."""
        with self._lock:
            first = point not in self._failures
            self._failures.setdefault(point, f"{type(error).__name__}: {error}")
        if first:
            log.warning("%s is not recorded: %s: %s", point, type(error).__name__, error)

    def missing(self, plan: TapPlan, why_silent: Callable[[Iterable[str]], dict[str, str]]) -> list[Missing]:
        """Return every point asked for that has no record, or lost some, with the reason.

        `why_silent` is the runtime's, for the modules that were never seen to run.
        """
        fired = {(p.name, p.side, p.leaf[:n]) for p in self._points for n in range(len(p.leaf) + 1) if not p.op}
        silent = [p for p in plan.expected if (p.name, p.side, p.leaf) not in fired]
        silence = why_silent({p.name for p in silent} - self.called) if self.forwards else {}
        failures = {(p.name, p.side): why for p, why in reversed(self._failures.items())}  # the first one counts
        due = {point for tap, points in enumerate(plan.points) if tap in self._due for point in points}
        unscheduled = self._unscheduled_points(plan)
        missing = [
            Missing(
                str(p),
                failures.get((p.name, p.side))
                or (unscheduled.pop(p, "") if p not in due else "")
                or self._reason(p, due=p in due, silence=silence),
            )
            for p in silent
        ]
        missing += [Missing(str(p), why) for p, why in unscheduled.items()]
        known = {(p.name, p.side) for p in silent}
        missing += [Missing(str(p), why) for p, why in self._failures.items() if (p.name, p.side) not in known]
        wanted = (pattern for patterns in plan.ops for pattern in patterns if not pattern.exclude)
        never = [pattern for pattern in wanted if not any(map(pattern.matches_op, self._ops))]
        never = [pattern for pattern in never if pattern not in unscheduled]
        return missing + [Missing(str(pattern), self._no_such_op(str(pattern))) for pattern in never]

    def _unscheduled_points(self, plan: TapPlan) -> dict[Point | Pattern, str]:
        """Return what lost records to a schedule that raised, and why."""
        found: dict[Point | Pattern, str] = {}
        for tap, (why, times) in self._unscheduled.items():
            more = f", and {times - 1} times more" if times > 1 else ""
            asks: list[Point | Pattern] = [*plan.points[tap], *plan.ops[tap]]
            for asked in asks:
                if not (isinstance(asked, Point) and asked.op):  # found by the pattern, which is listed
                    found.setdefault(asked, f"{why}{more}); it was not recorded then")
        return found

    def _reason(self, point: Point, *, due: bool, silence: dict[str, str]) -> str:
        if not self.forwards:
            return "no forward ran while recording"
        if not due:
            return f"its schedule was never due in {self.forwards} forwards"
        if Point(point.name, point.side) in self._empty:
            return self._empty[Point(point.name, point.side)]
        if point.name in silence:
            return silence[point.name]
        times = sum(n for p, n in self._declined.items() if (p.name, p.side) == (point.name, point.side))
        if times:
            return f"its value did not meet `if_value` once in {times}"
        if point.side.startswith("grad"):
            return "no gradient arrived: no backward pass reached it while recording"
        if point.leaf:
            seen = self._passed | self._points
            there = sorted(str(p) for p in seen if (p.name, p.side) == (point.name, point.side))
            return f"it has no such leaf; there is {', '.join(there) or 'none'}"
        return "its forward did not finish"

    def _no_such_op(self, pattern: str) -> str:
        names = sorted(set(map(op_name, self._ops)))
        near = difflib.get_close_matches(pattern.removeprefix("op:"), names, n=3, cutoff=0.3)
        ran = f"; nearest of the {len(names)} that did: {', '.join(near)}" if near else ""
        return f"no such operation ran in a forward on the thread that began the recording{ran}"
