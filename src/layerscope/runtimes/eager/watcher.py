"""What the hooks of one `watch` share, and when they are there.

    watcher = Watcher(sink)
    watcher.hook(module, "layers.3", frozenset({"input", "output"}))
    ...
    watcher.close()

While no tap is due there are no hooks on the model, but for those with which a forward begins: the model's own, and
those of modules that were seen to be called from outside, or not seen yet. `docs/design/what-is-a-step.md` says why.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch._C._autograd import _get_sequence_nr as next_node

from layerscope.errors import Unsupported
from layerscope.log import log
from layerscope.points import Leaf, Moment, Point, Side
from layerscope.runtimes.eager.calls import Calls, Flow, Local, RunningCall
from layerscope.runtimes.eager.gradient_hooks import Regions, follow_inputs, follow_outputs, sources
from layerscope.runtimes.eager.hooks import After, Before, Hook, HookedModule
from layerscope.runtimes.eager.shared_arguments import Aside
from layerscope.runtimes.sink import RuntimeSink, Step

if TYPE_CHECKING:
    from layerscope.runtimes.eager.modules import ModuleTree

_tracing_state = torch._C._get_tracing_state
_graph_task = torch._C._current_graph_task_id
_NOWHERE = Step(Moment())  # where a repeated call belongs whose forward is not known

# After so many idle steps in a row the hooks come off: one alone may stand between two that are due, and checkpointed
# regions repeat their calls in a backward pass that can come many forwards later.
_IDLE = 2
_IDLE_WITH_REGIONS = 64


class Watcher:
    """What all hooks of one `watch` share."""

    def __init__(self, sink: RuntimeSink) -> None:
        self.sink = sink
        self.live = True
        self.tree: ModuleTree | None = None  # once the hooks are on
        self._regions = Regions()
        self._threads: WeakValueDictionary[int, Calls] = WeakValueDictionary()
        self.local = Local(self._threads)
        self._lock = threading.RLock()
        self._idle = 0  # steps in a row in which no tap was due
        self._hooked: dict[str, HookedModule] = {}
        self._inside: set[str] = set()  # modules seen to be called inside the model: their hooks can come off
        self._off: list[HookedModule] = []  # those whose hooks did
        _at_fork()
        _WATCHERS.add(self)

    def hook(self, module: torch.nn.Module, name: str, sides: frozenset[Side]) -> None:
        """Put the hooks on a module."""
        made = self._hooked[name] = HookedModule(self, module, name, sides)
        made.on()

    def close(self) -> None:
        """End the watch: no hook sees anything any more, none is left on the model, and the model is let go."""
        with self._lock:
            self.live = False
            hooked, self._hooked, self._off = self._hooked, {}, []
            self.tree = None
        for each in hooked.values():
            each.off()

    def close_in_child(self) -> None:
        """End the watch in a forked child, where the thread that held the lock is not there to release it."""
        self._lock = threading.RLock()
        self.live = False

    # Calls ----------------------------------------------------------------------------------------

    def began(
        self, hook: Before, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RunningCall | None:
        """Begin a call: outermost, inside another, repeated; None when nothing is to be seen of it."""
        if _tracing_state() is not None:
            return None
        name, handled = hook.name, sys.exc_info()[1]
        follow = hook.graded and torch.is_grad_enabled()
        if _graph_task() >= 0:
            origin = self._regions.repeats(name) if hook.graded else None
            step, number = origin or (_NOWHERE, 0)
            flow = self._flow(hook, args, kwargs, repeated=True) if follow and origin else None
            call = RunningCall(name, step, number, frame, handled, True, flow)
            self.local.calls.append(call)
            return call
        outer = self.local.innermost()
        begun = outer.step if outer is not None else self._begin(name)
        if begun is None:
            return None
        number = next(begun.calls[name])
        flow = self._flow(hook, args, kwargs, repeated=False) if follow and not begun.idle else None
        if hook.graded and not (follow or begun.idle):
            self._regions.may_repeat(name, begun, number)
        call = RunningCall(name, begun, number, frame, handled, False, flow)
        self.local.calls.append(call)
        if outer is None:
            self._settle(begun)
        elif begun.idle:
            self._inside.add(name)
        return call

    def returned(self, hook: After, call: RunningCall, value: object) -> None:
        """Count a repeated call, and follow the gradients that will flow through this one."""
        if call.repeated and hook.sides and not self._idle:
            self.sink.recomputed(hook.name)
        if call.flow is not None:
            if "grad_output" in hook.sides:
                follow_outputs(self, call, value)
            if call.flow.sources:
                follow_inputs(self, call, value)
            if call.flow.aside is not None:
                call.flow.aside.follow(self, call, value)

    def ended(self, call: RunningCall, *, failed: bool) -> None:
        """End the forward with its outermost call."""
        if not (self.local.calls or call.repeated):
            self.sink.end(call.step, failed=failed)

    def _flow(self, hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any], *, repeated: bool) -> Flow:
        """Take down where gradients will flow to, as a call begins."""
        first_node = next_node()
        if "grad_input" not in hook.sides:
            return Flow(first_node)
        found = sources(args, kwargs)
        places = Counter((id(node), nr) for _, node, nr in found)
        alike = {leaf for leaf, node, nr in found if places[id(node), nr] > 1}
        aside = self._aside(hook, args, kwargs, alike, repeated=repeated) if alike else None
        return Flow(next_node(), tuple(each for each in found if each[0] not in alike), aside)

    def _aside(
        self, hook: Hook, args: tuple[Any, ...], kwargs: dict[str, Any], alike: Collection[Leaf], *, repeated: bool
    ) -> Aside | None:
        """Make a call on the side in which arguments that are one tensor are several; say why where that cannot be."""
        try:
            with self.local.ours:
                if repeated:
                    raise Unsupported("one tensor is several arguments of a call that activation checkpointing repeats")
                return Aside(hook.module, args, kwargs, alike, self.local.calls)
        except Exception as error:
            for leaf in alike:
                self.sink.failed(Point(hook.name, "grad_input", leaf), error)
            return None

    # Steps ----------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Step | None:
        """Begin a forward with a call of this module; None when the watch has just ended."""
        hooked = self._hooked.get(name)
        if hooked is None:
            return None
        if hooked.was_off and not hooked.begins_forwards:
            log.warning("%s is called on its own; while no tap was due, such calls were not seen as steps", name)
        hooked.begins_forwards = True
        if self.tree is not None and (now := self.tree.changed()) is not None:
            self._follow(now)
        return self.sink.begin()

    def _follow(self, now: Mapping[str, torch.nn.Module]) -> None:
        """Watch the modules that were put in the place of others, and say which are gone."""
        with self._lock:
            for name, hooked in list(self._hooked.items()):
                module = now.get(name)
                if module is hooked.module:
                    continue
                hooked.off()
                del self._hooked[name]
                self._off = [each for each in self._off if each is not hooked]
                if module is not None:
                    log.warning("%s was replaced while recording; what is there now is recorded from here on", name)
                    self.hook(module, name, hooked.sides)
                for side in () if module is not None else sorted(hooked.sides):
                    self.sink.failed(Point(name, side), Unsupported("it was taken out of the model while recording"))

    def _settle(self, step: Step) -> None:
        """Have the hooks there when something is due, and not there when nothing has been for a while."""
        if step.idle:
            self._idle += 1
            if self._inside and self._idle >= _IDLE:
                self._rest()
            return
        with self._lock:  # the call is on its stack by now, where `_rest` sees it
            self._idle = 0
            if self.live:
                for hooked in self._off:
                    hooked.on()
            self._inside.update(hooked.name for hooked in self._off)
            self._off = []

    def _rest(self) -> None:
        """Take hooks off, unless a forward that is due runs on another thread, or may be repeated."""
        with self._lock:
            if self._idle < (_IDLE_WITH_REGIONS if self._regions else _IDLE):
                return  # or one that is due has begun meanwhile
            everywhere = [calls for thread in self._threads.valuerefs() if (calls := thread()) is not None]
            if any(not call.step.idle for calls in everywhere for call in calls[:1]):
                return
            for name in self._inside & self._hooked.keys():
                hooked = self._hooked[name]
                if hooked.is_alone and not hooked.begins_forwards and hooked not in self._off:
                    self._off.append(hooked)
                    hooked.off()
            self._inside = set()


_WATCHERS: WeakSet[Watcher] = WeakSet()


@cache
def _at_fork() -> None:
    """Arrange, once, that watching ends in a forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for watcher in list(_WATCHERS):
        watcher.close_in_child()
