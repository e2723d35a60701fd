"""A door by itself: which calls go through it, what becomes of them there, and that nothing is left behind.

The device is played by the host: torch calls it place -1, and its only stream is number 0.
"""

from __future__ import annotations

import _thread
import copy
import ctypes
import gc
import pickle
import sys
import threading
import traceback
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from torch.overrides import TorchFunctionMode

from asserts import assert_lives_through
from layerscope import native
from played import Step, bits

pytestmark = pytest.mark.skipif(native.load() is None, reason=f"no gates: {native.why_not()}")

gates = native.load()

HERE = -1
PLACE = "_compiled_call_impl"
AWAY = 3  # from torch's `inner`: `_call_impl`, `_wrapped_call_impl`, and `Doorway.call`
MANY = 1000

# Who calls a forward, by the name of the function.
DOOR, TORCH, PLAINLY = "_wrapped_call_impl", "inner", "_call_impl"


class Hook:
    """What stands behind the gate: it notes what was left to it, and says what it is told to."""

    def __init__(self):
        self.left = []
        self.late_calls = []
        self.errors = []
        self.says = lambda value: value

    def __call__(self, module, args, kwargs, value):
        self.left.append((module, args, kwargs, value))

    def late(self, module, args, kwargs, value):
        self.late_calls.append((module, args, kwargs, value))
        return self.says(value)

    def failed(self, error):
        self.errors.append(error)


class Layer(nn.Module):
    """A module that does what it is told to, and notes who has called its forward."""

    def __init__(self):
        super().__init__()
        self.ways = []
        self.does = lambda *args, **kwargs: bits(4)

    def forward(self, *args, **kwargs):
        self.ways.append(sys._getframe(1).f_code.co_name)
        return self.does(*args, **kwargs)


class Doorway:
    """A module with a gate and a door, inside of a call that is under way."""

    def __init__(self, *, keep=None):
        self.kept = []
        self.requests = {}
        self.stream = lambda: 0
        self.basket = gates.Basket(
            HERE, keep or self.kept.append, self.take, 1 << 20, lambda place: self.stream(), lambda: False
        )
        self.begin()
        self.local = SimpleNamespace(calls=[])
        self.hook, self.module = Hook(), Layer()
        self.gate = self.made("end")
        self.gate.value, self.gate.away = self.leave(4), AWAY
        self.handle = self.module.register_forward_hook(self.gate, with_kwargs=True, always_call=True)
        self.door = self.module.__dict__[PLACE] = self.gate.door()

    def made(self, kind):
        return gates.Gate(self.basket, kind, self.hook, self.module, "inner", self.local)

    def begin(self, number=1):
        self.basket.shut()
        self.step = Step(self.requests)
        self.basket.open(self.step, number, 0, True)

    def take(self, left):
        gates.release(left[0])

    def leave(self, items):
        leave = gates.Pass(self.basket, "a point", "moments", object(), self.requests)
        assert leave.allow(items, torch.float32, 4 * items, 100, False)
        return leave

    def call(self, *args, module=None, **kwargs):
        """Call the module, inside of the call under way; it may be another one that has the same door."""
        self.local.calls[:] = [("outer", self.step, 0, sys._getframe(), None)]
        return (module or self.module)(*args, **kwargs)

    def way(self, *args, **kwargs):
        """Call the module, and return which way that went."""
        self.module.ways.clear()
        self.call(*args, **kwargs)
        (way,) = self.module.ways
        return way

    def ready(self):
        """Have a call pass the gate, so that the next may go through the door."""
        does, self.module.does = self.module.does, lambda *args, **kwargs: bits(4)
        self.call()
        self.module.does = does
        assert self.hook.left == self.hook.late_calls == []
        self.module.ways.clear()
        return self

    def sweep(self):
        left = self.basket.sweep()
        if left is not None:
            gates.release(left[0])
        self.kept.clear()


# Which way a call goes ------------------------------------------------------------------------------------------------


def test_the_first_call_goes_torchs_way_and_the_next_through_the_door():
    doorway = Doorway()
    assert [doorway.way() for _ in range(4)] == [TORCH, DOOR, DOOR, DOOR]
    assert [one.moment for one in doorway.kept] == ["call 0", "call 1", "call 2", "call 3"]
    assert doorway.hook.left == doorway.hook.late_calls == []


