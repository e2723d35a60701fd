"""The forwards of a model that is not watched through hooks: who is told of them, and what.

    forwards = Forwards(sink)
    forwards.run(tapped, plain, {"output"}, args, kwargs)        # begin, run, end
    forwards.tell("layers.3", "output", value, call=0)           # in the middle of it

A compiled graph tells what it computes by calls that were put into it, probes; each has a number:

    key = forwards.probe(function)                               # in the graph: tell(forwards.number, key, value)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from layerscope.errors import Unsupported
from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.sink import RuntimeSink, Step
from layerscope.runtimes.values import argument_leaves, describe, leaves

_numbers = count(1)
_open: WeakValueDictionary[int, Forwards] = WeakValueDictionary()


def tell(forwards: int, probe: int, value: object) -> None:
    """Pass a value of a running graph on to the probe there; silent once the recording is over."""
    listening = _open.get(forwards)
    if listening is not None:
        listening.probed(probe, value)


class Redirected:
    """A method of a model that goes to a recording while its block lasts."""

    def __init__(self, call: Callable[..., Any], *, instead_of: object) -> None:
        if isinstance(instead_of, Redirected):
            raise Unsupported(
                "this compiled model is being recorded already, and only one recording can take its calls; "
                "give one record() all the taps."
            )
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call, recorded."""
        return self._call(*args, **kwargs)


class RunningModule(NamedTuple):
    """A module that is running: its name, which call of it this is, and what it was given, where that is asked."""

    name: str
    call: int
    given: tuple[object, ...] = ()


class Forwards:
    """What one `watch` knows of the forwards under way, at most one on each thread."""

    def __init__(self, sink: RuntimeSink) -> None:
        self.sink = sink
        self.number = next(_numbers)
        self._process = os.getpid()
        self._local = threading.local()
        self._probes: list[Callable[[object], None]] = []
        self._points: dict[tuple[str, Side, Leaf, bool], Point] = {}
        _open[self.number] = self

    @property
    def step(self) -> Step | None:
        """The step of the forward that runs on this thread."""
        return getattr(self._local, "step", None)

    @property
    def within(self) -> list[RunningModule]:
        """The modules that run on this thread, outermost first."""
        return self._local.within  # type: ignore[no-any-return]

    def run(
        self,
        tapped: Callable[..., Any],
        plain: Callable[..., Any],
        root: Collection[Side],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one forward of the model and tell of it; `plain` is run where nothing is recorded.

        `root` are the wanted sides of the model itself, whose inputs and outputs are those of the call.
        """
        step = self._begin()
        if step is None:
            return plain(*args, **kwargs)
        failed = True
        try:
            if step.idle:
                value = plain(*args, **kwargs)
            else:
                number = self._local.within[0].call
                if "input" in root:
                    self.tell("", "input", args, call=number, named=kwargs)
                value = tapped(*args, **kwargs)
                if "output" in root:
                    self.tell("", "output", value, call=number)
            failed = False
            return value
        finally:
            self._end(step, failed=failed)

    def enter(self, call: object, name: str) -> int:
        """Number a call of a module that begins; `call` is what it is found by when it ends."""
        assert self.step is not None
        number = self.step.call(name)
        self._local.under_way.setdefault(call, []).append(number)
        return number

    def leave(self, call: object) -> int:
        """Return the number of a call that ends."""
        return self._local.under_way[call].pop()  # type: ignore[no-any-return]

    def tell_end(self, key: object, name: str, side: Side, wanted: bool, within: str | None, value: object) -> None:
        """Tell one end of a call of a module, or of an operation `within` one: its input begins it, its output ends it.

        `key` is what one end finds the other by.
        """
        op = within is not None
        number = self.enter(key, f"op:{name}" if op else name) if side == "input" else self.leave(key)
        if wanted:
            self.tell(name, side, value, call=number, note={"within": within} if within is not None else None, op=op)

    def _begin(self) -> Step | None:
        """Begin a forward; None in a forked child, and inside another."""
        try:
            if os.getpid() != self._process or self.step is not None:
                return None
            step = self.sink.begin()
            number = 0 if step.idle else step.call("")
        except Exception as error:
            self._failed(Point(""), error)
            return None
        self._local.step, self._local.within, self._local.under_way = step, [RunningModule("", number)], {}
        self._local.lost = False  # whether a probe raised: the frames are then not those of the forward
        return step

    def _end(self, step: Step, *, failed: bool) -> None:
        self._local.step = None
        try:
            self.sink.end(step, failed=failed)
        except Exception as error:
            self._failed(Point(""), error)

    def _failed(self, point: Point, error: Exception) -> None:
        with suppress(Exception):
            self.sink.failed(point, error)

    def probe(self, function: Callable[[object], None]) -> int:
        """Return the number under which a graph finds `function`."""
        self._probes.append(function)
        return len(self._probes) - 1

    def probed(self, probe: int, value: object) -> None:
        """Call a probe, when a forward runs that is recorded."""
        try:
            step = self.step
            if step is not None and not step.idle and not self._local.lost:
                self._probes[probe](value)
        except Exception as error:
            self._local.lost = True
            at = self._local.within[-1].name if self._local.within else ""
            self._failed(
                Point(at), RuntimeError(f"{type(error).__name__}: {error}; the rest of the forward is not recorded")
            )

    def safely(self, told: Callable[..., None], *values: object) -> None:
        """Tell of a forward after the model ran; what that raises does not reach the model."""
        try:
            told(*values)
        except Exception as error:
            self._failed(Point(""), error)

    def tell(
        self,
        name: str,
        side: Side,
        value: object,
        *,
        call: int,
        named: Mapping[str, object] | None = None,
        note: Mapping[str, str] | None = None,
        op: bool = False,
    ) -> None:
        """Tell the sink each tensor of a value; of an input, `value` are the positional arguments."""
        try:
            given = value if isinstance(value, tuple) and side == "input" else None
            found = leaves(value) if given is None else argument_leaves(given, named or {})
            if not found:
                self.sink.empty(Point(name, side, op=op), because=f"its {side} holds no tensor: {describe(value)}")
            self.tell_leaves(name, side, found, call=call, note=note, op=op)
            step = self.step
            if step is not None and step.whole is not None and not op:
                step.whole(step, Point(name, side), value, call)
        except Exception as error:
            self._failed(Point(name, side, op=op), error)

    def tell_leaves(
        self,
        name: str,
        side: Side,
        found: list[tuple[Leaf, torch.Tensor]],
        *,
        call: int,
        note: Mapping[str, str] | None = None,
        op: bool = False,
    ) -> None:
        """Tell the sink tensors that were taken out of their value already."""
        try:
            for leaf, tensor in found:
                self.sink.seen(self._local.step, self._point(name, side, leaf, op), tensor, call=call, note=note)
        except Exception as error:
            self._failed(Point(name, side, op=op), error)

    def _point(self, name: str, side: Side, leaf: Leaf, op: bool) -> Point:
        key = (name, side, leaf, op)
        return self._points.get(key) or self._points.setdefault(key, Point(name, side, leaf, op))
