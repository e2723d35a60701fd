"""The hooks on a module: one sees its call begin, the other sees it end.

    pair = Pair(watcher, module, "layers.3", frozenset({"input", "output"}))
    pair.on()
    ...
    pair.off()

Where nothing but outputs are wanted, of a module with no other watched one inside, a single hook sees the call end:
each hook costs microseconds, most of them torch's. Hooks return None, hold no state on the user's modules, stay silent
in deep copies and forked children, and turn into nothing when the model is pickled. On a GPU torch calls a gate in
their place, where a call like the last one passes, and a door in the place of a module whose single hook is one, which
is an attribute of that module meanwhile (`native/`). Their `__call__` is the shortest way for the commonest call; any
other goes through the watcher, which also knows when the hooks are to be there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.calls import Special, frames_to, has_raised
from layerscope.runtimes.doors import hang, run_hooks, take_off
from layerscope.runtimes.gradients import next_node, sources
from layerscope.runtimes.sink import Step
from layerscope.runtimes.values import argument_leaves, describe, leaves, made_of

if TYPE_CHECKING:
    from layerscope.runtimes.watcher import Watcher

__all__ = ["After", "Before", "End", "Hook", "Pair"]

# What a hook of ours becomes in a deep copy or a pickle: a call that takes anything and returns None, from the
# standard library, so that a checkpoint saved while recording loads where layerscope is not installed.
_SILENT = nullcontext().__exit__

_Tensor = torch.Tensor
_frame_at = sys._getframe
_graph_task = torch._C._current_graph_task_id
_GRADED: frozenset[Side] = frozenset(("grad_input", "grad_output"))
_NOT_GIVEN = object()
_USUAL = 5  # __call__ of ours; inner, _call_impl, _wrapped_call_impl, the outer module's forward and its inner


class Pair:
    """The two hooks of one watched module, and what is known of its calls."""

    def __init__(
        self, watcher: Watcher, module: torch.nn.Module, name: str, sides: frozenset[Side], *, ends: bool = False
    ) -> None:
        self.module = module
        self.name = name
        self.entry = False  # seen to be called from outside
        self.inside = False  # seen to be called inside another
        self.rested = False  # has been without its hooks
        self._before = None if ends else Before(watcher, module, name, sides, "input")
        self._after = (End if ends else After)(watcher, module, name, sides, "output")
        self._handles: list[RemovableHandle] = []
        gate = self._after.gate
        self._door = gate.door() if ends and gate is not None else None

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has hooks here: theirs keep their order, and the module is not quick anyway."""
        hooks = (*self.module._forward_pre_hooks.values(), *self.module._forward_hooks.values())
        return all(isinstance(getattr(hook, "hook", hook), Hook) for hook in hooks)

    def on(self) -> None:
        """Have the hooks called: after those that were there at first, before those that came since."""
        module, before, after = self.module, self._before, self._after
        hang(self._door, module)
        if not self._handles:
            if before is not None:
                self._handles.append(module.register_forward_pre_hook(before.called, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after.called, with_kwargs=True, always_call=True))
            return
        first, last = self._handles[0].id, self._handles[-1].id  # registering takes ten times as long as this
        if before is not None:
            module._forward_pre_hooks_with_kwargs[first] = True
            _put_first(module._forward_pre_hooks, first, before.called)
        module._forward_hooks_with_kwargs[last] = True
        module._forward_hooks_always_called[last] = True
        _put_first(module._forward_hooks, last, after.called)

    def off(self) -> None:
        """Leave nothing of the hooks on the module."""
        self.rested = True
        take_off(self._door, self.module)
        for handle in self._handles:
            handle.remove()

    def shut(self) -> None:
        """Have nothing pass by the hooks any more."""
        for hook in (self._before, self._after):
            if hook is not None:
                hook.shut()
        if self._door is not None:
            self._door.close()  # others may have it, who have copied the module's attributes

    def see_begin(self) -> None:
        """See calls begin as well from now on; those under way are seen to end as before."""
        after = self._after
        if self._before is None:
            self._before = Before(after.watcher, self.module, self.name, after.sides, "input")
            after.begins = True
            after.shut()
            self._handles.insert(0, self.module.register_forward_pre_hook(self._before.called, with_kwargs=True))


