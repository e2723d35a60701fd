"""Watch single operations of a forward: `op:aten.softmax`, through a dispatch mode.

A dispatch mode sees what reaches the backends: `F.softmax` arrives as `aten::_softmax`, and fused attention as one
operation, without the softmax inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from layerscope.points import Point
from layerscope.runtimes.calls import Local
from layerscope.runtimes.sink import Sink
from layerscope.runtimes.values import argument_leaves, describe, leaves

__all__ = ["OpWatch"]


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tell `sink` the inputs and outputs of the operations that `name_for` gives a name."""

    def __init__(self, name_for: Callable[[str], str | None], local: Local, sink: Sink) -> None:
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
        """Run the operation as it is, and look at what went in and what came out."""
        kwargs = kwargs or {}
        local = self._local
        name = self._named(func) if local.calls and not local.looking else None
        call = local.innermost() if name is not None else None
        if name is None or call is None:
            return func(*args, **kwargs)
        within, step, _, _, special = call
        if step.idle or (special is not None and special.repeated):
            return func(*args, **kwargs)
        index = step.call(f"op:{name}")
        note = {"within": within}
        self._look(Point(name, "input", op=True), argument_leaves(args, kwargs), index, note, args)
        value = func(*args, **kwargs)
        self._look(Point(name, "output", op=True), leaves(value), index, note, value)
        return value

    def _named(self, func: Any) -> str | None:
        if func not in self._names:
            self._names[func] = None
            try:
                self._names[func] = self._name_for(str(func))
            except Exception as error:
                self._sink.failed(Point(str(func), op=True), error)
        return self._names[func]

    def _look(self, point: Point, found: Any, index: int, note: Mapping[str, str], value: object) -> None:
        local = self._local
        step = local.calls[-1][1]
        local.looking = True
        nothing = True
        try:
            for leaf, tensor in found:
                nothing = False
                here = Point(point.name, point.side, leaf, op=True)
                self._sink.seen(step, here, tensor, call=index, note=note)
            if nothing:
                self._sink.empty(point, because=f"its {point.side} holds no tensor: {describe(value)}")
        except Exception as error:
            self._sink.failed(point, error)
        finally:
            local.looking = False
