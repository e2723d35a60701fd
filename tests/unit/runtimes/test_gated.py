"""Calls that pass by a gate are recorded as any others: the same records in the same order, and the same account.

A device is played on the host, at the place that torch calls -1: what is taken there are the bytes at an address, at
the moment of taking. Each test records the same run twice, with the gates and plainly, and compares everything.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import os
import pickle
import sys
import threading
import weakref
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope import native
from layerscope.recorder import gathering
from layerscope.recorder.cargo import Arrival, as_tensor
from layerscope.recorder.gathering import Gathering
from layerscope.recorder.recording import Recording
from layerscope.recorder.taking import Taking
from layerscope.stats import summarize
from zoo import Holder

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"no gates: {native.why_not()}")

HERE = -1  # what torch calls the host
EVERY = [".:input", "**:input", "**:output", ".:output"]
STEPS = 4  # the first is the trial, in the second the hooks learn, from the third on calls pass


# A device on the host -----------------------------------------------------------------------------


class Copy(Arrival):
    """The bytes that lay at an address, there at once; called for the values, or for what is counted of them."""

    __slots__ = ("level",)

    def __init__(self, only, dtype, shape, address):
        super().__init__(dtype, shape, None)
        size = shape.numel() * dtype.itemsize
        self.host = as_tensor(np.frombuffer(bytearray(ctypes.string_at(address, size)), np.uint8), dtype, shape)
        self.level = None if only == "tensor" else only

    def __call__(self):
        return self.host if self.level is None else summarize(self.host, level=self.level)

    def same_as(self, other):
        return torch.equal(*(one.host.reshape(-1).view(torch.uint8) for one in (self, other)))

    def part(self, place, dtype, shape):
        return self


def lies_plainly(tensor):
    """What is asked of a tensor before it is taken at once."""
    try:
        return (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.dtype.is_complex or tensor.is_nested or tensor.is_quantized)
            and tensor.data_ptr() % 16 == 0
            and tensor.data_ptr() != 0
            and tensor.numel() > 0
        )
    except RuntimeError:
        return False


def take_all(only, dtype, held):
    for one in held:
        assert one.tensor.numel() == one.items, "memory is read that is not the tensor's"
        one.got = Copy(only, dtype, torch.Size(one.shape), one.address)


def prepare(self, parameters, plan, *, gathers):
    """Stand in for `Taking.prepare`, on the device that is played."""
    self.quick = self._shares = True
    self.gathering = Gathering(
        native.load(), HERE, take_all=take_all, alone=self._alone, keep=self._keep, doubtful=self._doubtful
    )


def at_once(self, taken, only, tensor):
    """Stand in for `Taking._at_once`."""
    if not lies_plainly(tensor):
        return None
    return Copy(only, tensor.dtype, tensor.shape, tensor.data_ptr())


# Twice ------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What one recording left, and what went through its hooks' Python."""

    rows: list = field(default_factory=list)
    values: list = field(default_factory=list)
    account: object = None
    result: object = None
    seen: int = 0
    counts: list = field(default_factory=list)