def test_the_value_of_the_forward_waits_and_is_returned():
    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = lambda: value

    assert doorway.call() is value
    assert doorway.module.ways == [DOOR]
    assert doorway.kept[-1].tensor is value


def test_a_call_after_one_that_did_not_pass_goes_torchs_way():
    doorway = Doorway().ready()
    doorway.module.does = lambda: bits(5)

    assert doorway.way() == DOOR
    assert len(doorway.hook.late_calls) == 1
    assert doorway.way() == TORCH
    assert len(doorway.hook.left) == 1
    assert len(doorway.kept) == 1


def closed(doorway):
    doorway.gate.close()


def shut(doorway):
    doorway.basket.shut()


def barred(doorway):
    doorway.basket.bar()


def hooked_before(doorway):
    doorway.module.register_forward_pre_hook(lambda module, args: None)


def hooked_after(doorway):
    doorway.module.register_forward_hook(lambda module, args, value: None)


def hooked_backward(doorway):
    doorway.module.register_full_backward_hook(lambda module, grads, gradients: None)


def hooked_before_backward(doorway):
    doorway.module.register_full_backward_pre_hook(lambda module, gradients: None)


def hooked_by_another(doorway):
    doorway.handle.remove()
    doorway.module.register_forward_hook(lambda module, args, value: None)


NOT_AFTER = [hooked_before, hooked_backward, hooked_before_backward]  # torch looks for these before the forward
UNLIKELY = [closed, shut, barred, hooked_after, *NOT_AFTER]


@pytest.mark.parametrize("make", [*UNLIKELY, hooked_by_another], ids=lambda make: make.__name__)
def test_where_a_call_may_not_pass_it_goes_torchs_way(make):
    doorway = Doorway().ready()
    make(doorway)
    assert doorway.way() == TORCH
    assert doorway.hook.late_calls == []


def test_without_a_hook_it_goes_torchs_way():
    doorway = Doorway().ready()
    doorway.handle.remove()
    assert doorway.way() == PLAINLY


EVERYWHERE = {
    "forward pre": (everywhere.register_module_forward_pre_hook, lambda module, args: None),
    "forward": (everywhere.register_module_forward_hook, lambda module, args, value: None),
    "backward pre": (everywhere.register_module_full_backward_pre_hook, lambda module, gradients: None),
    "backward": (everywhere.register_module_full_backward_hook, lambda module, grads, gradients: None),
}


@pytest.mark.parametrize(("register", "hook"), EVERYWHERE.values(), ids=EVERYWHERE)
def test_where_all_modules_have_a_hook_it_goes_torchs_way(register, hook):
    doorway = Doorway().ready()
    handle = register(hook)
    try:
        assert doorway.way() == TORCH
    finally:
        handle.remove()
    doorway.ready()
    assert doorway.way() == DOOR


def test_another_thread_goes_torchs_way():
    doorway = Doorway().ready()
    thread = threading.Thread(target=doorway.call)
    thread.start()
    thread.join()
    assert doorway.module.ways == [TORCH]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_trace_is_made_torchs_way():
    doorway = Doorway().ready()
    doorway.module.does = lambda value: value + 1
    torch.jit.trace(doorway.module, (bits(4),), check_trace=False)
    assert doorway.module.ways == ["_slow_forward"]


def test_what_a_mode_of_torchs_has_changed_is_left_to_the_hooks():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            noticed.append(function)
            return function(*args, **(kwargs or {}))

    noticed = []
    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = lambda: value
    with Mode():
        assert doorway.call() is value
    assert doorway.hook.late_calls == [(doorway.module, (), {}, value)]
    assert noticed == []


OWN = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]


@pytest.mark.parametrize("value", [None, "nothing", OWN, {1: None, 2: None}], ids=str)
@pytest.mark.parametrize("name", OWN)
def test_a_module_whose_hooks_are_no_dict_or_gone_is_called_as_torch_would(name, value):
    doorway = Doorway().ready()
    if value is None:
        del doorway.module.__dict__[name]
    else:
        doorway.module.__dict__[name] = value

    assert said_by(doorway.call) == said_by(doorway.module._call_impl)
    assert DOOR not in doorway.module.ways


