"""What the hooks of one `watch` share, and when they are there.

    watcher = Watcher(sink)
    pair = watcher.pair(module, "layers.3", frozenset({"input", "output"}))
    pair.on()
    ...
    watcher.close()
    pair.off()

While no tap is due there are no hooks on the model, but for those with which a forward begins: the model's own, and
those of modules that were seen to be called from outside, or not seen yet. `docs/design/what-is-a-step.md` says why.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from layerscope.errors import Unsupported
from layerscope.log import log
from layerscope.points import Moment, Point, Side
from layerscope.runtimes.eager.calls import Call, Calls, Local, Special, modules_running
from layerscope.runtimes.eager.gradient_hooks import Regions, follow_inputs, follow_outputs
from layerscope.runtimes.eager.hooks import After, Before, Pair
from layerscope.runtimes.sink import Sink, Step
from layerscope.runtimes.values import leaves

if TYPE_CHECKING:
    from layerscope.runtimes.eager import ModuleTree

__all__ = ["Watcher"]


_tracing_state = torch._C._get_tracing_state
_graph_task = torch._C._current_graph_task_id
_NOWHERE = Step(Moment())  # where a repeated call belongs that nobody follows

# After so many idle steps in a row the hooks come off: one alone may stand between two that are due, and checkpointed
# regions repeat their calls in a backward pass that can come many forwards later.
_IDLE = 2
_IDLE_WITH_REGIONS = 64


class Watcher:
    """What all hooks of one `watch` share."""

    def __init__(self, sink: Sink, *, ops: bool = False) -> None:
        self.sink = sink
        self.ops = ops  # whether operations are watched too, and ours must be told from the model's
        self.live = True
        self.regions = Regions()
        self.idle = 0  # steps in a row in which no tap was due
        self.tree: ModuleTree | None = None  # once the hooks are on
        self._threads: weakref.WeakValueDictionary[int, Calls] = weakref.WeakValueDictionary()
        self.local = Local(self._threads)
        self._lock = threading.RLock()
        self._pairs: dict[str, Pair] = {}
        self._inside: list[Pair] = []  # seen to be called inside the model: their hooks can come off
        self._off: list[Pair] = []  # those whose hooks did
        _at_fork()
        _WATCHERS.add(self)

    def pair(self, module: torch.nn.Module, name: str, sides: frozenset[Side]) -> Pair:
        """Make the hooks of a module."""
        made = self._pairs[name] = Pair(self, module, name, sides)
        return made

    def close(self) -> None:
        """End the watch: no hook sees anything any more, none is left on the model, and the model is let go."""
        with self._lock:
            self.live = False
            pairs, self._pairs, self._inside, self._off = self._pairs, {}, [], []
            self.tree = None
        for pair in pairs.values():
            pair.off()

    def close_in_child(self) -> None:
        """End the watch in a forked child, where whoever held the lock is not there to release it."""
        self._lock = threading.RLock()
        self.live = False

    def entered(
        self,
        hook: Before,
        frame: FrameType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        calls: Calls,  # of this thread
    ) -> Call | None:
        """Begin a call of whatever kind: outermost, inside another, repeated; None when nothing is to be seen of it."""
        if is_compiling() or _tracing_state() is not None:
            return None
        name, follow = hook.name, hook.graded and torch.is_grad_enabled()
        if _graph_task() >= 0:
            origin = self.regions.repeats(name) if hook.graded else None
            step, number = origin or (_NOWHERE, 0)
            repeat = hook.special(args, kwargs, repeated=True, follow=follow and origin is not None)
            calls.append((name, step, number, frame, repeat))
            return calls[-1]
        outer = self.local.innermost()
        if outer is not None:
            step = outer[1]
            if step.idle:
                self.is_inside(name)
                return None
        elif self._may_begin(name):
            if self.tree is not None and (now := self.tree.changed()) is not None:
                self._follow(now)
            step = self.sink.begin()
        else:
            return None
        number = next(step.calls[name])
        special: Special | None = None
        if follow and not step.idle:
            special = hook.special(args, kwargs, repeated=False, follow=True)
        elif hook.graded and not step.idle:
            self.regions.may_repeat(name, step, number)
        calls.append((name, step, number, frame, special))
        if outer is None:
            self._begun(step)
        return calls[-1]

    def _may_begin(self, name: str) -> bool:
        """Tell whether a call with none around it begins a forward: one that began unseen stays unseen to its end."""
        pairs = self._pairs
        pair = pairs.get(name)
        if pair is None:
            return False  # the watch has just ended
        if pair.inside:
            watched = {id(other.module) for other in pairs.values()}
            around = islice(modules_running(), 1, None)  # the first is the call itself
            if any(id(module) in watched for module in around):
                return False
        if pair.rested and not pair.entry:
            log.warning("%s is called on its own; while no tap was due, such calls were not seen as steps", pair.name)
        pair.entry = True
        return True

    def _follow(self, now: Mapping[str, torch.nn.Module]) -> None:
        """Watch the modules that were put in the place of others, and say which are gone."""
        with self._lock:
            for name, pair in list(self._pairs.items()):
                module = now.get(name)
                if module is pair.module:
                    continue
                pair.off()
                del self._pairs[name]
                self._inside = [each for each in self._inside if each is not pair]
                self._off = [each for each in self._off if each is not pair]
                if module is not None:
                    log.warning("%s was replaced while recording; what is there now is recorded from here on", name)
                    self.pair(module, name, pair.sides).on()
                for side in () if module is not None else sorted(pair.sides):
                    self.sink.failed(Point(name, side), Unsupported("it was taken out of the model while recording"))

    def _begun(self, step: Step) -> None:
        """Have the hooks there when something is due, and not there when nothing has been for a while."""
        if step.idle:
            self.idle += 1
            if self._inside and self.idle >= _IDLE:
                self._rest()
            return
        with self._lock:  # the call is known by now: whoever takes hooks off looks for it
            self.idle = 0
            if self._off and self.live:
                for pair in self._off:
                    pair.on()
                self._inside += self._off
                self._off = []

    def is_inside(self, name: str) -> None:
        """Learn that a module is called inside another."""
        with self._lock:
            pair = self._pairs.get(name)
            if pair is not None and not pair.inside:
                pair.inside = True
                self._inside.append(pair)

    def _rest(self) -> None:
        """Take hooks off, unless a forward that is due runs on another thread, or may be repeated."""
        with self._lock:
            if self.idle < (_IDLE_WITH_REGIONS if self.regions else _IDLE):
                return  # or one that is due has begun meanwhile
            everywhere = [calls for thread in self._threads.valuerefs() if (calls := thread()) is not None]
            if any(not step.idle for calls in everywhere for _, step, _, _, _ in calls[:1]):
                return
            for pair in self._inside:
                if pair.is_alone and not pair.entry:
                    self._off.append(pair)
                    pair.off()
            self._inside = []

    def returned(self, hook: After, call: Call, value: object) -> None:
        """Look at what a call returned, in every way that is asked for."""
        special = call[-1]
        if special is not None and special.repeated:
            if hook.sides and not self.idle:
                self.sink.recomputed(hook.name)
        elif hook.looks:
            hook.tell(call[1], call[2], leaves(value), value)
        if special is not None and special.follow and "grad_output" in hook.sides:
            follow_outputs(self, call, value)
        if special is not None and special.sources:
            follow_inputs(self, call, value)
        if special is not None and special.aside is not None:
            special.aside.follow(self, call, value)


_WATCHERS: weakref.WeakSet[Watcher] = weakref.WeakSet()


@cache
def _at_fork() -> None:
    """Arrange, once, that watching ends in a forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for watcher in list(_WATCHERS):
        watcher.close_in_child()