class Twice:
    """Runs one and the same thing with gates and without."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def record(self, make, run, taps, *, gated, **options):
        made = Record()
        with self.monkeypatch.context() as patched:
            if gated:
                patched.setattr(Taking, "prepare", prepare)
                patched.setattr(Taking, "_at_once", at_once)
            patched.setattr(gathering, "current_stream", lambda place: 0)
            patched.setattr(gathering, "is_capturing", lambda: False)
            patched.setattr(torch.cuda, "current_stream", lambda place: None)
            seen = Recording.seen

            def counted(self, *args, **given):
                made.seen += 1
                return seen(self, *args, **given)

            patched.setattr(Recording, "seen", counted)
            torch.manual_seed(0)
            model = make()
            runs = []
            with ls.record(model, taps, weights=False, **{"keep": "tensor", **options}) as rec:
                made.result = run(model, SimpleNamespace(rec=rec, runs=runs, made=made))
            for one in [*runs, rec.run]:
                for kept in one._kept:
                    made.rows.append((str(kept.point), str(kept.moment), dict(kept.note)))
                    made.values.append(kept.tensor if kept.tensor is not None else kept.summary)
            made.account = rec.completeness
        return made

    def __call__(self, make, run, taps=EVERY, *, passes=True, **options):
        plain = self.record(make, run, taps, gated=False, **options)
        gated = self.record(make, run, taps, gated=True, **options)
        assert gated.rows == plain.rows
        assert in_order(gated.account) == in_order(plain.account)
        for row, mine, other in zip(gated.rows, gated.values, plain.values, strict=True):
            assert_same(mine, other, row)
        assert_same(gated.result, plain.result, "what the model returned")
        if passes:
            assert gated.seen < plain.seen, "no call passed by a gate"
        return gated, plain


def in_order(account):
    """What is missing, whenever that was found out: what waits is looked at when it is taken."""
    return replace(account, missing=sorted(account.missing, key=str), dropped=sorted(account.dropped, key=str))


def assert_same(mine, other, where):
    if callable(mine) and not isinstance(mine, torch.Tensor):
        mine = mine()
    if callable(other) and not isinstance(other, torch.Tensor):
        other = other()
    assert type(mine) is type(other), where
    if isinstance(mine, torch.Tensor):
        assert mine.shape == other.shape, where
        assert mine.dtype == other.dtype, where
        assert_same_bits(mine.resolve_conj(), other.resolve_conj())
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other), where
        for a, b in zip(mine, other, strict=True):
            assert_same(a, b, where)
    elif hasattr(mine, "fingerprint"):
        assert repr(mine) == repr(other), where
    else:
        assert mine == other, where


@pytest.fixture
def assert_alike(monkeypatch):
    return Twice(monkeypatch)


def steps(*args, count=STEPS, **kwargs):
    """Return a run of several forwards, each with inputs of its own."""

    def run(model, here):
        return [model(*(arg + step for arg in args), **kwargs) for step in range(count)]

    return run


def linears(*names):
    return {name: nn.Linear(4, 4) for name in names}


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))

WAYS = pytest.mark.parametrize(
    ("taps", "options"),
    [
        (EVERY, {"keep": "tensor"}),
        (["**:output", ".:output"], {"keep": "tensor"}),
        (EVERY, {"keep": "summary", "statistics": "moments"}),
        ("**:output", {"keep": "summary", "statistics": "full"}),
    ],
    ids=["all", "outputs", "moments", "summaries"],
)


@WAYS
@pytest.mark.parametrize("entry", zoo.ALL, ids=lambda entry: entry.__name__)
def test_every_model_of_the_zoo_is_recorded_alike(assert_alike, entry, taps, options):
    _, inputs = entry()

    def run(model, here):
        return [model(*inputs) for _ in range(6)]

    if entry is zoo.no_tensors:
        taps = [*taps, ".:output"] if isinstance(taps, list) else [taps, ".:output"]
    assert_alike(lambda: entry()[0], run, taps, passes=entry is not zoo.no_tensors, **options)


# Values -----------------------------------------------------------------------------------------


def telling(values):
    """A model whose part gives the next of some values each time, and hands on what it is given."""

    def forward(m, x):
        m.count += 1
        given = values(m.count - 1, x)
        m.hears(given, **(given if type(given) is dict and all(type(key) is str for key in given) else {}))
        m.tells(x, given)
        return m.last(x)

    def make():
        model = Holder(
            forward,
            hears=Holder(lambda m, *a, **k: a[0]),
            tells=Holder(lambda m, x, given: given),
            last=nn.Linear(4, 4),
        )
        model.count = 0
        return model

    return make


class Own(torch.Tensor):
    """A subclass that does nothing of its own."""


class Cache:
    """What is not looked into."""

    def __init__(self, x):
        self.x = x


def cycled(*makers, each=3):
    """Give values of one kind for some steps, then of the next, and all of them again."""
    return lambda number, x: makers[number // each % len(makers)](x)


CHANGING = {
    "longer tuple": cycled(lambda x: (x + 1, x + 2), lambda x: (x + 1, x + 2, x + 3)),
    "empty tuple": cycled(lambda x: (x + 1,), lambda x: ()),
    "list for tuple": cycled(lambda x: (x + 1, x + 2), lambda x: [x + 1, x + 2]),
    "other keys": cycled(lambda x: {"a": x + 1, "b": x + 2}, lambda x: {"a": x + 1, "c": x + 2}),
    "other order": cycled(lambda x: {"a": x + 1, "b": x + 2}, lambda x: {"b": x + 2, "a": x + 1}),
    "keys that are numbers": cycled(lambda x: {"1": x + 1}, lambda x: {1: x + 1}),
    "key spelled anew": cycled(lambda x: {"".join(["ke", "y"]): x + 1}, lambda x: {"key": x + 2}),
    "none": cycled(lambda x: x + 1, lambda x: None),
    "none inside": cycled(lambda x: (x + 1, None), lambda x: (x + 1, x + 2), lambda x: (None, x + 1)),
    "dtype": cycled(lambda x: x + 1, lambda x: (x + 1).double(), lambda x: (x * 9).long()),
    "complex": cycled(lambda x: x + 1, lambda x: torch.complex(x, x + 1)),
    "conjugate": cycled(lambda x: x + 1, lambda x: torch.complex(x, x + 1).conj()),
    "negative": cycled(lambda x: x + 1, lambda x: torch.complex(x, x + 1).conj().imag),
    "shape": cycled(lambda x: x + 1, lambda x: (x + 1).reshape(-1), lambda x: (x + 1).reshape(1, 2, 4, 1)),
    "size": cycled(lambda x: x + 1, lambda x: torch.cat([x, x]), lambda x: x[0] + 1, lambda x: x.sum()),
    "nothing": cycled(lambda x: x + 1, lambda x: x[:0]),
    "subclass": cycled(lambda x: x + 1, lambda x: (x + 1).as_subclass(Own)),
    "parameter": cycled(lambda x: x + 1, lambda x: nn.Parameter(x + 1)),
    "transposed": cycled(lambda x: x + 1, lambda x: (x + 1).t().contiguous().t()),
    "strided": cycled(lambda x: x + 1, lambda x: torch.cat([x, x], 1)[:, ::2]),
    "expanded": cycled(lambda x: x + 1, lambda x: x[:1].expand(2, 4)),
    "crooked": cycled(lambda x: x + 1, lambda x: torch.cat([x.reshape(-1), x[0]])[1:9]),
    "sparse": cycled(lambda x: x + 1, lambda x: (x + 1).to_sparse()),
    "sparse rows": cycled(lambda x: x + 1, lambda x: (x + 1).to_sparse_csr()),
    "meta": cycled(lambda x: x + 1, lambda x: x.to("meta")),
    "nested": cycled(lambda x: x + 1, lambda x: torch.nested.nested_tensor([x[0], x[1]])),
    "quantized": cycled(lambda x: x + 1, lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "inference": cycled(lambda x: x + 1, lambda x: torch.inference_mode()(lambda: x + 1)()),
    "dataclass": cycled(lambda x: (x + 1,), lambda x: zoo.Parts(x + 1, x + 2)),
    "named tuple": cycled(lambda x: (x + 1, x + 2), lambda x: zoo.Pair(x + 1, x + 2)),
    "cache": cycled(lambda x: (x + 1, Cache(x)), lambda x: (x + 1, Cache(x + 1)), lambda x: (x + 1, 3)),
    "number": cycled(lambda x: x + 1, lambda x: 3, lambda x: 3.0),
    "tensor in place of a text": cycled(lambda x: (x + 1, "a"), lambda x: (x + 1, x + 2)),
    "twice the same": cycled(lambda x: (x, x, {"again": x}), lambda x: (x, x + 1, {"again": x})),
    "many": cycled(lambda x: [x + i for i in range(32)], lambda x: [x + i for i in range(33)]),
    "deep": cycled(lambda x: [[[[[[[[[x + 1]]]]]]]]], lambda x: [[[[[[[x + 1]]]]]]]),
    "keywords": cycled(lambda x: {"mask": x + 2}, lambda x: {"mask": None}, lambda x: {}),
    "base and view": cycled(lambda x: (x, x[0], x.view(-1)), lambda x: (x[0], x, x.view(-1))),
}


@pytest.mark.filterwarnings("ignore")
@WAYS
@pytest.mark.parametrize("values", CHANGING.values(), ids=CHANGING)
def test_a_value_that_is_made_otherwise_from_step_to_step_is_recorded_alike(assert_alike, values, taps, options):
    def run(model, here):
        with torch.no_grad():
            return [model(X + step) for step in range(14)]

    assert_alike(telling(values), run, taps, **options)


@WAYS
def test_more_sizes_of_a_point_than_are_told_apart_are_recorded_alike(assert_alike, taps, options):
    def run(model, here):
        return [model(torch.randn(1 + step % 11, 4)) for step in range(50)]

    assert_alike(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), run, taps, **options)


# Calls ------------------------------------------------------------------------------------------


def deeper(levels, call):
    """Make a call from a stack that is some frames deeper."""
    return call() if not levels else deeper(levels - 1, call)


class Interrupted(BaseException):
    """What hooks that are always called are not told of, as they are not told of a KeyboardInterrupt."""


def breaking(error=Interrupted):
    """A model of two blocks in which an error comes up where its `breaks` says."""

    def inner(m, x):
        x = m.one(x)
        if model.breaks == "inner":
            raise error
        return m.two(x)

    def outer(m, x):
        if m.breaks == "begin":
            raise error
        x = m.first(x)
        if m.breaks == "outer":
            raise error
        return m.second(x)

    blocks = {name: Holder(inner, **linears("one", "two")) for name in ("first", "second")}
    model = Holder(outer, **blocks)
    model.breaks = None
    return model


@WAYS
@pytest.mark.parametrize("where", ["begin", "outer", "inner"])
@pytest.mark.parametrize("part", ["", "first", "first.two", "second"])
def test_what_is_called_as_deep_as_a_call_that_was_broken_off_is_not_inside_it(
    assert_alike, taps, options, where, part
):
    def run(model, here):
        made = [model(X + step) for step in range(STEPS)]
        wrapper = Holder(lambda m, x: m.model(x), model=model.get_submodule(part))
        outer = Holder(lambda m, x: m.model(x), model=wrapper)
        for one in (wrapper, outer):
            one.register_forward_hook(lambda *given: None)  # so that torch makes as many frames as for ours
        for one in (wrapper, outer, wrapper, outer):
            model.breaks = where
            with pytest.raises(Interrupted):
                model(X)
            model.breaks = None
            made += one(X * 3), model(X * 2)
        return made

    assert_alike(breaking, run, taps, **options)


@pytest.mark.parametrize(
    "taps", [EVERY, ["first:output", "second:output", ".:output", "first:input"]], ids=["all", "some"]
)
def test_a_copy_that_is_called_where_its_original_was_broken_off_is_not_recorded(assert_alike, taps):
    def part(m, x):
        if m.breaks:
            raise Interrupted
        return x * 2

    def make():
        first = Holder(part)
        first.breaks = False
        return Holder(lambda m, x: m.second(m.first(x)), first=first, second=nn.Linear(4, 4))

    def run(model, here):
        made = [model(X + step) for step in range(STEPS)]
        model.first.breaks = True
        with pytest.raises(Interrupted):
            model(X)
        model.first.breaks = False
        wrapper = Holder(lambda m, x: m.model(x), model=copy.copy(model.first))
        wrapper.register_forward_hook(lambda *given: None)
        return [*made, wrapper(X * 7), model(X)]

    assert_alike(make, run, taps)


def exchanging(how, when):
    """A model that exchanges the data of what a part has given, in some steps."""

    def forward(m, x):
        y = m.one(x)
        m.count += 1
        if m.count in when:
            y.data = how(y.data)
        return m.two(x)

    def make():
        model = Holder(forward, **linears("one", "two"))
        model.count = 0
        return model

    return make


EXCHANGED = {
    "flat": lambda data: data.view(-1),
    "another shape": lambda data: data.view(4, 2),
    "another dtype": lambda data: data.view(torch.int32),
    "other values": torch.clone,
}


def ten_steps(model, here):
    with torch.no_grad():
        return [model(X + step) for step in range(10)]


@pytest.mark.parametrize("how", EXCHANGED.values(), ids=EXCHANGED)
def test_a_tensor_is_recorded_as_it_was_seen_whatever_becomes_of_its_data(assert_alike, how):
    assert_alike(exchanging(how, range(100)), ten_steps, ["one:output", "two:output"])


@pytest.mark.parametrize("how", EXCHANGED.values(), ids=EXCHANGED)
def test_data_that_is_exchanged_for_the_first_time_is_lost_once_and_that_is_said(assert_alike, how):
    gated = assert_alike.record(exchanging(how, (6,)), ten_steps, ["one:output", "two:output"], gated=True)
    plain = assert_alike.record(exchanging(how, (6,)), ten_steps, ["one:output", "two:output"], gated=False)
    (lost,) = gated.account.dropped
    assert (lost.point, lost.count) == ("one:output", 1)
    kept = [row in gated.rows for row in plain.rows]
    assert kept.count(False) == 1
    values = [value for value, there in zip(plain.values, kept, strict=True) if there]
    for mine, other in zip(gated.values, values, strict=True):
        assert_same(mine, other, "what is left")


@pytest.mark.filterwarnings("ignore:.*functionalize.*")
@WAYS
def test_what_lies_nowhere_does_not_pass_and_is_said_to_be_no_tensor_of_ours(assert_alike, taps, options):
    def run(model, here):
        made = [model(X + step) for step in range(STEPS)]
        made.append(torch.func.functionalize(lambda x: model(x))(X))
        return [*made, model(X)]

    assert_alike(breaking, run, taps, **options)


@pytest.mark.parametrize("keep", ["tensor", "summary"])
@pytest.mark.parametrize(
    ("first", "then"), [(torch.uint8, torch.uint4), (torch.int8, torch.int4), (torch.uint8, torch.bool)], ids=str
)
def test_dtypes_of_one_width_are_told_apart(assert_alike, first, then, keep):
    def values(number, x):
        return (x.abs() * 9).to(torch.uint8).view(first if number < 6 or number % 2 else then)

    def run(model, here):
        with torch.no_grad():
            return [model(X.repeat(4, 1) + step) for step in range(12)]

    assert_alike(telling(values), run, ["**:output"], keep=keep)


@WAYS
@pytest.mark.parametrize("where", ["begin", "outer", "inner"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_forward_that_was_broken_off_leaves_nothing_behind(assert_alike, taps, options, where, error):
    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        for levels in range(14):
            model.breaks = where
            with pytest.raises(error):
                model(X - levels)
            model.breaks = None
            out.append(deeper(levels, lambda levels=levels: model(X * levels)))
        return out

    assert_alike(lambda: breaking(error), run, taps, **options)


# Seldom due -------------------------------------------------------------------------------------


def overwriting(since, error=None):
    """A model whose part fills one and the same buffer in each step, and from some step on once more, uncounted."""

    def part(m, x):
        m.buffer.numpy()[:] = x.numpy() + 1
        return m.buffer

    def forward(m, x):
        y = m.part(x)
        m.count += 1
        if m.count == error:
            raise KeyboardInterrupt
        if m.count > since:
            y.numpy()[:] = -9
        return m.last(y * 1)

    model = Holder(forward, part=Holder(part), last=nn.Identity())
    model.part.buffer, model.count = torch.zeros(2, 4), 0
    return model


def test_a_point_that_is_seldom_due_is_tried_each_time(assert_alike):
    def run(model, here):
        for step in range(480):
            model(X + step)

    gated, plain = assert_twice_apart(assert_alike, lambda: overwriting(120), run, when="every(40)")
    assert [float(value[0, 0]) for value in gated.values] == [float(value[0, 0]) for value in plain.values]


def test_an_interrupt_while_room_is_made_for_what_is_tried_does_not_lose_that(monkeypatch):
    monkeypatch.setattr(gathering, "_MOST", 50)  # bytes: of the two there is room for one
    monkeypatch.setattr(gathering, "current_stream", lambda place: 0)
    monkeypatch.setattr(gathering, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: None)
    monkeypatch.setattr(Taking, "prepare", prepare)
    monkeypatch.setattr(Taking, "_at_once", at_once)
    after = []

    def forward(m, x, late):
        y = m.a(x)
        return after.append(m.b(y)) if late else y

    model = Holder(forward, **linears("a", "b"))

    def interrupted(only, dtype, held):
        raise KeyboardInterrupt

    with ls.record(model, ["a", "b"], weights=False) as rec:
        for _ in range(3):
            model(X, False)
        with monkeypatch.context() as patched:
            patched.setattr(rec._taking.gathering, "_take_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(X, True)
    assert after == []  # it was in the hook of `b`
    kept = [(kept.point.name, kept.moment.step) for kept in rec.run._kept]
    assert kept == [("a", 0), ("a", 1), ("a", 2), ("b", 3)]
    assert len(rec.completeness.dropped) == 1  # `a` of the last step, which waited


def test_what_an_interrupt_left_is_taken_before_a_step_in_which_nothing_is_due(assert_alike):
    def run(model, here):
        for step in range(9):
            with contextlib.suppress(KeyboardInterrupt):
                model(X + step)

    assert_alike(lambda: overwriting(100, error=4), run, "part", when="first(4)", passes=False)


@pytest.mark.parametrize("steps", [34, 60])
def test_a_trial_in_the_last_step_that_is_due_is_judged(assert_alike, steps):
    def run(model, here):
        for step in range(steps):
            model(X + step)

    gated, _ = assert_twice_apart(assert_alike, lambda: overwriting(20), run, when="first(34)")
    [missing] = gated.account.missing
    assert "in a way that torch does not count" in missing.reason


def assert_twice_apart(twice, make, run, **options):
    """Record with gates and plainly, where what is said of it may differ."""
    return tuple(twice.record(make, run, "part", gated=gated, **options) for gated in (True, False))


@WAYS
@pytest.mark.parametrize("part", ["first", "first.two", "second.two"])
@pytest.mark.parametrize("where", ["begin", "outer", "inner"])
def test_a_part_that_is_called_after_a_forward_was_broken_off_is_a_step(assert_alike, taps, options, where, part):
    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        out += [model.get_submodule(part)(X) for _ in range(STEPS)]
        for levels in range(16):
            out.append(model(X + levels))
            model.breaks = where
            with pytest.raises(Interrupted):
                model(X - levels)
            model.breaks = None
            out.append(deeper(levels, lambda levels=levels: model.get_submodule(part)(X * levels)))
        return out

    assert_alike(breaking, run, taps, **options)


def test_the_next_thread_is_not_taken_for_one_that_was_broken_off(assert_alike):
    def run(model, here):
        out = []

        def forwards():
            out.extend(model(X + step) for step in range(STEPS))
            model.breaks = "outer"
            with contextlib.suppress(Interrupted):
                model(X)

        def another():
            model.breaks = None
            out.extend(deeper(levels, lambda: model.first(X)) for levels in range(14))

        for what in (forwards, another):
            thread = threading.Thread(target=what)
            thread.start()
            thread.join()
        return out

    assert_alike(breaking, run)


@WAYS
@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_an_error_that_the_model_catches_costs_nothing_but_that_call(assert_alike, taps, options, error):
    def forward(m, x):
        try:
            y = m.first(x)
        except error:
            y = m.first.one(x)
        return m.second(m.first.two(y))

    def inner(m, x):
        x = m.one(x)
        if model_of[0].breaks:
            raise error
        return m.two(x)

    model_of = []

    def make():
        model = Holder(forward, first=Holder(inner, **linears("one", "two")), second=nn.Linear(4, 4))
        model.breaks = False
        model_of[:] = [model]
        return model

    def run(model, here):
        out = []
        for step in range(12):
            model.breaks = step % 3 == 2
            out.append(model(X + step))
        return out

    assert_alike(make, run, taps, **options)


@WAYS
def test_parts_that_are_called_between_steps_are_steps_of_their_own(assert_alike, taps, options):
    def run(model, here):
        out = []
        for step in range(10):
            out += [model(X + step), model.first(X), model.first.one(X), deeper(step, lambda: model.second.two(X))]
        return out

    assert_alike(breaking, run, taps, **options)


@WAYS
def test_calls_from_a_stack_of_changing_depth_are_recorded_alike(assert_alike, taps, options):
    def forward(m, x):
        m.count += 1
        for name in ("one", "two", "one", "three"):
            part = getattr(m, name)
            x = deeper((m.count * 7 + len(name)) % 9, functools.partial(part, x))
        return deeper(m.count % 4, lambda: m.block(x))

    def make():
        block = Holder(lambda m, x: deeper(3, lambda: m.inner(x)), inner=nn.Linear(4, 4))
        model = Holder(forward, **linears("one", "two", "three"), block=block)
        model.count = 0
        return model

    def run(model, here):
        return [deeper(step % 5, lambda step=step: model(X + step)) for step in range(20)]

    assert_alike(make, run, taps, **options)


@WAYS
def test_a_module_that_calls_itself_from_some_step_on_is_recorded_alike(assert_alike, taps, options):
    def inner(m, x, more):
        x = x + 1
        if more == 1:
            x = m(x, more - 1)
        elif more:
            x = deeper(more, lambda: m(x, more - 1))
        return x * 2

    def forward(m, x):
        m.count += 1
        x = m.part(x, 0)
        return m.part(m.last(x), [0, 0, 0, 0, 1, 2, 0, 3, 2, 1, 0][m.count % 11])

    def make():
        model = Holder(forward, part=Holder(inner), last=nn.Linear(4, 4))
        model.count = 0
        return model

    def run(model, here):
        return [model(X + step) for step in range(30)]

    assert_alike(make, run, taps, **options)


@pytest.mark.parametrize("depth", [31, 33, 40])
@WAYS
def test_calls_that_are_nested_very_deeply_are_recorded_alike(assert_alike, depth, taps, options):
    def make():
        model = nn.Linear(4, 4)
        for _ in range(depth):
            model = Holder(lambda m, x: m.after(m.inner(m.before(x))), inner=model, before=nn.ReLU(), after=nn.Tanh())
        return model

    assert_alike(make, steps(X), taps, **options)


# Changes in place -------------------------------------------------------------------------------


def changing(change, *, between=False):
    """A model that changes a tensor which several points have seen: after the last of them, or between two."""

    def forward(m, x):
        y = m.one(x)
        z = m.two(y)
        m.same(y)
        if between:
            change(m, y)
        m.same(y)
        out = m.three(y) + z
        if not between:
            change(m, y)
        return out

    return lambda: Holder(forward, **linears("one", "two", "three"), same=nn.Identity())


def by_name(how):
    """Ways to change a tensor: torch counts the first two, and nobody notices the others before the next tensor."""
    return {
        "itself": lambda m, y: y.mul_(2),
        "a view": lambda m, y: y[0].mul_(2),
        "its data": lambda m, y: y.data.mul_(2),
        "numpy": lambda m, y: y.numpy().fill(7),
    }[how]


@WAYS
@pytest.mark.parametrize(
    ("how", "between"),
    [("itself", False), ("itself", True), ("a view", False), ("a view", True), ("its data", False), ("numpy", False)],
)
def test_a_tensor_that_is_changed_in_place_is_recorded_as_it_was(assert_alike, taps, options, how, between):
    def run(model, here):
        with torch.no_grad():
            return [model(X + step) for step in range(8)]

    assert_alike(changing(by_name(how), between=between), run, taps, **options)


@pytest.mark.parametrize("shape", [(3,), (2, 8)], ids=["smaller", "larger"])
def test_a_tensor_that_is_given_other_memory_is_not_read_beyond_its_end(assert_alike, shape):
    def change(m, y):
        m.count = getattr(m, "count", 0) + 1
        if m.count == 5:
            y.data = torch.zeros(shape)

    def run(model, here):
        with torch.no_grad():
            return [model(X + step) for step in range(8)]

    plain = assert_alike.record(changing(change), run, EVERY, gated=False)
    gated = assert_alike.record(changing(change), run, EVERY, gated=True)
    seen = {"one:output", "two:input[0]", "same:input[0]", "same:output", "three:input[0]"}
    assert {one.point for one in gated.account.dropped} == seen
    assert {row[0] for row in plain.rows if row not in gated.rows} == seen
    known = {row[:2]: value for row, value in zip(plain.rows, plain.values, strict=True)}
    for row, value in zip(gated.rows, gated.values, strict=True):
        assert_same(value, known[row[:2]], row)


def test_a_first_change_is_said_to_have_cost_a_record(assert_alike):
    def change(m, y):
        m.count = getattr(m, "count", 0) + 1
        if m.count == 5:
            y.mul_(2)

    def run(model, here):
        with torch.no_grad():
            return [model(X + step) for step in range(8)]

    plain = assert_alike.record(changing(change), run, EVERY, gated=False)
    gated = assert_alike.record(changing(change), run, EVERY, gated=True)
    lost = {(one.point, one.first, one.count) for one in gated.account.dropped}
    seen = ("one:output", "two:input[0]", "same:input[0]", "same:output", "three:input[0]")
    assert {point for point, _, _ in lost} == set(seen)
    assert {(point, when) for point, when, _ in plain.rows} - {(point, when) for point, when, _ in gated.rows} == {
        (point, when) for point in seen for when in ("step=4", "step=4 call=1") if (point, when, {}) in plain.rows
    }


# Recordings -------------------------------------------------------------------------------------


@WAYS
def test_two_recordings_of_one_model_do_not_disturb_each_other(assert_alike, taps, options):
    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        with ls.record(model, EVERY, weights=False, keep="tensor") as second:
            out += [model(X - step) for step in range(STEPS)]
        out += [model(X * step) for step in range(STEPS)]
        out += [(str(kept.point), str(kept.moment), kept.tensor) for kept in second.run._kept]
        return out

    assert_alike(breaking, run, taps, **options)


def test_the_inner_of_two_recordings_goes_on_when_the_outer_has_ended(assert_alike):
    def run(model, here):
        first, second = (ls.record(model, EVERY, weights=False, keep="tensor") for _ in range(2))
        out = []
        first.__enter__()
        out += [model(X + step) for step in range(STEPS)]
        second.__enter__()
        out += [model(X - step) for step in range(STEPS)]
        first.__exit__(None, None, None)
        out += [model(X * step) for step in range(STEPS)]
        second.__exit__(None, None, None)
        for rec in (first, second):
            out += [(str(kept.point), str(kept.moment), kept.tensor) for kept in rec.run._kept]
        return out

    assert_alike(breaking, run)


def test_a_recording_inside_the_forward_of_another_sees_its_own(assert_alike):
    def forward(m, x):
        x = m.one(x)
        with ls.record(m.block, EVERY, weights=False, keep="tensor") as rec:
            for _ in range(STEPS):
                x = m.block(x)
        m.inner.append([(str(kept.point), str(kept.moment), kept.tensor) for kept in rec.run._kept])
        return m.two(x)

    def make():
        block = Holder(lambda m, x: m.four(m.three(x)), **linears("three", "four"))
        model = Holder(forward, **linears("one", "two"), block=block)
        model.inner = []
        return model

    def run(model, here):
        return [model(X + step) for step in range(STEPS)], model.inner

    assert_alike(make, run)


@WAYS
def test_a_note_in_the_middle_of_a_step_or_between_two_is_kept_with_its_records(assert_alike, taps, options):
    def forward(m, x):
        m.count += 1
        x = m.first(x)
        if m.count % 3 == 0:
            m.rec.moment(note={"from": m.count})
        elif m.count % 4 == 0:
            m.rec.moment()
        return m.second(x)

    def make():
        model = Holder(forward, first=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), second=nn.Linear(4, 4))
        model.count = 0
        return model

    def run(model, here):
        object.__setattr__(model, "rec", here.rec)
        out = []
        for step in range(30):
            if step % 7 == 6:
                here.rec.moment(step=100 + step, note={"between": step})
            if step % 7 == 2:
                here.rec.moment(epoch=step)
            if step % 11 == 10:
                here.rec.moment(batch=step)
            out.append(model(X + step))
        return out

    assert_alike(make, run, taps, **options)


def test_several_forwards_of_one_named_step_are_numbered_on(assert_alike):
    def run(model, here):
        out = []
        for step in range(6):
            here.rec.moment(step=step)
            out += [model(X + step), model(X - step), model.first(X)]
        return out

    assert_alike(breaking, run)


@pytest.mark.parametrize("when", ["every(2)", "every(3) | first(5)", "steps(0, 1, 2, 3, 4, 9, 10, 11)"])
@WAYS
def test_schedules_are_kept(assert_alike, when, taps, options):
    assert_alike(breaking, steps(X, count=16), taps, when=when, **options)


def test_taps_of_several_schedules_and_wishes_are_kept_from_step_to_step(assert_alike):
    taps = [
        ls.Tap("first.*:output", when="every(2)"),
        ls.Tap(["first.one:input", "second:output"], keep="summary", when="every(3)"),
        ls.Tap(
            ["first.one:output", "second.two:input"], keep="summary", statistics="moments", when="every(5) | first(4)"
        ),
        ls.Tap("second.one:output", keep=lambda tensor: tensor.sum()),
        ls.Tap(".:output", keep="both", when="every(7)"),
    ]
    assert_alike(breaking, steps(X, count=60), taps)


@WAYS
@pytest.mark.parametrize("leave", [0, 1, 2])
def test_what_is_taken_after_each_step_is_the_same(assert_alike, leave, taps, options):
    def run(model, here):
        out = []
        for step in range(9):
            out.append(model(X + step))
            here.runs.append(here.rec.take(leave=leave))
            out.append(len(here.runs[-1]._kept))
        return out

    assert_alike(breaking, run, taps, **options)


@WAYS
def test_what_is_taken_in_the_middle_of_a_step_is_the_same(assert_alike, taps, options):
    def forward(m, x):
        x = m.first(x)
        m.here.runs.append(m.here.rec.take())
        return m.second(m.second(x))

    def make():
        return Holder(forward, first=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), second=nn.Identity())

    def run(model, here):
        object.__setattr__(model, "here", here)
        return [model(X + step) for step in range(8)], [len(one._kept) for one in here.runs]

    assert_alike(make, run, taps, **options)


def test_forwards_of_several_threads_are_recorded_alike(assert_alike):
    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        turns = [threading.Event() for _ in range(13)]
        turns[0].set()

        def forwards(first):
            for turn in range(first, 12, 3):
                turns[turn].wait(30)
                out.append(model(X * turn))
                turns[turn + 1].set()

        threads = [threading.Thread(target=forwards, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        out += [model(X + step) for step in range(STEPS)]
        return out

    assert_alike(breaking, run)


def test_a_forward_on_another_thread_in_the_middle_of_one_is_recorded_alike(assert_alike):
    def forward(m, x):
        x = m.first(x)
        thread = threading.Thread(target=lambda: m.out.append(m.third(x)))
        thread.start()
        thread.join()
        return m.second(x)

    def make():
        model = Holder(forward, **linears("first", "second", "third"))
        model.out = []
        return model

    assert_alike(make, lambda model, here: ([model(X + step) for step in range(8)], model.out))


def test_forwards_of_many_threads_at_once_lose_nothing(assert_alike):
    def run(model, here):
        def forwards():
            for step in range(30):
                model(X + step)

        threads = [threading.Thread(target=forwards) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    plain = assert_alike.record(breaking, run, EVERY, gated=False)
    gated = assert_alike.record(breaking, run, EVERY, gated=True)
    assert sorted(row[:2] for row in gated.rows) == sorted(row[:2] for row in plain.rows)
    assert gated.account == plain.account
    steps_of = [{}, {}]
    for one, found in zip((plain, gated), steps_of, strict=True):
        for row, value in zip(one.rows, one.values, strict=True):
            found.setdefault(row[1], []).append((row[0], value.detach().numpy().tobytes()))
    assert sorted(map(sorted, steps_of[0].values())) == sorted(map(sorted, steps_of[1].values()))


# torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.device("cpu"),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch._C.DisableTorchFunction(),
        lambda: FlopCounterMode(display=False),
    ],
    ids=["device", "inference", "no grad", "autocast", "no functions", "flops"],
)
@WAYS
def test_modes_of_torch_are_borne(assert_alike, mode, taps, options):
    def forward(m, x):
        x = m.first(x)
        with mode() if m.count % 4 == 3 else contextlib.nullcontext():
            m.count += 1
            x = m.second(x)
        return m.third(x.clone().float())

    def make():
        model = Holder(forward, **linears("first", "second", "third"))
        model.count = 0
        return model

    def run(model, here):
        model.requires_grad_(False)
        out = []
        for step in range(16):
            with mode() if step % 5 == 4 else contextlib.nullcontext():
                out.append(model(X + step))
        return out

    assert_alike(make, run, taps, **options)


@pytest.mark.filterwarnings("ignore")
@WAYS
@pytest.mark.parametrize("reentrant", [False, True], ids=["plainly", "reentrant"])
@pytest.mark.parametrize("where", ["after", "inside"])
def test_what_activation_checkpointing_repeats_is_not_recorded_again(assert_alike, reentrant, where, taps, options):
    def forward(m, x):
        x = x.detach().requires_grad_()
        y = checkpoint(m.one, x, use_reentrant=reentrant)
        z = checkpoint(m.two, y, use_reentrant=reentrant)
        if where == "inside":
            z.sum().backward()
            return m.last(x.grad)
        return z

    def make():
        block = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))  # noqa: E731
        return Holder(forward, one=block(), two=block(), last=nn.Linear(4, 4))

    def run(model, here):
        out = []
        for step in range(8):
            out.append(model(X + step))
            out[-1].sum().backward()
            out += [parameter.grad.clone() for parameter in model.one.parameters()]
        return out

    assert_alike(make, run, taps, **options)


@WAYS
def test_a_gradient_inside_a_forward_is_none_of_its_calls(assert_alike, taps, options):
    def forward(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.energy(x)
            energy.register_hook(lambda gradient: m.scale(gradient))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return m.last(force)

    def make():
        energy = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        return Holder(forward, energy=energy, scale=nn.Identity(), last=nn.Linear(4, 4))

    assert_alike(make, steps(X, count=8), taps, **options)


@torch.jit.script
def scripted(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad([value], [source])[0]
    assert found is not None
    return found


class Differentiates(nn.Module):
    """Calls its part in the forward and, as far from itself, in a backward pass that begins in there.

    Neither the engine nor a scripted function has a frame of its own.
    """

    def __init__(self, way):
        super().__init__()
        self.part, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        def call(y):
            return self.part(y)

        source = call(x).detach().requires_grad_()
        value = source * 2
        value.register_hook(call)
        total = value.sum()
        if self.way == "by torch":
            [found] = torch.autograd.grad(total, source)
        elif self.way == "by a script":
            found = scripted(total, source)
        else:
            run = torch.autograd.Variable._execution_engine.run_backward
            [found] = run((total,), (torch.ones(()),), False, False, (source,), False, accumulate_grad=False)
        return source.detach() + found.detach()


@WAYS
@pytest.mark.parametrize("way", ["by torch", "by a script", "by the engine"])
def test_a_tensors_hook_that_calls_a_module_in_the_middle_of_a_forward_is_no_forward(assert_alike, way, taps, options):
    def make():
        return Holder(lambda m, x: m.inner(x) * 1, inner=Differentiates(way))

    assert_alike(make, steps(X, count=8), taps, **options)


@WAYS
def test_a_call_of_a_backward_pass_that_is_as_deep_as_one_of_the_forward_is_told_from_it(assert_alike, taps, options):
    def forward(m, x):
        x = x.detach().requires_grad_()
        y = m.energy(x)
        y.register_hook(lambda gradient: m.scale(gradient))
        for levels in range(8):
            x = deeper(levels, lambda x=x: m.scale(x))
            y.sum().backward(retain_graph=True)
        return m.last(x)

    def make():
        return Holder(forward, energy=nn.Linear(4, 4), scale=nn.Identity(), last=nn.Linear(4, 4))

    assert_alike(make, steps(X, count=8), taps, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("full", [True, False], ids=["full graph", "graphs"])
@pytest.mark.parametrize("what", ["part", "model", "part of a forward"])
def test_compiling_while_recording_breaks_nothing(assert_alike, what, full):
    def forward(m, x):
        x = m.first(x)
        call = m.compiled[0] if m.compiled else m.second
        return m.third(call(x))

    def make():
        second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        model = Holder(forward, first=nn.Linear(4, 4), second=second, third=nn.Linear(4, 4))
        model.compiled = []
        return model

    def run(model, here):
        torch._dynamo.reset()
        out = [model(X + step) for step in range(STEPS)]
        compiled = torch.compile(model if what == "model" else model.second, backend="eager", fullgraph=full)
        if what == "part of a forward":
            model.compiled.append(compiled)
            out += [model(X - step) for step in range(STEPS)]
            model.compiled.clear()
        else:
            out += [compiled(X - step) for step in range(STEPS)]
        out += [model(X * step) for step in range(STEPS)]
        torch._dynamo.reset()
        return out

    assert_alike(make, run)


@pytest.mark.filterwarnings("ignore")
def test_tracing_and_transforms_in_between_are_borne(assert_alike):
    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        torch.jit.trace(model, X)
        out += [model(X + step) for step in range(STEPS)]
        torch.export.export(model, (X,))
        out += [model(X + step) for step in range(STEPS)]
        return out

    assert_alike(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))), run)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda model: torch.func.vmap(lambda x: model(x))(torch.stack([X, X + 1])),
        lambda model: torch.func.grad(lambda x: model(x).sum())(X),
        lambda model: torch.func.jvp(lambda x: model(x), (X,), (X,))[0],
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_transforms_of_functions_are_borne(assert_alike, transformed):
    def run(model, here):
        out = []
        for step in range(3):
            out += [model(X + step) for step in range(STEPS)]
            out.append(transformed(model))
        return out

    assert_alike(breaking, run)


# Python -----------------------------------------------------------------------------------------


@WAYS
def test_hooks_of_others_are_called_as_ever(assert_alike, taps, options):
    def run(model, here):
        told, out = [], []

        def hook(module, args, value):
            told.append(len(told))
            return value * 2 if len(told) % 5 == 0 else None

        def before(module, args):
            return (args[0] + 1,) if len(told) % 3 == 0 else None

        handles = []
        for step in range(16):
            if step == 4:
                handles += [part.register_forward_hook(hook) for part in (model.first, model.second.one)]
                handles.append(model.second.register_forward_pre_hook(before))
            if step == 8:
                handles.append(model.first.one.register_forward_hook(hook, prepend=True))
                handles.append(model.first.two.register_forward_pre_hook(before, prepend=True))
            if step == 13:
                for handle in handles:
                    handle.remove()
            out.append(model(X + step))
        return out, told

    assert_alike(breaking, run, taps, **options)


@WAYS
def test_copies_and_pickles_of_the_model_are_not_recorded(assert_alike, taps, options):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4))

    def run(model, here):
        out = []
        for step in range(10):
            out.append(model(X + step))
            out += [other(X) for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model))]
        return out

    assert_alike(make, run, taps, **options)


@WAYS
def test_a_shallow_copy_that_is_called_inside_the_original_is_not_taken_for_it(assert_alike, taps, options):
    def inner(m, x):
        y = m.part(x)
        if m.other:
            y = m.other[0](y)
        return m.part(y)

    def make():
        block = Holder(inner, part=nn.Linear(4, 4))
        block.other = []
        return Holder(lambda m, x: m.last(m.block(x)), block=block, last=nn.Linear(4, 4))

    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        other = copy.copy(model.block)
        other.other = []
        model.block.other = [other]
        out += [model(X + step) for step in range(STEPS)]
        return out

    assert_alike(make, run, taps, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_records_nothing_and_its_parent_goes_on(assert_alike):
    def forward(m, x):
        x = m.first(x)
        if m.forks:
            m.forks.pop()
            child = os.fork()
            if not child:
                m.child = True
            else:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return m.second(x)

    def make():
        model = Holder(forward, **linears("first", "second"))
        model.forks, model.child = [], False
        return model

    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        model.forks.append(1)
        before = len(here.rec._pending)
        out.append(model(X))
        if model.child:
            with torch.no_grad():
                model(X)
            os._exit(0 if len(here.rec._pending) <= before + 3 else 1)
        out += [model(X + step) for step in range(STEPS)]
        return out

    assert_alike(make, run)


@WAYS
def test_collecting_garbage_all_the_time_changes_nothing(assert_alike, taps, options):
    def run(model, here):
        was = gc.get_threshold()
        gc.set_threshold(1)
        try:
            return [model(X + step) for step in range(8)]
        finally:
            gc.set_threshold(*was)

    assert_alike(breaking, run, taps, **options)


def test_a_recording_is_let_go_when_it_has_ended(assert_alike):

    kept = []

    def run(model, here):
        kept.append(weakref.ref(here.rec))
        return [model(X + step) for step in range(8)]

    assert_alike(breaking, run)
    gc.collect()
    assert [one() for one in kept] == [None, None]


# What waits -------------------------------------------------------------------------------------


def test_a_point_that_must_not_wait_does_not_wait_for_another_that_saw_the_same_tensor(assert_alike):
    def forward(m, x):
        m.count += 1
        a, b = x + 1, x + 2
        if m.count == 6:
            a = b
        m.keeps(a)
        m.changes(b)
        b.mul_(2)
        return m.last(x)

    def make():
        model = Holder(forward, keeps=nn.Identity(), changes=nn.Identity(), last=nn.Linear(4, 4))
        model.count = 0
        return model

    def run(model, here):
        with torch.no_grad():
            return [model(X + step) for step in range(9)]

    assert_alike(make, run, ["**:input", ".:output"], keep="summary", statistics="moments")


@pytest.mark.parametrize("levels", range(10))
def test_a_module_that_calls_itself_as_deep_as_it_was_called_before_is_recorded_alike(assert_alike, levels):
    def inner(m, x, more):
        return m(x + 1, more - 1) * 2 if more else x * 3

    def forward(m, x):
        m.count += 1
        kind = "wwwwdwdrrwdwwdrwdr"[m.count % 18]
        if kind == "w":
            return deeper(levels, lambda: m.part(x, 0))
        return m.part(x, int(kind == "r"))

    def make():
        model = Holder(forward, part=Holder(inner))
        model.count = -1
        return model

    assert_alike(make, steps(X, count=40), ["**:output", ".:output"], passes=False)


@WAYS
def test_no_tensor_is_held_longer_than_its_step(assert_alike, taps, options):
    def run(model, here):
        alive = []

        def forward():
            x = torch.randn(2, 4)
            handle = model.first.one.register_forward_hook(lambda m, a, out: alive.append(weakref.ref(out)))
            model(x)
            handle.remove()
            alive.append(weakref.ref(x))

        for _ in range(6):
            forward()
            assert [one() for one in alive] == [None] * len(alive)

    assert_alike(breaking, run, taps, **options)


def test_nothing_but_the_outermost_call_goes_through_python_in_the_end(assert_alike):
    def run(model, here):
        counts = []
        for step in range(8):
            before = here.made.seen
            model(X + step)
            counts.append(here.made.seen - before)
        here.made.counts = counts

    plain = assert_alike.record(breaking, run, EVERY, gated=False)
    gated = assert_alike.record(breaking, run, EVERY, gated=True)
    assert plain.counts == [14] * 8
    assert gated.counts == [14, 14, *[2] * 6]


@WAYS
@pytest.mark.parametrize(("most", "largest"), [(0, 1 << 20), (100, 1 << 20), (100, 40), (1 << 20, 1)])
@pytest.mark.parametrize(
    "entry", [zoo.plain, zoo.called_thrice, zoo.tuple_outputs, zoo.in_place], ids=lambda entry: entry.__name__
)
def test_what_is_taken_in_several_goes_is_the_same(assert_alike, monkeypatch, entry, taps, options, most, largest):
    monkeypatch.setattr(gathering, "_MOST", most)
    monkeypatch.setattr(gathering, "_LARGEST", largest)
    inputs = entry()[1]
    assert_alike(
        lambda: entry()[0], lambda model, here: [model(*inputs) for _ in range(5)], taps, passes=False, **options
    )


@WAYS
def test_points_that_are_tried_again_and_again_are_recorded_alike(assert_alike, taps, options):
    assert_alike(breaking, steps(X, count=150), taps, **options)


def test_a_note_that_another_thread_gives_in_the_middle_of_a_step_is_kept(assert_alike):
    def forward(m, x):
        x = m.first(x)
        for rec in m.told:
            thread = threading.Thread(target=rec.moment, kwargs={"note": {"by": "another"}})
            thread.start()
            thread.join()
        return m.second(x)

    def make():
        model = Holder(forward, **linears("first", "second"))
        model.told = []
        return model

    def run(model, here):
        out = [model(X + step) for step in range(STEPS)]
        model.told.append(here.rec)
        out.append(model(X))
        model.told.clear()
        here.rec.moment()
        return out + [model(X + step) for step in range(STEPS)]

    assert_alike(make, run)


# Doors ------------------------------------------------------------------------------------------

OUTPUTS = ["**:output", ".:output"]  # all that is wanted of a part is its end: its calls go through a door
CALL = nn.Module._call_impl  # torch's way around hooks


@contextlib.contextmanager
def calls_by_torch():
    """Count the calls that take torch's way around hooks."""
    called, before = [], sys.getprofile()

    def told(frame, event, arg):
        if event == "call" and frame.f_code is CALL.__code__:
            called.append(frame.f_locals["self"])

    sys.setprofile(told)
    try:
        yield called
    finally:
        sys.setprofile(before)


