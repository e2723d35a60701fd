"""Every record is what a plain hook of PyTorch saw, whatever the model, its caller or another thread does meanwhile."""

from __future__ import annotations

import cProfile
import gc
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import layerscope as ls
import zoo
from hooked import EVERY, Clones, assert_recorded

X = torch.arange(8.0).view(2, 4)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Tanh())


def test_a_block_that_clamps_its_output_through_data_from_step_ten_on(tmp_path):
    def forward(m, x):
        for block in m.blocks:
            x = block(x)
            if m.count >= 10:
                x.data.clamp_(-0.1, 0.1)
        m.count += 1
        return x

    for keep in ("tensor", "summary", "both"):
        for to in (None, tmp_path / keep):
            model = zoo.Holder(forward, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
            model.count = 0
            clones = Clones(model)
            with ls.record(model, EVERY, keep=keep, to=to) as rec:
                for _ in range(20):
                    clones.call(model, X)
            assert (rec.missing, rec.completeness.state) == ([], "complete")
            assert_recorded(rec.run, clones, keep=keep, account=rec.completeness)


class Counts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def traced():
    sys.settrace(lambda *given: None)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def collected_all_the_time():
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


AROUND = {
    "a function mode": Counts,
    "a dispatch mode": Dispatches,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no torch function": torch._C.DisableTorchFunction,
    "a profiler": cProfile.Profile,
    "a debugger": traced,
    "garbage": collected_all_the_time,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_modes_profilers_and_debuggers_change_nothing(around):
    model = small()
    clones = Clones(model)
    with ls.record(model, EVERY) as rec:
        for step in range(3):
            with around() if step else nullcontext():
                clones.call(model, X)
    assert_recorded(rec.run, clones, account=rec.completeness)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_functions_are_borne():
    model, x = small(), X.clone()
    wanted = [torch.func.vmap(model)(x), torch.func.grad(lambda x: model(x).sum())(x)]
    clones = Clones(model)
    with ls.record(model, EVERY) as rec:
        clones.call(model, x)
        got = [torch.func.vmap(model)(x), torch.func.grad(lambda x: model(x).sum())(x)]
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(rec.run.tensor("0", step=0), clones["0:output", 0, 0])


def test_a_note_and_what_is_taken_in_the_middle_of_a_step_stay_with_their_records():
    model, taken = small(), []

    def between(module, args):
        taken.append(rec.take())
        rec.moment(note={"half": "second"})

    model[1].register_forward_pre_hook(between)
    clones = Clones(model)
    with ls.record(model, EVERY) as rec:
        clones.call(model, X)
    assert [str(point) for point in taken[0].points] == [".:input[0]", "0:input[0]", "0:output"]
    for run in (*taken, rec.run):
        for entry in run.records():
            assert torch.equal(entry.tensor(), clones[str(entry.point), 0, 0])
    notes = {str(entry.point): entry.note for entry in rec.run.records()}
    assert notes["1.0:output"] == {"half": "second"}


def test_a_forward_on_another_thread_in_the_middle_of_one_is_a_step_of_its_own():
    model, inside = small(), []

    def elsewhere(module, args):
        if not inside:
            thread = threading.Thread(target=lambda: inside.append(model(X + 1)))
            inside.append(None)
            thread.start()
            thread.join()

    model[1].register_forward_pre_hook(elsewhere)
    with torch.no_grad(), ls.record(model, EVERY) as rec:
        model(X)
    assert torch.equal(rec.run.tensor("0", step=0), model[0](X))
    assert torch.equal(rec.run.tensor("0", step=1), model[0](X + 1))
    assert rec.completeness.forwards == 2


def test_a_backward_pass_inside_a_forward_is_none_of_its_calls():
    def forward(m, x):
        y = m.layer(x)
        y.register_hook(lambda gradient: m.layer(gradient))  # a module that the backward pass calls
        torch.autograd.grad(y.sum(), x)
        return m.last(y)

    model = zoo.Holder(forward, layer=nn.Linear(4, 4), last=nn.Tanh())
    with ls.record(model, ["layer", "last"]) as rec:
        model(X.clone().requires_grad_())
    assert [(str(e.point), e.moment.call) for e in rec.run.records()] == [("layer:output", 0), ("last:output", 0)]


def test_no_tensor_is_held_longer_than_its_step_nor_the_model_longer_than_the_recording():
    seen, model = [], small()
    model[0].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    with torch.no_grad(), ls.record(model, EVERY) as rec:
        model(X)
        assert seen[0]() is None
    alive = weakref.ref(model)
    del rec, model
    gc.collect()
    assert alive() is None