def test_what_has_no_attributes_of_its_own_goes_its_own_way():
    class Slotted:
        __slots__ = ()

        def _call_impl(self, *args, **kwargs):
            return args, kwargs

    doorway = Doorway()
    module = doorway.module = Slotted()
    gate = doorway.made("end")
    gate.value, gate.away = doorway.leave(4), 0
    doorway.local.calls[:] = [("outer", doorway.step, 0, sys._getframe(), None)]
    gate(module, (), {}, bits(4))
    assert len(doorway.kept) == 1

    assert gate.door()(1, two=2) == ((1,), {"two": 2})


def said_by(call):
    try:
        return type(call())
    except Exception as error:
        return repr(error)


# What goes through ----------------------------------------------------------------------------------------------------


GIVEN = {
    "nothing": ((), {}),
    "values": ((1, "two", None), {}),
    "values by name": ((), {"self_": 1, "args": 2, "kwargs": {}, "value": None}),
    "both": ((bits(2), [3]), {"mask": bits(2), "cache": None}),
}


@pytest.mark.parametrize(("args", "kwargs"), GIVEN.values(), ids=GIVEN)
def test_what_is_given_goes_through_as_it_is(args, kwargs):
    seen = []

    def does(*given, **named):
        seen.append((given, named))
        return bits(4)

    doorway = Doorway().ready()
    doorway.module.does = does
    assert doorway.way(*args, **kwargs) == DOOR

    ((given, named),) = seen
    assert len(given) == len(args)
    assert all(one is other for one, other in zip(given, args, strict=True))
    assert list(named) == list(kwargs)
    assert all(named[name] is kwargs[name] for name in kwargs)


def test_the_hooks_are_told_what_was_given_and_returned():
    doorway, given, mask, value = Doorway().ready(), bits(2), bits(3), bits(5)
    doorway.module.does = lambda *args, **kwargs: value

    assert doorway.call(given, 7, mask=mask) is value

    ((module, args, kwargs, told),) = doorway.hook.late_calls
    assert module is doorway.module
    assert type(args) is tuple
    assert args[0] is given
    assert args[1:] == (7,)
    assert list(kwargs) == ["mask"]
    assert kwargs["mask"] is mask
    assert told is value


def test_a_forward_that_returns_none_is_left_to_the_hooks():
    doorway = Doorway().ready()
    doorway.module.does = lambda: None
    assert doorway.call() is None
    assert doorway.hook.late_calls == [(doorway.module, (), {}, None)]


def test_what_the_hooks_return_is_the_callers():
    doorway, other = Doorway().ready(), object()
    doorway.module.does = lambda: bits(5)
    doorway.hook.says = lambda value: other
    assert doorway.call() is other
    doorway.hook.late_calls.clear()
    doorway.ready()
    doorway.hook.says = lambda value: None
    assert doorway.call() is None