@pytest.fixture
def assert_alike_behind_doors(assert_alike):
    """Compare a run that begins when calls go through doors, and see that they do."""

    def alike(make, run, taps=OUTPUTS, **options):
        def warmed(model, here):
            made = [model(X + step) for step in range(STEPS)]
            with calls_by_torch() as called:
                made.append(model(X))
            here.made.counts = [len(called)]
            return made, run(model, here)

        gated, plain = assert_alike(make, warmed, taps, **options)
        assert gated.counts < plain.counts, "no call went through a door"
        return gated, plain

    return alike


def acting():
    """A model whose part does what it is told, in the middle of its forward; what it raises is caught, and noted."""

    def part(m, x):
        m.calls += 1
        act = m.acts.pop(m.calls, None)
        made = None if act is None else act(m, x)
        return x * 2 if made is None else made

    def forward(m, x):
        m.part.calls = 0
        for _ in range(3):
            try:
                x = m.part(x)
            except (Exception, Interrupted) as error:
                m.errors.append(repr(error))
        return m.last(m.first(x))

    model = Holder(forward, first=nn.Linear(4, 4), part=Holder(part), last=nn.Linear(4, 4))
    model.part.acts, model.errors = {}, []
    return model


def acts(*all_of_them):
    """Return a run in which the part does each of these in its first, second and third call, and goes on."""

    def run(model, here):
        made = []
        for act in all_of_them:
            for call in (1, 2, 3):
                model.part.acts[call] = functools.partial(act, model)
                made += [model(X + step) for step in range(STEPS)]
        return made, model.errors

    return run


