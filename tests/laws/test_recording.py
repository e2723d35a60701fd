"""The law of `record`: whatever a module gives and whatever becomes of it, a record is the value in the hook.

The oracle is a clone that a plain hook took on an equal model.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_same_bits
from hooked import EVERY, Clones, assert_recorded
from zoo import Holder

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR|quantize)")
SINCE, STEPS = 10, 20


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    return torch.device(request.param)


@pytest.fixture(params=["in memory", "on disk"])
def to(request, tmp_path):
    return None if request.param == "in memory" else tmp_path / "run"


KEEPS = pytest.mark.parametrize("keep", ["tensor", "summary", "both"])


def assert_law(make, x, *, device, steps=STEPS, keep="both", to=None):
    """Run one model under plain hooks and an equal one under `record`."""
    clones = Clones(model := make().to(device))
    with torch.no_grad():
        plain = [clones.call(model, x.to(device) + step) for step in range(steps)]
    model = make().to(device)
    with torch.no_grad(), ls.record(model, EVERY, to=to, keep=keep, options=ls.RecordOptions(weights=False)) as rec:
        watched = [model(x.to(device) + step) for step in range(steps)]
    assert_same_bits(torch.stack(watched), torch.stack(plain))
    assert_recorded(rec.run, clones, keep=keep, account=rec.completeness)
    return clones


# Kinds of values --------------------------------------------------------------------------------


class Own(torch.Tensor):
    """A subclass that does nothing of its own."""


class Cache:
    """What is not looked into."""

    def __init__(self, x):
        self.x = x


KINDS = {  # a part gives the first of a kind for three steps, then the next, and all of them again
    "longer tuple": (lambda x: (x + 1, x + 2), lambda x: (x + 1, x + 2, x + 3)),
    "empty tuple": (lambda x: (x + 1,), lambda x: ()),
    "list for tuple": (lambda x: (x + 1, x + 2), lambda x: [x + 1, x + 2]),
    "other keys": (lambda x: {"a": x + 1, "b": x + 2}, lambda x: {"a": x + 1, "c": x + 2}),
    "other order": (lambda x: {"a": x + 1, "b": x + 2}, lambda x: {"b": x + 2, "a": x + 1}),
    "keys that are numbers": (lambda x: {"one": x + 1}, lambda x: {1: x + 1}),
    "key spelled anew": (lambda x: {"".join(["ke", "y"]): x + 1}, lambda x: {"key": x + 2}),
    "none": (lambda x: x + 1, lambda x: None),
    "none inside": (lambda x: (x + 1, None), lambda x: (x + 1, x + 2), lambda x: (None, x + 1)),
    "dtype": (lambda x: x + 1, lambda x: (x + 1).double(), lambda x: (x * 9).long(), lambda x: x.bfloat16()),
    "dtype of one width": (lambda x: (x > 0).to(torch.uint8), lambda x: x > 0, lambda x: (x * 9).to(torch.int8)),
    "complex": (lambda x: x + 1, lambda x: torch.complex(x, x + 1)),
    "conjugate": (lambda x: x + 1, lambda x: torch.complex(x, x + 1).conj()),
    "negative": (lambda x: x + 1, lambda x: torch.complex(x, x + 1).conj().imag),
    "shape": (lambda x: x + 1, lambda x: (x + 1).reshape(-1), lambda x: (x + 1).reshape(1, 2, 4, 1)),
    "size": (lambda x: x + 1, lambda x: torch.cat([x, x]), lambda x: x[0] + 1, lambda x: x.sum()),
    "nothing": (lambda x: x + 1, lambda x: x[:0]),
    "not finite": (lambda x: x + 1, lambda x: x / 0, lambda x: x * float("nan")),
    "subclass": (lambda x: x + 1, lambda x: (x + 1).as_subclass(Own)),
    "parameter": (lambda x: x + 1, lambda x: nn.Parameter(x + 1)),
    "transposed": (lambda x: x + 1, lambda x: (x + 1).t().contiguous().t()),
    "strided": (lambda x: x + 1, lambda x: torch.cat([x, x], 1)[:, ::2]),
    "expanded": (lambda x: x + 1, lambda x: x[:1].expand(2, 4)),
    "crooked": (lambda x: x + 1, lambda x: torch.cat([x.reshape(-1), x[0]])[1:9]),
    "sparse": (lambda x: x + 1, lambda x: (x + 1).to_sparse()),
    "sparse rows": (lambda x: x + 1, lambda x: (x + 1).to_sparse_csr()),
    "meta": (lambda x: x + 1, lambda x: x.to("meta")),
    "nested": (lambda x: x + 1, lambda x: torch.nested.nested_tensor([x[0], x[1]])),
    "quantized": (lambda x: x + 1, lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "inference": (lambda x: x + 1, lambda x: torch.inference_mode()(lambda: x + 1)()),
    "dataclass": (lambda x: (x + 1,), lambda x: zoo.Parts(x + 1, x + 2)),
    "named tuple": (lambda x: (x + 1, x + 2), lambda x: zoo.Pair(x + 1, x + 2)),
    "cache": (lambda x: (x + 1, Cache(x)), lambda x: (x + 1, Cache(x + 1)), lambda x: (x + 1, 3)),
    "number": (lambda x: x + 1, lambda x: 3, lambda x: 3.0),
    "tensor in place of a text": (lambda x: (x + 1, "a"), lambda x: (x + 1, x + 2)),
    "twice the same": (lambda x: (x, x, {"again": x}), lambda x: (x, x + 1, {"again": x})),
    "many": (lambda x: [x + i for i in range(32)], lambda x: [x + i for i in range(33)]),
    "deep": (lambda x: [[[[[[[[[x + 1]]]]]]]]], lambda x: [[[[[[[x + 1]]]]]]]),
    "keywords": (lambda x: {"mask": x + 2}, lambda x: {"mask": None}, lambda x: {}),
    "base and view": (lambda x: (x, x[0], x.view(-1)), lambda x: (x[0], x, x.view(-1))),
}


def telling():
    """A part for each kind that gives its values, and one that is given them: by position and by name."""

    def forward(m, x):
        for kind, makers in KINDS.items():
            given = getattr(m, f"tells {kind}")(x, makers[m.count // 3 % len(makers)])
            named = given if type(given) is dict and all(type(key) is str for key in given) else {}
            getattr(m, f"hears {kind}")(given, **named)
        m.count += 1
        return m.last(x)

    torch.manual_seed(0)
    tells = {f"tells {kind}": Holder(lambda m, x, make: make(x)) for kind in KINDS}
    hears = {f"hears {kind}": Holder(lambda m, given, **named: given) for kind in KINDS}
    model = Holder(forward, **tells, **hears, last=nn.Linear(4, 4))
    model.count = 0
    return model


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


@KEEPS
def test_every_kind_of_value_is_recorded_as_a_plain_hook_saw_it(device, to, keep):
    clones = assert_law(telling, X, device=device, keep=keep, to=to)
    assert len(clones.refused) == 5 * 3  # what has no dense values, where it is given, heard and handed on


@KEEPS
@pytest.mark.parametrize(
    "make", [zoo.plain, zoo.shared, zoo.called_thrice, zoo.recursive, zoo.in_place, zoo.not_finite]
)
def test_every_call_of_a_model_of_the_zoo_is_recorded_as_a_plain_hook_saw_it(device, keep, make):
    assert_law(lambda: make()[0], make()[1][0], device=device, keep=keep)


# Changes after the hook -------------------------------------------------------------------------


@torch.library.custom_op("layerscope_tests::writes", mutates_args=())
def writes(x: torch.Tensor) -> torch.Tensor:
    """Write where it says that it does not, as a kernel of one's own may."""
    x.data.mul_(-2)
    return x.new_empty(0)