@pytest.mark.parametrize("error", [KeyError("hello"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_the_hooks_raise_is_the_callers(error):
    def says(value):
        raise error

    doorway = Doorway().ready()
    doorway.module.does = lambda: bits(5)
    doorway.hook.says = says
    with pytest.raises(type(error)) as caught:
        doorway.call()
    assert caught.value is error
    assert doorway.hook.errors == []


def test_a_forward_of_the_modules_own_is_called():
    doorway, value = Doorway().ready(), bits(4)
    doorway.module.forward = lambda: value
    assert doorway.call() is value
    doorway.module.forward = 3
    with pytest.raises(TypeError, match="not callable"):
        doorway.call()


def test_a_module_without_a_forward_raises_as_torch_does():
    class Bare(Layer):
        @property
        def forward(self):
            raise AttributeError("no forward here")

    doorway = Doorway().ready()
    doorway.module.__class__ = Bare
    assert said_by(doorway.call) == said_by(doorway.module._call_impl)
    assert doorway.hook.left == doorway.hook.late_calls == []


# A forward that raises ------------------------------------------------------------------------------------------------


def raising(error):
    def does(*args, **kwargs):
        raise error

    return does


def test_the_hooks_are_told_that_a_forward_raised_and_it_is_raised_on():
    doorway, error = Doorway().ready(), ValueError("a value")
    doorway.module.does = raising(error)

    with pytest.raises(ValueError, match="a value") as caught:
        doorway.call(1, two=2)

    assert caught.value is error
    assert error.__context__ is error.__cause__ is None
    assert doorway.hook.late_calls == [(doorway.module, (1,), {"two": 2}, native.RAISED)]
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-4:] == ["call", "_wrapped_call_impl", "forward", "does"]
    assert doorway.hook.errors == []
    doorway.module.does = lambda: bits(4)
    assert doorway.way() == TORCH


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_the_hooks_are_not_told_of_an_interrupt(error):
    doorway = Doorway().ready()
    doorway.module.does = raising(error)
    with pytest.raises(type(error)) as caught:
        doorway.call()
    assert caught.value is error
    assert doorway.hook.late_calls == doorway.hook.left == []


def test_what_the_hooks_return_is_nothing_to_a_forward_that_raised():
    doorway = Doorway().ready()
    doorway.module.does = raising(ValueError("a value"))
    doorway.hook.says = lambda value: "another"
    with pytest.raises(ValueError, match="a value"):
        doorway.call()


def test_an_interrupt_of_the_hooks_comes_before_what_the_forward_raised():
    doorway = Doorway().ready()
    doorway.module.does = raising(ValueError("a value"))
    doorway.hook.says = lambda value: raising(KeyboardInterrupt())()
    with pytest.raises(KeyboardInterrupt):
        doorway.call()


def test_what_the_gate_counted_is_told_before_the_hooks_see_a_call():
    doorway, counts = Doorway().ready(), []
    doorway.call()
    doorway.call()
    doorway.hook.says = lambda value: counts.append(next(doorway.step.calls["inner"])) or value
    doorway.module.does = lambda: bits(5)
    doorway.call()
    assert counts == [3]


def test_what_keeps_the_records_is_heard_when_it_fails():
    failing = []

    def keep(held):
        if failing:
            raise ZeroDivisionError

    doorway, value = Doorway(keep=keep).ready(), bits(4)
    doorway.module.does = lambda: value
    failing.append(True)

    assert doorway.call() is value
    assert doorway.module.ways == [DOOR]
    assert [type(error) for error in doorway.hook.errors] == [ZeroDivisionError]
    assert doorway.hook.late_calls == []


def test_an_interrupt_while_a_tensor_is_made_to_wait_is_nobodys_to_forget():
    doorway = Doorway().ready()
    doorway.stream = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        doorway.call()
    assert doorway.module.ways == [DOOR]
    assert doorway.hook.errors == doorway.hook.late_calls == []


def test_a_question_that_fails_leaves_the_call_to_the_hooks():
    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = lambda: value
    doorway.stream = raising(RuntimeError("no stream"))
    assert doorway.call() is value
    assert doorway.hook.late_calls == [(doorway.module, (), {}, value)]


def test_a_step_that_ends_while_its_tensor_is_made_to_wait_leaves_the_call_to_the_hooks():
    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = lambda: value
    doorway.stream = lambda: doorway.basket.shut() or 0
    assert doorway.call() is value
    assert doorway.hook.late_calls == [(doorway.module, (), {}, value)]
    assert len(doorway.kept) == 1


# A forward that changes what is around it -----------------------------------------------------------------------------


def remove(doorway):
    doorway.handle.remove()


def hooks_replaced(doorway):
    doorway.module._forward_hooks = OrderedDict({1: lambda module, args, value: None})


def attributes_replaced(doorway):
    doorway.module.__dict__ = {**doorway.module.__dict__, "_forward_hooks": OrderedDict()}


def changing(change):
    """Return a doorway whose next forward changes something of it, and what that forward returns."""

    def does():
        change(doorway)
        return value

    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = does
    return doorway, value


AROUND = [closed, shut, barred, hooked_after, hooked_by_another, remove, hooks_replaced, attributes_replaced]


@pytest.mark.parametrize("change", AROUND, ids=lambda change: change.__name__)
def test_a_forward_that_changes_what_is_around_it_leaves_its_end_to_the_hooks(change):
    doorway, value = changing(change)
    assert doorway.call() is value
    assert doorway.module.ways == [DOOR]
    assert doorway.hook.late_calls == [(doorway.module, (), {}, value)]
    assert len(doorway.kept) == 1


@pytest.mark.parametrize("change", NOT_AFTER, ids=lambda change: change.__name__)
def test_a_hook_of_another_kind_that_a_forward_registers_is_for_the_next_call(change):
    doorway, value = changing(change)
    assert doorway.call() is value
    assert doorway.hook.late_calls == []
    assert doorway.kept[-1].tensor is value
    doorway.module.does = lambda: value
    assert doorway.way() == TORCH


@pytest.mark.parametrize("kind", ["forward_pre", "full_backward", "full_backward_pre"])
def test_so_it_is_for_torch_where_a_module_has_a_hook(kind):
    calls = []

    class Registers(nn.Linear):
        def forward(self, x):
            if x.shape[0] == 1:
                getattr(self, f"register_{kind}_hook")(lambda *told: calls.append(told))
            return super().forward(x)

    module = Registers(2, 2)
    module.register_forward_hook(lambda module, args, value: None)
    for called, size in enumerate((1, 2)):
        module(torch.ones(size, 2, requires_grad=True)).sum().backward()
        assert len(calls) == called


def test_a_hook_that_came_and_went_since_the_last_call_changes_nothing():
    doorway = Doorway().ready()
    doorway.module.register_forward_hook(lambda module, args, value: None).remove()
    doorway.module.register_forward_pre_hook(lambda module, args: None).remove()
    doorway.module.more = "an attribute"
    assert [doorway.way() for _ in range(3)] == [DOOR] * 3
    doorway.module._forward_pre_hooks = OrderedDict({1: lambda module, args: None})
    assert doorway.way() == TORCH
    doorway.module._forward_pre_hooks = OrderedDict()
    assert [doorway.way() for _ in range(2)] == [DOOR] * 2


def test_a_forward_may_take_its_door_away():
    def does():
        del doorway.module.__dict__[PLACE], doorway.door, doorway.gate
        doorway.handle.remove()
        gc.collect()
        return bits(5)

    def ask():
        doorway.module.does = does
        assert len(doorway.call()) == 5
        assert len(doorway.hook.late_calls) == 1

    doorway = Doorway().ready()
    assert_lives_through(ask)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_module_may_lose_all_that_knows_it_while_it_is_called(error):
    def ask():
        doorway = Doorway().ready()
        module = doorway.module
        gone = [weakref.ref(one) for one in (module, doorway.hook)]

        def does():
            doorway.__dict__.clear()
            gc.collect()
            if error is not None:
                raise error
            return bits(5)

        module.does, door = does, doorway.door
        stack = [door, module]
        del module, door
        doorway.local.calls[:] = [("outer", doorway.step, 0, sys._getframe(), None)]
        try:
            stack.pop().__dict__[PLACE]()
        except (ValueError, KeyboardInterrupt):
            assert error is not None
        stack.clear()
        gc.collect()
        assert [one() for one in gone] == [None] * 2

    assert_lives_through(ask)


def test_a_module_may_call_itself():
    def does(depth):
        return doorway.module(depth - 1) if depth else bits(4)

    doorway = Doorway().ready()
    doorway.module.does = does
    assert doorway.call(5).tolist() == [0, 1, 2, 3]
    assert doorway.module.ways == [DOOR] * 6
    assert len(doorway.hook.late_calls) == 5  # all but the outermost: those are made by each other
    assert len(doorway.kept) == 2


@pytest.mark.filterwarnings("ignore:module forward hook with")  # torch's, where the stack ends in a hook
def test_a_module_that_calls_itself_for_ever_is_told_so():
    def ask():
        doorway = Doorway().ready()
        doorway.module.does = lambda: doorway.module()
        for _ in range(3):
            with pytest.raises(RecursionError):
                doorway.call()
        doorway.module.does = lambda: bits(4)
        assert len(doorway.call()) == 4

    assert_lives_through(ask)


def test_a_forward_may_begin_another_step():
    def does():
        doorway.begin(2)
        return value

    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = does
    assert doorway.call() is value
    assert doorway.hook.late_calls == [(doorway.module, (), {}, value)]


# Other modules --------------------------------------------------------------------------------------------------------


def replica_of(module):
    """Copy a module as `DataParallel` does."""
    replica = module.__new__(type(module))
    replica.__dict__ = module.__dict__.copy()
    replica.ways, replica.does = [], lambda *args, **kwargs: "the replica's"
    return replica


def test_a_replica_with_the_same_door_is_called_as_itself():
    doorway = Doorway().ready()
    replica = replica_of(doorway.module)
    assert replica.__dict__[PLACE] is doorway.door

    assert doorway.call(1, module=replica, two=2) == "the replica's"
    assert replica.ways == [TORCH]
    assert doorway.module.ways == []
    assert doorway.hook.left == [(replica, (1,), {"two": 2}, "the replica's")]


def test_a_replica_is_called_as_itself_when_all_else_is_gone():
    doorway = Doorway().ready()
    replica = replica_of(doorway.module)
    doorway.gate.close()
    del doorway
    gc.collect()
    assert replica() == "the replica's"


def test_a_module_in_the_forward_of_another_is_called_as_itself():
    outer, inner = Doorway().ready(), Doorway().ready()
    inner.module.does = lambda: "the inner one's"
    outer.module.does = lambda: inner.module()
    assert outer.call() == "the inner one's"
    assert (outer.module.ways, inner.module.ways) == ([DOOR], [DOOR])
    assert inner.hook.late_calls == [(inner.module, (), {}, "the inner one's")]


def test_a_door_that_is_called_by_hand_calls_its_module():
    doorway, value = Doorway().ready(), bits(4)
    doorway.module.does = lambda *args, **kwargs: value

    assert doorway.door(1, two=2) is value
    assert doorway.module.ways == ["test_a_door_that_is_called_by_hand_calls_its_module"]
    assert doorway.hook.late_calls == [(doorway.module, (1,), {"two": 2}, value)]
    assert doorway.door(1, two=2) is value
    assert doorway.module.ways[1:] == [TORCH]


def test_a_door_that_is_called_by_hand_keeps_the_module_it_was_made_for():
    doorway = Doorway()
    doorway.module.does = lambda: "still there"
    door, module = doorway.door, weakref.ref(doorway.module)
    doorway.handle.remove()
    doorway.__dict__.clear()
    gc.collect()
    assert door() == "still there"
    del door
    gc.collect()
    assert module() is None


def test_a_door_may_be_called_where_no_python_runs():
    doorway, over = Doorway().ready(), threading.Event()
    doorway.module.does = lambda: over.set() or bits(4)
    _thread.start_new_thread(doorway.door, ())
    assert over.wait(60)
    assert doorway.module.ways == [TORCH]


def test_a_door_that_is_called_while_it_is_collected_says_that_its_module_is_gone():
    def ask():
        gc.collect()
        gc.disable()
        doorway, said = Doorway(), []
        replica = replica_of(doorway.module)
        name = np.zeros(1)  # which the collector does not know: it is gone when its gate is cleared, after the module

        def ring(gone):
            door = replica.__dict__[PLACE] = ctypes.cast(address, ctypes.py_object).value
            said.extend((door.gate.hook, said_by(door), replica()))
            del replica.__dict__[PLACE]

        gate = gates.Gate(doorway.basket, "end", doorway.hook, doorway.module, name, doorway.local)
        doors = [gate.door()]  # cleared after the gate, and made after it
        doors.append(doors)
        address, bell = id(doors[0]), weakref.ref(name, ring)
        del gate, doors, name
        gc.collect()
        assert bell() is None
        assert said == [None, "ReferenceError('its module is gone')", "the replica's"]

    assert_lives_through(ask)


# What a door is -------------------------------------------------------------------------------------------------------


def test_a_door_is_false_and_knows_its_gate():
    doorway = Doorway()
    assert bool(doorway.door) is False
    assert doorway.door.gate is doorway.gate
    with pytest.raises(AttributeError, match="readonly"):
        doorway.door.gate = None


def test_a_door_is_none_in_copies_and_pickles():
    door = Doorway().door
    assert copy.deepcopy(door) is None
    assert copy.copy(door) is None
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(door, protocol)) is None
        assert pickle.loads(pickle.dumps({"a": [door, door]}, protocol)) == {"a": [None, None]}


def test_a_module_is_copied_and_pickled_without_its_door():
    doorway = Doorway().ready()
    doorway.handle.remove()
    del doorway.module.does
    for made in (
        copy.deepcopy(doorway.module),
        copy.copy(doorway.module),
        pickle.loads(pickle.dumps(doorway.module)),
    ):
        assert made.__dict__.get(PLACE) is None
        made.does = bits
        assert made(2).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["begin", "finish"])