def test_what_is_like_the_last_call_goes_through_doors_and_nothing_is_left_of_them(assert_alike):
    def run(model, here):
        made = []
        for step in range(6):
            with calls_by_torch() as called:
                made.append(model(X + step))
            here.made.counts.append([names[one] for one in called])
        return made

    models = []

    def make():
        model = breaking()
        names.update({module: name for name, module in model.named_modules()})
        models.append(model)
        return model

    names = {}
    gated, plain = assert_alike(make, run, OUTPUTS)
    assert plain.counts == [["", "first", "first.one", "first.two", "second", "second.one", "second.two"]] * 6
    assert gated.counts[3:] == [["", "first", "second"]] * 3
    assert not [name for model in models for m in model.modules() for name in vars(m) if name.endswith("call_impl")]


@pytest.mark.parametrize(
    "error", [ValueError, StopIteration, RecursionError, Interrupted, GeneratorExit, KeyboardInterrupt, SystemExit]
)
def test_what_a_forward_raises_behind_a_door_comes_out_of_it(assert_alike_behind_doors, error):
    def raises(model, m, x):
        raise error("by itself")

    def run(model, here):
        if issubclass(error, (Exception, Interrupted)):
            return acts(raises)(model, here)
        made = []
        for call in (1, 2, 3):
            model.part.acts[call] = functools.partial(raises, model)
            with pytest.raises(error, match="by itself"):
                model(X)
            made += [model(X + step) for step in range(STEPS)]
        return made

    assert_alike_behind_doors(acting, run)