def _put_first(hooks: Any, key: int, hook: Callable[..., None]) -> None:
    hooks[key] = hook
    if len(hooks) > 1:
        hooks.move_to_end(key, last=False)


class Hook:
    """A hook on one module: inert in copies, pickles and forked children, and never raising."""

    kind: Literal["begin", "finish", "end"]  # of what it sees of a call

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
        self.seen = watcher.sink.seen
        self.only = Point(name, side, () if side == "output" else (0,))  # where there is a single tensor
        self.points: dict[Leaf, Point] = {self.only.leaf: self.only}  # and others, as they come
        self.found_inside = False  # that outer module, in an idle step
        self.begins = False  # whether the beginnings of these calls are seen too, after all
        self.gate = watcher.sink.gate(self, watcher.local) if self.simple else None
        if self.gate is not None:
            self.gate.blind = side == "output" and not self.looks
        self.is_away(_USUAL)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _SILENT

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    @property
    def called(self) -> Callable[..., None]:
        """What torch calls: the gate where there is one, and it has the hook called."""
        return self if self.gate is None else self.gate  # type: ignore[return-value]

    def is_away(self, frames: int) -> None:
        """Learn how many frames it is from our own to the one that calls the outer module."""
        self.away = frames
        if self.gate is not None:
            self.gate.away = frames - 1  # from torch's own

    def shut(self) -> None:
        """Have nothing pass by any more."""
        if self.gate is not None:
            self.gate.close()
            self.gate = None

    def failed(self, error: Exception) -> None:
        """Say that looking raised; the model's run goes on."""
        self.watcher.sink.failed(Point(self.name, self.side), error)

    def special(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, repeated: bool, follow: bool) -> Special:
        """Take down what will be needed when the call ends."""
        if not follow:
            return Special(repeated, follow)
        first_node = next_node()
        return Special(repeated, follow, first_node, sources(args, kwargs) if "grad_input" in self.sides else ())

    def learn(self, value: object, passes: dict[Leaf, Any]) -> None:
        """Have the next value like this one pass, where all of its tensors may."""
        if self.gate is not None and _may_pass(passes):
            self.gate.value = made_of(value, passes)

    def tell(self, step: Step, number: int, found: list[tuple[Leaf, torch.Tensor]], value: object) -> dict[Leaf, Any]:
        """Tell the sink each tensor of a value, and that there is none; return what lets the next of each pass."""
        points, local = self.points, self.watcher.local
        if not found:
            reason = f"its {self.side} holds no tensor: {describe(value)}"
            self.watcher.sink.empty(Point(self.name, self.side), because=reason)
        passes: dict[Leaf, Any] = {}
        local.looking = True
        try:
            for leaf, tensor in found:
                point = points.get(leaf) or points.setdefault(leaf, Point(self.name, self.side, leaf))
                passes[leaf] = self.seen(step, point, tensor, call=number)
            if step.whole is not None:
                step.whole(step, Point(self.name, self.side), value, number)
        finally:
            local.looking = False
        return passes


def _may_pass(passes: dict[Leaf, Any]) -> bool:
    return all(one is not None and one.count for one in passes.values())


