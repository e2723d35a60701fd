"""The two hooks on a module: one sees its call begin, the other sees it end.

    pair = Pair(watcher, module, "layers.3", frozenset({"input", "output"}))
    pair.on()
    ...
    pair.off()

Hooks return None, hold no state on the user's modules, stay silent in deep copies and forked children, and turn into
nothing when the model is pickled. Their `__call__` is the shortest way for the commonest call; any other goes through
the watcher, which also knows when the hooks are to be there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from layerscope.errors import Unsupported
from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.eager.calls import Special, is_running
from layerscope.runtimes.eager.gradient_hooks import next_node, sources
from layerscope.runtimes.eager.shared_arguments import Aside
from layerscope.runtimes.sink import Step
from layerscope.runtimes.values import argument_leaves, describe

if TYPE_CHECKING:
    from layerscope.runtimes.eager.watcher import Watcher

__all__ = ["After", "Before", "Hook", "Pair"]

# What a hook of ours becomes in a deep copy or a pickle: a call that takes anything and returns None, from the
# standard library, so that a checkpoint saved while recording loads where layerscope is not installed.
_SILENT = nullcontext().__exit__

_Tensor = torch.Tensor
_frame_at = sys._getframe
_graph_task = torch._C._current_graph_task_id
_tracing_state = torch._C._get_tracing_state
_GRADED: frozenset[Side] = frozenset(("grad_input", "grad_output"))
_NOT_GIVEN = object()


class Pair:
    """The two hooks of one watched module, and what is known of its calls."""

    def __init__(self, watcher: Watcher, module: torch.nn.Module, name: str, sides: frozenset[Side]) -> None:
        self.module = module
        self.name = name
        self.sides = sides
        self.entry = False  # seen to be called from outside
        self.inside = False  # seen to be called inside another
        self.rested = False  # has been without its hooks
        self._before = Before(watcher, module, name, sides, "input")
        self._after = After(watcher, module, name, sides, "output")
        self._handles: list[RemovableHandle] = []

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has hooks here: theirs keep their order, and the module is not quick anyway."""
        hooks = (*self.module._forward_pre_hooks.values(), *self.module._forward_hooks.values())
        return all(isinstance(hook, Hook) for hook in hooks)

    def on(self) -> None:
        """Have the hooks called: after those that were there at first, before those that came since."""
        module, before, after = self.module, self._before, self._after
        if not self._handles:
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            return
        first, last = (handle.id for handle in self._handles)  # registering takes ten times as long as this
        module._forward_pre_hooks_with_kwargs[first] = True
        _put_first(module._forward_pre_hooks, first, before)
        module._forward_hooks_with_kwargs[last] = True
        module._forward_hooks_always_called[last] = True
        _put_first(module._forward_hooks, last, after)

    def off(self) -> None:
        """Leave nothing of the hooks on the module."""
        self.rested = True
        for handle in self._handles:
            handle.remove()