def registrations(told):
    """Every way to have hooks on a module, and on all modules."""

    def tell(*given):
        told.append([type(one).__name__ for one in given])

    every = nn.modules.module
    return {
        "pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
        "hook": lambda m: m.register_forward_hook(lambda m, args, value: value + 1),
        "hook with kwargs": lambda m: m.register_forward_hook(lambda m, a, k, value: value + 1, with_kwargs=True),
        "first hook": lambda m: m.register_forward_hook(lambda m, args, value: value + 1, prepend=True),
        "always": lambda m: m.register_forward_hook(tell, always_call=True),
        "backward": lambda m: m.register_full_backward_hook(tell),
        "before backward": lambda m: m.register_full_backward_pre_hook(tell),
        "every pre": lambda m: every.register_module_forward_pre_hook(tell),
        "every hook": lambda m: every.register_module_forward_hook(tell, always_call=True),
        "every backward": lambda m: every.register_module_full_backward_hook(tell),
        "before every backward": lambda m: every.register_module_full_backward_pre_hook(tell),
    }


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("when", ["between", "in a forward", "in one that raises"])
@pytest.mark.parametrize("kind", registrations([]))
def test_hooks_of_others_that_come_and_go_are_called_as_ever(assert_alike_behind_doors, kind, when):
    def run(model, here):
        told, made, handles = [], [], []

        def register(model, m, x):
            handles.append(registrations(told)[kind](m))
            if when == "in one that raises":
                raise ValueError("after it has registered")

        for call in (1, 2, 3):
            model.part.acts[call] = functools.partial(register, model)
            if when == "between":
                model.part.acts.pop(call)(model.part, X)
            for step in range(STEPS):
                made.append(model((X + step).requires_grad_()))
                made[-1].sum().backward()
            while handles:
                handles.pop().remove()
            made += [model(X + step) for step in range(STEPS)]
        return [one.detach() for one in made], told, model.errors

    assert_alike_behind_doors(acting, run)