class Before(Hook):
    """Sees a call begin. A tracer's or compiler's pass is none, nor is one of a copy that shares our hooks."""

    kind = "begin"

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Note the call, and look at what it is given; no `kwargs` means that another thread just took the hook off."""
        if is_dynamo_compiling() or kwargs is None:
            return
        watcher = self.watcher
        try:
            if module is not self.module or not watcher.live:
                return
            calls, frame = watcher.local.calls, _frame_at(1)
            try:
                inside = calls and _frame_at(self.away) is calls[-1][3]
            except ValueError:  # the stack is not that deep
                inside = False
            if inside and (self.simple or calls[-1][1].idle) and _graph_task() < 0:
                step = calls[-1][1]
                if step.idle:
                    if not self.found_inside:
                        self.found_inside = True
                        watcher.is_inside(self.name)
                    return
                number = next(step.calls[self.name])
                calls.append((self.name, step, number, frame, None))
            else:
                call = watcher.entered(self, frame, args, kwargs, calls=calls, outer=calls[-1] if inside else None)
                if call is None:
                    return
                _, step, number, _, special = call
                if step.idle or (special is not None and special.repeated):
                    return
            if self.looks:
                if len(args) == 1 and not kwargs and self.simple and isinstance(args[0], _Tensor) and not step.whole:
                    passes: dict[Leaf, Any] = {(0,): self.seen(step, self.only, args[0], call=number)}
                else:
                    passes = self.tell(step, number, argument_leaves(args, kwargs), args or None)
                if self.gate is not None and _may_pass(passes):
                    self.gate.args, self.gate.kwargs = made_of(args, passes), made_of(kwargs, passes)
            elif self.gate is not None:
                self.gate.blind = True  # the step has counted a call of it: it is known to have been called
        except Exception as error:
            self.failed(error)


class After(Hook):
    """Sees a call end, whose beginning was seen."""

    kind = "finish"

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
                        self.learn(value, {(): self.seen(step, self.only, value, call=number)})
                elif self.looks or special is not None:
                    watcher.returned(self, call, value)
            if not calls and (special is None or not special.repeated):
                watcher.sink.end(step, failed=failed)
        except Exception as error:
            self.failed(error)


class End(Hook):
    """Sees a call end, where nothing else is to be seen of it."""

    kind = "end"

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = _NOT_GIVEN
    ) -> None:
        """Look at what the call returned, None where it raised; no `value` means that the hook was just taken off."""
        if is_dynamo_compiling() or value is _NOT_GIVEN:
            return
        watcher = self.watcher
        try:
            if module is not self.module or not watcher.live:
                return
            calls = watcher.local.calls
            if self.begins and watcher.closed(self, _frame_at(1), value):
                return
            try:
                inside = calls and _frame_at(self.away) is calls[-1][3] and _graph_task() < 0
            except ValueError:  # the stack is not that deep
                inside = False
            if not inside:
                watcher.ended(self, _frame_at(1), value)
                return
            step = calls[-1][1]
            if step.idle:
                if not self.found_inside:
                    self.found_inside = True
                    watcher.is_inside(self.name)
            elif isinstance(value, _Tensor) and not step.whole:
                self.learn(value, {(): self.seen(step, self.only, value, call=next(step.calls[self.name]))})
            else:
                self.look(step, _frame_at(1), value)
        except Exception as error:
            self.failed(error)

    def late(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
        """Do what torch would, now that a door's forward is over, and see the end of the call; return its value."""
        return run_hooks(module, args, kwargs, value, ours=self, see=partial(self._ended, _frame_at(1)))

    def repeats(self) -> None:
        """Hear that the module is about to be called inside a call of its own, which went through the door."""
        try:
            if self.watcher.live:
                self.watcher.repeats(self)
        except Exception as error:
            self.failed(error)

    def _ended(self, frame: FrameType, value: object) -> None:
        """See the end of a call that was made in a frame further out than torch's own."""
        watcher, calls = self.watcher, self.watcher.local.calls
        try:
            if not watcher.live or (self.begins and watcher.closed(self, frame, value)):
                return
            inside = calls and frames_to(calls[-1][3], frame) == self.away and _graph_task() < 0
            if inside and not calls[-1][1].idle:
                self.look(calls[-1][1], frame, value)
            else:
                watcher.ended(self, frame, value)
        except Exception as error:
            self.failed(error)

    def look(self, step: Step, frame: FrameType, value: object, number: int | None = None) -> None:
        """Look at whatever a call returned, and count it if it has no number yet."""
        if number is None:
            number = next(step.calls[self.name])
        if not has_raised(frame, value):
            self.learn(value, self.tell(step, number, leaves(value), value))
