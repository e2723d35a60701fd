"""Watch single operations of a forward: `op:aten.softmax`, through a dispatch mode.

A dispatch mode sees what reaches the backends: `F.softmax` arrives as `aten::_softmax`, and fused attention as one
operation, without the softmax inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from layerscope.points import Point, Side
from layerscope.runtimes.eager.calls import Local
from layerscope.runtimes.sink import RuntimeSink, Step
from layerscope.runtimes.values import argument_leaves, describe, leaves


class OpCall(NamedTuple):
    """One operation that is watched while it runs."""

    name: str
    step: Step
    number: int
    note: Mapping[str, str]


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tell `sink` the inputs and outputs of the operations that `name_for` gives a name."""

    def __init__(self, name_for: Callable[[str], str | None], local: Local, sink: RuntimeSink) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name_for = name_for
        self._names: dict[object, str | None] = {}
        self._local = local
        self._sink = sink

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation as it is, and tell what went in and what came out."""
        kwargs = kwargs or {}
        run = self._begun(func)
        if run is not None:
            self._tell(run, "input", args, kwargs)
        value = func(*args, **kwargs)
        if run is not None:
            self._tell(run, "output", value)
        return value

    def _begun(self, func: Any) -> OpCall | None:
        """Number an operation that is wanted; None for any other, and outside the model."""
        local = self._local
        try:
            name = self._named(func) if local.calls and not local.ours else None
            call = local.innermost() if name is not None else None
            if name is None or call is None or call.step.idle or call.repeated:
                return None
            return OpCall(name, call.step, call.step.call(f"op:{name}"), {"within": call.name})
        except Exception as error:
            self._failed(Point(str(func), op=True), error)
            return None

    def _named(self, func: Any) -> str | None:
        if func not in self._names:
            self._names[func] = None
            try:
                self._names[func] = self._name_for(str(func))
            except Exception as error:
                self._failed(Point(str(func), op=True), error)
        return self._names[func]

    def _tell(self, run: OpCall, side: Side, value: Any, named: Mapping[str, Any] | None = None) -> None:
        try:
            with self._local.ours:
                found = leaves(value) if named is None else argument_leaves(value, named)
                for leaf, tensor in found:
                    point = Point(run.name, side, leaf, op=True)
                    self._sink.seen(run.step, point, tensor, call=run.number, note=run.note)
                if not found:
                    point = Point(run.name, side, op=True)
                    self._sink.empty(point, because=f"its {side} holds no tensor: {describe(value)}")
        except Exception as error:
            self._failed(Point(run.name, side, op=True), error)

    def _failed(self, point: Point, error: Exception) -> None:
        with suppress(Exception):
            self._sink.failed(point, error)
