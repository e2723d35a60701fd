"""The two hooks on a module: one sees its call begin, the other sees it end.

    hooked = HookedModule(watcher, module, "layers.3", frozenset({"input", "output"}))
    hooked.on()
    ...
    hooked.off()

Hooks return None, hold no state on the user's modules, stay silent in deep copies and forked children, and turn into
nothing when the model is pickled. What a call is, which step it belongs to and when hooks are there, the watcher knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.eager.calls import RunningCall
from layerscope.runtimes.values import argument_leaves, describe, leaves

if TYPE_CHECKING:
    from layerscope.runtimes.eager.watcher import Watcher

# What a hook of ours becomes in a deep copy or a pickle: a call that takes anything and returns None, from the
# standard library, so that a checkpoint saved while recording loads where layerscope is not installed.
_SILENT = nullcontext().__exit__

_GRADED: frozenset[Side] = frozenset(("grad_input", "grad_output"))
_NOT_GIVEN = object()  # another thread took the hook off in the middle of a call: it then gets an argument less


class HookedModule:
    """A watched module: its hooks, and what is known of its calls."""

    def __init__(self, watcher: Watcher, module: torch.nn.Module, name: str, sides: frozenset[Side]) -> None:
        self.module = module
        self.name = name
        self.sides = sides
        self.begins_forwards = False  # seen to be called from outside
        self.was_off = False
        self._before = Before(watcher, module, name, sides, "input")
        self._after = After(watcher, module, name, sides, "output")
        self._handles: list[RemovableHandle] = []

    @property
    def is_alone(self) -> bool:
        """Whether the hooks here are all ours: those of others keep their order, and the module is not quick anyway."""
        hooks = (*self.module._forward_pre_hooks.values(), *self.module._forward_hooks.values())
        return all(isinstance(hook, Hook) for hook in hooks)

    def on(self) -> None:
        """Have the hooks called: after those that were there at first, before those that came since."""
        first, module = self.was_off, self.module
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=first),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True, prepend=first),
        ]

    def off(self) -> None:
        """Leave nothing of the hooks on the module."""
        self.was_off = True
        for handle in self._handles:
            handle.remove()


class Hook:
    """A hook on one module: inert in copies, pickles and forked children, and never raising."""

    def __init__(
        self, watcher: Watcher, module: torch.nn.Module, name: str, sides: frozenset[Side], side: Side
    ) -> None:
        self.watcher = watcher
        self.module = module
        self.name = name
        self.sides = sides
        self.side = side
        self.graded = not sides.isdisjoint(_GRADED)
        self.is_wanted = side in sides
        self.points: dict[Leaf, Point] = {}  # made once for each leaf

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _SILENT

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def failed(self, error: Exception) -> None:
        """Say that it raised; the model's run goes on."""
        with suppress(Exception):
            self.watcher.sink.failed(Point(self.name, self.side), error)

    def tell(self, call: RunningCall, found: list[tuple[Leaf, torch.Tensor]], value: object) -> None:
        """Tell the sink each tensor of a value, or that there is none."""
        watcher, points = self.watcher, self.points
        if not found:
            reason = f"its {self.side} holds no tensor: {describe(value)}"
            watcher.sink.empty(Point(self.name, self.side), because=reason)
        with watcher.local.ours:
            for leaf, tensor in found:
                point = points.get(leaf) or points.setdefault(leaf, Point(self.name, self.side, leaf))
                watcher.sink.seen(call.step, point, tensor, call=call.number)
            if call.step.whole is not None:
                call.step.whole(call.step, Point(self.name, self.side), value, call.number)


class Before(Hook):
    """Sees a call begin. A tracer's or compiler's pass is none, nor is one of a copy that shares our hooks."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any = _NOT_GIVEN) -> None:
        """Note the call, and tell what it is given."""
        if is_compiling() or kwargs is _NOT_GIVEN:
            return
        try:
            if module is self.module and self.watcher.live:
                call = self.watcher.began(self, sys._getframe(1), args, kwargs)
                if call is not None and self.is_wanted and not (call.step.idle or call.repeated):
                    self.tell(call, argument_leaves(args, kwargs), args or None)
        except Exception as error:
            self.failed(error)


class After(Hook):
    """Sees a call end, whose beginning was seen: another hook can raise before ours does."""

    def __call__(self, module: torch.nn.Module, args: object, kwargs: object, value: Any = _NOT_GIVEN) -> None:
        """Tell what the call returned; torch gives None for the value of one that raised."""
        if is_compiling() or value is _NOT_GIVEN:
            return
        try:
            if module is self.module and self.watcher.live:
                call = self.watcher.local.ended(self.name)
                if call is not None:
                    failed = value is None and sys.exc_info()[1] is not call.handled
                    if not (failed or call.step.idle):
                        if self.is_wanted and not call.repeated:
                            self.tell(call, leaves(value), value)
                        if call.repeated or call.flow is not None:
                            self.watcher.returned(self, call, value)
                    self.watcher.ended(call, failed=failed)
        except Exception as error:
            self.failed(error)