@pytest.mark.filterwarnings("ignore:a hook of", "ignore:module forward hook")
@pytest.mark.parametrize("raises", ["the forward", "a hook"])
def test_hooks_that_are_always_called_are_told_what_the_one_before_made(assert_alike_behind_doors, raises):
    def run(model, here):
        told, made, handles = [], [], []

        def always(name, made=None):
            def hook(module, args, value):
                told.append((name, "a tensor" if isinstance(value, torch.Tensor) else value))
                return made

            return hook

        def fails(*given):
            raise ValueError("by a hook")

        def act(m, x):
            hooks = (
                always("first"),
                always("second", "the second's"),
                fails,
                always("third", "the third's"),
                always("last"),
            )
            handles.extend(m.register_forward_hook(hook, always_call=True) for hook in hooks)
            if raises == "the forward":
                raise KeyError("by itself")

        for call in (1, 2, 3):
            model.part.acts[call] = act
            with contextlib.suppress(TypeError):
                model(X)
            while handles:
                handles.pop().remove()
            made += [model(X + step) for step in range(STEPS)]
        return made, told, model.errors

    assert_alike_behind_doors(acting, run)


def test_a_hook_that_raises_before_ours_is_called_takes_no_record_from_us(assert_alike_behind_doors):
    def run(model, here):
        handles, made = [], []

        def refuse(*given):
            raise ValueError("by a hook")

        for call in (1, 2, 3):
            model.part.acts[call] = lambda m, x: handles.append(m.register_forward_hook(refuse, prepend=True))
            made.append(model(X))
            handles.pop().remove()
            made += [model(X + step) for step in range(STEPS)]
        return made, model.errors

    assert_alike_behind_doors(acting, run)