def by_address(y):
    if y.is_cpu:
        ctypes.memset(y.data_ptr(), 1, y.nbytes)
    else:
        torch.from_dlpack(y.detach()).fill_(7)


def exchange(how):
    def change(y):
        y.data = how(y.data)

    return change


CHANGES = {
    "itself": lambda y: y.mul_(2),
    "a view": lambda y: y[0].mul_(2),
    "foreach": lambda y: torch._foreach_add_([y, y[1]], 1),
    "data": lambda y: y.data.add_(1),
    "data clamped": lambda y: y.data.clamp_(-0.1, 0.1),
    "a view of its data": lambda y: y.data[:, 1].fill_(float("nan")),
    "foreach of its data": lambda y: torch._foreach_add_([y.data], 1),
    "dlpack": lambda y: torch.from_dlpack(y.detach()).neg_(),
    "numpy": lambda y: y.numpy().fill(7) if y.is_cpu else y.data.fill_(7),
    "an address": by_address,
    "a custom operation": writes,
    "set": lambda y: y.set_(torch.full_like(y, 5)),
    "exchanged for other values": exchange(lambda data: torch.full_like(data, 6)),
    "exchanged for a flat view": exchange(lambda data: data.view(-1)),
    "exchanged for another shape": exchange(lambda data: data.view(4, 2)),
    "exchanged for another dtype": exchange(lambda data: data.view(torch.int32)),
    "exchanged for less": exchange(lambda data: data.new_zeros(3)),
    "exchanged for more": exchange(lambda data: data.new_zeros(20, 8)),
    "resized to less": lambda y: y.resize_(1),
    "resized to more": lambda y: y.resize_(6, 4).fill_(1),
}


def changing(ways=CHANGES):
    """A part for each way: what it gives is seen twice, changed, seen again, and changed once more, from a step on."""

    def part(m, x):
        y = m.gives(x)
        m.same(y)
        if m.way is not None:
            m.way(y)
        m.changed(y)
        if m.way is not None:
            m.way(y)
        return x

    def forward(m, x):
        for at, way in enumerate(ways.values()):
            m.parts[at].way = way if m.count >= SINCE else None
            m.parts[at](x)
        m.count += 1
        return m.last(x)

    def each():
        return Holder(part, gives=nn.Linear(4, 4), same=nn.Identity(), changed=Holder(lambda m, y: y))

    torch.manual_seed(0)
    model = Holder(forward, parts=nn.ModuleList([each() for _ in ways]), last=nn.Linear(4, 4))
    model.count = 0
    return model


@KEEPS
def test_whatever_changes_a_tensor_after_the_hook_changes_no_record(device, to, keep):
    clones = assert_law(changing, X, device=device, keep=keep, to=to)
    for at, way in enumerate(CHANGES):  # or nothing is changed, and this shows nothing
        for step in (SINCE - 1, SINCE):
            before, after = (clones[f"parts.{at}.{side}", step, 0] for side in ("same:output", "changed:input[0]"))
            same = before.dtype == after.dtype and before.shape == after.shape and torch.equal(before, after)
            assert same == (step < SINCE), way


@KEEPS
def test_a_change_is_no_less_exact_after_hundreds_of_steps(device, keep):
    assert_law(lambda: changing({"data": CHANGES["data"]}), X, device=device, keep=keep, steps=600)