def test_only_a_gate_that_sees_calls_end_by_itself_has_a_door(kind):
    with pytest.raises(ValueError, match=f"only a gate that sees calls end by itself has a door, not {kind}"):
        Doorway().made(kind).door()


def test_a_gate_may_have_several_doors():
    doorway = Doorway().ready()
    other = doorway.module.__dict__[PLACE] = doorway.gate.door()
    assert other is not doorway.door
    assert doorway.way() == DOOR


def test_a_door_is_not_made_in_python():
    kind = type(Doorway().door)
    with pytest.raises(TypeError, match="cannot create"):
        kind()
    with pytest.raises(TypeError):
        object.__new__(kind)
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Other", (kind,), {})


# What is left behind --------------------------------------------------------------------------------------------------


KINDS = {
    "passing": None,
    "not passing": None,
    "closed": None,
    "raising": ValueError("a value"),
    "interrupted": KeyboardInterrupt(),
    "the hooks raising": None,
    "the hooks raising after the forward": ValueError("a value"),
    "failing": None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_held_after_a_thousand_calls(kind):
    failing = []

    def keep(held):
        if failing:
            raise ZeroDivisionError

    doorway, value, usual, given, mask = Doorway(keep=keep), bits(4), bits(4), object(), object()
    error, other = KINDS[kind], bits(5)

    def does(*args, **kwargs):
        if error is not None:
            raise error
        return other if kind in ("not passing", "the hooks raising") else value

    def says(told):
        if kind.startswith("the hooks raising"):
            raise error or LookupError("the hooks'")
        return told

    heard = object()
    doorway.hook.says, doorway.hook.failed = says, lambda error: heard
    if kind == "closed":
        doorway.gate.close()
    args, kwargs = (given,), {"mask": mask}
    watched = {
        "args": args,
        "kwargs": kwargs,
        "given": given,
        "mask": mask,
        "value": value,
        "other": other,
        "module": doorway.module,
        "gate": doorway.gate,
        "door": doorway.door,
        "hook": doorway.hook,
        "heard": heard,
        "raised": native.RAISED,
        "forward": Layer.forward,
        "place": doorway.module.__dict__,
    }

    def ask(rounds):
        for number in range(rounds):
            doorway.begin(1 + number % 90)
            doorway.module.does = lambda *args, **kwargs: usual
            doorway.call()
            doorway.module.does = does
            if kind == "failing":
                failing.append(True)
            for call in (doorway.call, doorway.door, lambda *args, **kwargs: doorway.door(*args)):
                try:
                    call(*args, **kwargs)
                except (Exception, KeyboardInterrupt) as raised:
                    assert error is not None or kind.startswith("the hooks")
                    raised.__traceback__ = raised.__context__ = None
            assert doorway.module.ways[1] == (TORCH if kind == "closed" else DOOR)
            failing.clear()
            doorway.sweep()
            for left in (doorway.hook.left, doorway.hook.late_calls, doorway.hook.errors, doorway.module.ways):
                left.clear()
        del doorway.module.does
        doorway.local.calls.clear()
        gc.collect()
        return {name: sys.getrefcount(one) for name, one in watched.items()}, sys.getallocatedblocks()

    before, blocks = ask(10)
    after, now = ask(MANY)
    assert after == before
    assert now - blocks < 100


def test_everything_is_gone_with_the_last_that_knows_it():
    doorway = Doorway().ready()
    doorway.call()
    gone = [weakref.ref(one) for one in (doorway, doorway.module, doorway.hook, doorway.step)]
    del doorway
    gc.collect()
    assert [one() for one in gone] == [None] * 4
