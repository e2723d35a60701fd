"""Nothing of ours raises into a forward or a backward: each function that a callback reaches raises once.

`CALLBACKS` is the list of what torch calls of ours, and so of what must catch everything; that it is whole is tested.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.runtimes import forwards, torchscript
from layerscope.runtimes.eager import gradient_hooks as gradients
from layerscope.runtimes.eager import hooks
from layerscope.runtimes.eager import operations as ops
from layerscope.runtimes.eager import shared_arguments as shares

# Nothing but what catches everything: to raise in its place is no fault of ours.
GUARDS = [
    *(hooks.Hook.failed, gradients.Gradient.failed, ops.OpWatch._begun, ops.OpWatch._tell, ops.OpWatch._failed),
    *(forwards.Forwards._begin, forwards.Forwards._end, forwards.Forwards._failed),
    *(forwards.Forwards.tell, forwards.Forwards.probed, gradients.Inflow.arrive),
]
OURS = str(Path(ls.__file__).parent)

CALLBACKS = {
    hooks.Before.__call__: "a forward pre-hook",
    hooks.After.__call__: "a forward hook",
    gradients.Gradient.__call__: "a hook on a tensor",
    gradients.Inflow.expect: "makes the hook on a node of the graph",
    gradients.Inflow.done: "a callback at the end of the backward pass",
    shares.Aside.arrive: "a hook on an output",
    shares.Aside.done: "a callback at the end of the backward pass",
    ops.OpWatch.__torch_dispatch__: "a dispatch mode",
    forwards.tell: "an operation in a compiled graph",
    forwards.Redirected.__call__: "a method of a TorchScript module",
    forwards.Forwards.run: "the call of a model that is not watched through hooks",
    torchscript._recorded: "makes the method",
}


def eager():
    torch.manual_seed(0)
    attn = zoo.Holder(lambda m, a, b, c: m.q(a) * m.k(b) + c, q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    model = zoo.Holder(lambda m, x: m.inner(m.attn(x, x, x) + x) * x, attn=attn, inner=inner)
    every = ls.Tap(["**:*", ".:*", "op:aten.mul", "!inner.{0,1}:output"])
    return model, [every, ls.Tap("inner.0", keep=fails), ls.Tap("inner.1", keep=lambda tensor: tensor[:1])]


def fails(tensor):
    raise ValueError("somebody's function")


def scripted():
    torch.manual_seed(0)
    model = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(2, 4))
    return model, ["**", ".:input", "op:aten.relu"]


MODELS = {"eager": eager, "scripted": scripted}


def steps(model, x, grad):
    """What the user runs: everything of it that a recording could change."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_(grad)
    model.zero_grad()
    found = []
    for _ in range(2):
        out = model(x)
        out.square().mean().backward()
        found += [out.detach().clone(), x.grad.clone()] if grad else [out.detach().clone()]
    return [*found, torch.get_rng_state(), *(p.grad.clone() for p in model.parameters())]


class Failing:
    """While the user's model runs, one function of ours raises the first time it is called."""

    def __init__(self, code=None):
        self.code, self.raised, self.reached, self.entered = code, False, {}, set()

    def __enter__(self):
        sys.setprofile(self._called)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _called(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        self.reached[code] = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename == contextlib.__file__:
            caller = caller.f_back
        if caller is None or not caller.f_code.co_filename.startswith(OURS):
            self.entered.add(code)
        if code is self.code and not self.raised:
            self.raised = True
            raise RuntimeError("planted")


def recorded(kind, code, to):
    model, taps = MODELS[kind]()
    failing = Failing(code)
    rec = ls.record(model, taps, to=to)
    with rec, failing:
        found = steps(model, torch.linspace(-1, 1, 8).view(2, 4), kind == "eager")
    if kind == "eager":
        assert_no_hooks_left(model)
    return found, failing, rec


def entries():
    """The code of every callback, with that of the functions made inside it."""
    known = [inspect.unwrap(function).__code__ for function in [*CALLBACKS, *GUARDS]]
    return {each for code in known for each in [code, *_inside(code)]}


def _inside(code):
    return [each for each in code.co_consts if hasattr(each, "co_code")]


@pytest.mark.parametrize("where", ["memory", pytest.param("disk", marks=pytest.mark.stress)])
@pytest.mark.parametrize("kind", MODELS)
def test_every_function_that_a_callback_reaches_may_raise(kind, where, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    model, _ = MODELS[kind]()
    plain = steps(model, torch.linspace(-1, 1, 8).view(2, 4), kind == "eager")
    _, whole, rec = recorded(kind, None, None if where == "memory" else tmp_path / "whole")
    assert {m.point for m in rec.missing} <= {"inner.0:output"}
    assert {code for code in whole.entered if not _is_standard(code)} <= entries()
    tried = [code for code in whole.reached if code not in entries() and not _is_standard(code)]
    raised = 0
    for number, code in enumerate(tried):
        try:
            found, failing, _ = recorded(kind, code, None if where == "memory" else tmp_path / f"{number}")
            raised += failing.raised  # what is cached is reached once in a process
            for one, other in zip(plain, found, strict=True):
                assert_same_bits(one, other)
        except Exception as error:
            raise AssertionError(f"{whole.reached[code]} of {code.co_filename} raised: {error!r}") from error
    assert raised > 25


def _is_standard(code):
    return code.co_name.startswith("<")


class Hostile(logging.Handler):
    """A handler of somebody's own that fails; it does not keep its errors to itself, as `emit` should."""

    said = 0

    def handle(self, record):
        self.said += 1
        raise RuntimeError("the handler failed")


@pytest.fixture
def hostile():
    handler, logger = Hostile(), logging.getLogger("layerscope")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def unscheduled(model, x):
    with ls.record(model, "0", when=ls.when(lambda moment: 1 / 0)):
        model(x)


def fails_in_the_hook(model, x):
    with ls.record(model, [ls.Tap("0", keep=fails), "1"]):
        model(x)


def nobody_ran(model, x):
    with ls.record(model, "0"):
        pass


def replaced(model, x):
    with ls.record(model, "0"):
        model(x)
        model[0] = nn.Linear(4, 4)
        model(x)


def alarmed(model, x):
    with ls.watch(model, rules=["nonfinite"]):
        model(x * float("nan"))


def compiled(model, x):
    compiled = torch.compile(model, backend="eager")
    with ls.record(compiled, "0"):
        compiled(x)


@pytest.mark.parametrize("run", [unscheduled, fails_in_the_hook, nobody_ran, replaced, alarmed, compiled])
def test_a_logging_handler_that_raises_never_reaches_the_run(run, hostile):
    with contextlib.suppress(ls.errors.NothingRecorded):  # which is raised on purpose, at the end
        run(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))
    assert hostile.said > 0