class Thrice(nn.Linear):
    """A layer that has its own way around its forward."""

    def _call_impl(self, *args, **kwargs):
        return super()._call_impl(*args, **kwargs) * 3


def on_a_module(model, patched):
    patched.setattr(model.first, "_call_impl", lambda x: CALL(model.first, x) * 3, raising=False)


def on_its_class(model, patched):
    patched.setattr(model.first, "__class__", Thrice)


def on_every_module(model, patched):
    patched.setattr(nn.Module, "_call_impl", lambda self, *a, **k: CALL(self, *a, **k) * 3)


def the_forward(model, patched):
    patched.setattr(model.first, "forward", lambda x: x * 3)


@pytest.mark.parametrize("change", [on_a_module, on_its_class, on_every_module, the_forward])
def test_what_others_put_in_the_place_of_torchs_own_is_called(assert_alike_behind_doors, monkeypatch, change):
    def run(model, here):
        made = []
        for _ in range(3):
            with monkeypatch.context() as patched:
                change(model, patched)
                made += [model(X + step) for step in range(STEPS)]
                made += [model.first(X) for step in range(STEPS)]
            made += [model(X + step) for step in range(STEPS)]
        return made

    assert_alike_behind_doors(acting, run)


def test_calls_are_numbered_alike_where_somebody_is_around_every_call(assert_alike, monkeypatch):
    def run(model, here):
        return [model(X), model.first(X), model(X), model.first(X), model(X)]

    alone = assert_alike.record(acting, run, OUTPUTS, gated=False)
    monkeypatch.setattr(nn.Module, "_call_impl", lambda self, *args, **kwargs: CALL(self, *args, **kwargs))
    assert assert_alike.record(acting, run, OUTPUTS, gated=False).rows == alone.rows


@pytest.mark.parametrize("more", [(0, 0, 1), (0, 2, 0), (1, 0, 1)], ids=str)
def test_a_module_that_calls_itself_after_calls_that_passed_is_numbered_as_ever(assert_alike, more):
    def part(m, x, more):
        return m(x + 1, more - 1) * 2 if more else x * 3

    def forward(m, x):
        for one in m.more.pop(0):
            x = m.part(x, one)
        return x

    def make():
        model = Holder(forward, part=Holder(part))
        model.more = [*[(0, 0, 0)] * 6, more, *[(0, 0, 0)] * 3]
        return model

    assert_alike(make, steps(X, count=10), OUTPUTS)