def _put_first(hooks: Any, key: int, hook: Callable[..., None]) -> None:
    hooks[key] = hook
    if len(hooks) > 1:
        hooks.move_to_end(key, last=False)


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
        self.looks = side in sides
        self.simple = not (self.graded or watcher.ops)  # nothing but tensors that pass
        self.only = Point(name, side, () if side == "output" else (0,))  # where there is a single tensor
        self.points: dict[Leaf, Point] = {self.only.leaf: self.only}  # and others, as they come
        self.found_inside = False  # another module, in an idle step

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _SILENT

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def failed(self, error: Exception) -> None:
        """Say that looking raised; the model's run goes on."""
        with suppress(Exception):
            self.watcher.sink.failed(Point(self.name, self.side), error)

    def special(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, repeated: bool, follow: bool) -> Special:
        """Take down what will be needed when the call ends."""
        if not follow:
            return Special(repeated, follow)
        first_node = next_node()
        if "grad_input" not in self.sides:
            return Special(repeated, follow, first_node)
        found = sources(args, kwargs)
        places = Counter((id(node), nr) for _, node, nr in found)
        alike = {leaf for leaf, node, nr in found if places[id(node), nr] > 1}
        aside = self.aside(args, kwargs, alike, repeated=repeated) if alike else None
        return Special(repeated, follow, next_node(), tuple(each for each in found if each[0] not in alike), aside)

    def aside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], alike: Collection[Leaf], *, repeated: bool
    ) -> Aside | None:
        """Make a call on the side in which arguments that are one tensor are several; say why where that cannot be."""
        local = self.watcher.local
        local.looking = True
        try:
            if repeated:
                raise Unsupported("one tensor is several arguments of a call that activation checkpointing repeats")
            return Aside(self.module, args, kwargs, alike, local.calls)
        except Exception as error:
            for leaf in alike:
                self.watcher.sink.failed(Point(self.name, "grad_input", leaf), error)
            return None
        finally:
            local.looking = False

    def tell(self, step: Step, number: int, found: list[tuple[Leaf, torch.Tensor]], value: object) -> None:
        """Tell the sink each tensor of a value, or that there is none."""
        points, local = self.points, self.watcher.local
        if not found:
            reason = f"its {self.side} holds no tensor: {describe(value)}"
            self.watcher.sink.empty(Point(self.name, self.side), because=reason)
        local.looking = True
        try:
            for leaf, tensor in found:
                point = points.get(leaf) or points.setdefault(leaf, Point(self.name, self.side, leaf))
                self.watcher.sink.seen(step, point, tensor, call=number)
            if step.whole is not None:
                step.whole(step, Point(self.name, self.side), value, number)
        finally:
            local.looking = False


class Before(Hook):
    """Sees a call begin. A tracer's or compiler's pass is none, nor is one of a copy that shares our hooks."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Note the call, and look at what it is given; no `kwargs` means that another thread just took the hook off."""
        if is_dynamo_compiling() or kwargs is None:
            return
        watcher = self.watcher
        try:
            if module is not self.module or not watcher.live:
                return
            calls, frame = watcher.local.calls, _frame_at(1)
            inside = calls and is_running(calls[-1][3], within=frame)
            usual = _graph_task() < 0 and _tracing_state() is None
            if inside and usual and (self.simple or calls[-1][1].idle):
                step = calls[-1][1]
                if step.idle:
                    if not self.found_inside:
                        self.found_inside = True
                        watcher.is_inside(self.name)
                    return
                number = next(step.calls[self.name])
                calls.append((self.name, step, number, frame, None))
            else:
                call = watcher.entered(self, frame, args, kwargs, calls=calls)
                if call is None:
                    return
                _, step, number, _, special = call
                if step.idle or (special is not None and special.repeated):
                    return
            if self.looks:
                if len(args) == 1 and not kwargs and self.simple and isinstance(args[0], _Tensor) and not step.whole:
                    watcher.sink.seen(step, self.only, args[0], call=number)
                else:
                    self.tell(step, number, argument_leaves(args, kwargs), args or None)
        except Exception as error:
            self.failed(error)


class After(Hook):
    """Sees a call end, whose beginning was seen."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = _NOT_GIVEN
    ) -> None:
        """Look at what the call returned, None where it raised; no `value` means that the hook was just taken off."""
        if is_dynamo_compiling() or value is _NOT_GIVEN:
            return
        watcher = self.watcher
        try:
            if not watcher.live:
                return
            calls, frame = watcher.local.calls, _frame_at(1)
            call = calls.pop() if calls and calls[-1][3] is frame else watcher.local.ended(frame)
            if call is None:
                return  # its beginning was not seen: another hook raised before ours, or it is idle
            _, step, number, made_by, special = call
            failed = value is None and made_by is not frame
            if not (step.idle or failed):
                if special is None and self.simple and isinstance(value, _Tensor) and not step.whole:
                    if self.looks:
                        watcher.sink.seen(step, self.only, value, call=number)
                elif self.looks or special is not None:
                    watcher.returned(self, call, value)
            if not calls and (special is None or not special.repeated):
                watcher.sink.end(step, failed=failed)
        except Exception as error:
            self.failed(error)