@pytest.mark.parametrize("levels", [0, 1, 2, 4, 5, 6, 7, 8])  # at 3, it is one hook that counts otherwise: its README
def test_a_module_that_calls_itself_behind_a_door_is_numbered_as_ever(assert_alike, levels):
    def part(m, x, more):
        return m(x + 1, more - 1) * 2 if more else x * 3

    def forward(m, x):
        kind = m.kinds.pop(0)
        if kind in "ds":  # deeper, and that with itself inside
            return deeper(levels, lambda: m.part(x, 2 * (kind == "s")))
        return m.part(x, int(kind == "r"))  # by itself, and with itself inside

    kinds = "bbbbbbrbbbb", "ddddddrdddd", "ddddddsdddd", "dddddbbbbrbb", "bbbbddddsddrr"

    def make():
        model = Holder(forward, part=Holder(part))
        model.kinds = list(one)
        return model

    for one in kinds:
        assert_alike(make, steps(X, count=len(one)), OUTPUTS)


def test_a_module_that_is_called_inside_itself_by_way_of_others_is_numbered_as_ever(assert_alike):
    def part(m, x, more):
        return m.others[0](x + 1, more - 1) if more else x * 3

    def make():
        block = Holder(lambda m, x, more: m.part(x, more), part=Holder(part))
        block.part.others = [block]
        return Holder(lambda m, x, more=0: m.block(x, more), block=block)

    def run(model, here):  # longer than what may wait is known to
        return [model(X + step, 2 if step > STEPS else 0) for step in range(50)]

    assert_alike(make, run, OUTPUTS)


def test_a_module_that_is_found_to_be_called_inside_itself_keeps_the_number_of_its_outer_call(assert_alike):
    def part(m, x, more):
        return deeper(m.depth, lambda: m.others[0](x + 1, more - 1)) if more else x * 3

    def make():
        block = Holder(lambda m, x, more: deeper(m.part.depth, lambda: m.part(x, more)), part=Holder(part))
        block.part.others, block.part.depth = [block], 0
        return Holder(lambda m, x, more=0: m.block(x, more), block=block)

    def run(model, here):
        made = [model(X)]
        model.block.part.depth = 2
        return [*made, model(X, 1), *(model(X, step % 3) for step in range(STEPS))]

    one_hook, _ = assert_alike(make, run, OUTPUTS, passes=False)
    two_hooks, _ = assert_alike(make, run, EVERY, passes=False)
    assert one_hook.rows == [row for row in two_hooks.rows if ":output" in row[0]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["first", "block", ""])
def test_a_compiler_makes_of_a_model_with_doors_what_it_makes_of_one_without(assert_alike_behind_doors, what):
    def make():
        block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        return Holder(lambda m, x: m.block(m.first(x)), first=nn.Linear(4, 4), block=block)

    def run(model, here):
        torch._dynamo.reset()
        counters.clear()
        part = model.get_submodule(what)
        whole, broken = (torch.compile(part, backend="eager", fullgraph=full) for full in (True, False))
        made = [call(X + step) for step in range(STEPS) for call in (whole, broken, model)]
        made += [dict(counters["stats"]), dict(counters["graph_break"])]
        torch._dynamo.reset()
        return made

    assert_alike_behind_doors(make, run)


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_is_compiled_in_place_has_no_door_any_more(assert_alike_behind_doors):
    def run(model, here):
        torch._dynamo.reset()
        made = []
        for part in (model.first, model.last):
            part.compile(backend="eager")
            made += [model(X + step) for step in range(STEPS)]
            compiled, part._compiled_call_impl = part._compiled_call_impl, None
            made += [model(X + step) for step in range(STEPS)]
            part._compiled_call_impl = compiled
        made += [model(X + step) for step in range(STEPS)]
        torch._dynamo.reset()
        return made

    models = []

    def make():
        models.append(acting())
        return models[-1]

    assert_alike_behind_doors(make, run)
    assert all(part._compiled_call_impl for model in models for part in (model.first, model.last))


def replica(module):
    made = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        if name not in made._parameters:  # a graph's replica has its own
            setattr(made, name, parameter.detach())
    return made


@pytest.mark.parametrize("graph", [False, True], ids=["module", "graph"])
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), replica],
    ids=["copy", "deep copy", "pickle", "replica"],
)
def test_a_copy_is_called_as_itself_and_has_nothing_of_ours(assert_alike_behind_doors, copied, graph):
    def make():
        model = acting()
        if graph:
            model.first = torch.fx.symbolic_trace(model.first)
        return model

    def act(model, m, x):
        other = copied(model.first)
        assert copied is replica or other._compiled_call_impl is None
        other.forward = lambda x, forward=other.forward: forward(x) * 3
        return other(x)

    def run(model, here):
        made = acts(act)(model, here)
        assert model.errors == []
        return made

    assert_alike_behind_doors(make, run)


def test_what_has_taken_over_the_attributes_of_a_recorded_module_holds_nothing_of_ours(assert_alike_behind_doors):
    others = []

    def run(model, here):
        made = [model(X + step) for step in range(STEPS)]
        other = nn.Linear(4, 4)
        other.__dict__ = dict(model.first.__dict__)
        others.append(other)
        return made

    assert_alike_behind_doors(acting, run)
    assert [other(X).shape for other in others] == [X.shape] * len(others)
    doors = [door for other in others if (door := other.__dict__.get("_compiled_call_impl")) is not None]
    assert [door.gate for door in doors] == [None]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on another thread"])
def test_a_recording_may_end_in_the_middle_of_a_forward_behind_a_door(assert_alike_behind_doors, elsewhere):
    def run(model, here):
        made, rows = [], []
        for call in (1, 2, 3):
            recording = ls.record(model, OUTPUTS, weights=False, keep="tensor")

            def act(m, x, recording=recording):
                leaves = threading.Thread(target=recording.__exit__, args=(None, None, None))
                leaves.start() if elsewhere else leaves.run()
                leaves.join() if elsewhere else None

            with recording as rec:
                made += [model(X + step) for step in range(STEPS + 2)]
                model.part.acts[call] = act
                made.append(model(X))
            rows.append([(str(kept.point), str(kept.moment)) for kept in rec.run._kept])
            made += [model(X + step) for step in range(STEPS)]
        return made, rows

    assert_alike_behind_doors(acting, run, ["first:output", ".:output"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "act",
    [
        lambda model, x: torch.jit.trace(model.first, x)(x),
        lambda model, x: torch.fx.symbolic_trace(nn.Sequential(model.first))(x),
        lambda model, x: torch.export.export(model.first, (x,), strict=False).module()(x),
        lambda model, x: torch.func.functional_call(model.first, {"weight": torch.ones(4, 4)}, (x,)),
        lambda model, x: torch.func.vmap(lambda one: model.first(one))(x),
        lambda model, x: checkpoint(model.first, x, use_reentrant=False),
        lambda model, x: torch.compile(model.first, backend="eager", fullgraph=True)(x),
    ],
    ids=["trace", "symbolic trace", "export", "functional call", "vmap", "checkpoint", "compile"],
)
def test_what_is_done_with_another_part_inside_a_forward_behind_a_door_is_borne(assert_alike_behind_doors, act):
    torch._dynamo.reset()
    assert_alike_behind_doors(acting, acts(lambda model, m, x: act(model, x.detach()).detach()))


@pytest.mark.parametrize("watch", [sys.setprofile, sys.settrace], ids=["profile", "trace"])
def test_a_profiler_or_debugger_changes_nothing_behind_doors(assert_alike_behind_doors, watch):
    def run(model, here):
        watch(lambda *given: None)
        try:
            return [model(X + step) for step in range(STEPS)]
        finally:
            watch(None)

    assert_alike_behind_doors(acting, run)


def test_calls_behind_a_door_leave_no_reference_behind(assert_alike):
    value, error = object(), ValueError()

    def part(m, x, way):
        if way == "hooks":
            m.register_forward_hook(lambda *given: None).remove()
        if way == "a hook":
            m.handles.append(m.register_forward_hook(lambda *given: None))
        if way == "raises":
            raise error
        return {"other": value, "more": (x, value), "nothing": None}.get(way, x * 2)

    def forward(m, x, way):
        with contextlib.suppress(ValueError):
            m.part(x, way)
        while m.part.handles:
            m.part.handles.pop().remove()
        return m.part(x, "usual")

    def make():
        model = Holder(forward, part=Holder(part))
        model.part.handles = []
        return model

    def run(model, here):
        def references(times):
            for way in ("usual", "other", "more", "nothing", "raises", "hooks", "a hook"):
                for _ in range(times):
                    model(X, "usual")
                    model(X, way)
            here.rec.take()
            error.__traceback__ = None
            gc.collect()
            gate = next(iter(model.part._forward_hooks.values()))
            there = value, error, model.part, gate, gate.hook, vars(model.part)["_compiled_call_impl"]
            return [sys.getrefcount(one) for one in there]

        references(STEPS)
        assert references(2) == references(50)

    assert_alike.record(make, run, OUTPUTS, gated=True)
