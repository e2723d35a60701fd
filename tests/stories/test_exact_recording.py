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


def per_sample(model, xs):
    return {name: torch.stack([seen[name] for seen in (outputs(model, x) for x in xs)]) for name in ("0", "1", "2")}


def outputs(model, x):
    found = {}
    handles = [
        part.register_forward_hook(lambda m, args, out, name=name: found.update({name: out.detach().clone()}))
        for name, part in model.named_children()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("keep", ["tensor", "both", lambda t: t * 1])
def test_inside_transforms_the_value_is_recorded_of_all_samples_at_once(keep):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    xs = torch.randn(5, 2, 4)
    loss = lambda x: model(x).sum()  # noqa: E731
    from torch.func import grad, jvp, vmap

    ways = {
        "plain": (lambda: model(xs), False),
        "vmap": (lambda: vmap(model)(xs), True),
        "grad": (lambda: grad(loss)(xs), False),
        "jvp": (lambda: jvp(model, (xs,), (xs,)), False),
        "vmap of grad": (lambda: vmap(grad(loss))(xs), True),
        "vmap along the second axis": (lambda: vmap(model, in_dims=1)(xs.transpose(0, 1)), True),
    }
    expected = per_sample(model, xs)
    for name, (run, said) in ways.items():
        before = run()
        with ls.record(model, ["0", "1", "2"], keep=keep) as rec:
            after = run()
        torch.testing.assert_close(before, after, rtol=0, atol=0)
        assert rec.missing == []
        for point, values in expected.items():
            torch.testing.assert_close(rec.run.tensor(point), values, msg=lambda text, name=name: f"{name}: {text}")
        assert all(bool(entry.note and "vmap" in entry.note) == said for entry in rec.run.records())


def test_samples_of_transforms_within_each_other_are_the_first_axes_in_order():
    model = nn.Sequential(nn.Linear(4, 3))
    xs = torch.randn(4, 5, 2, 3).permute(1, 3, 2, 0)  # (5, 3, 2, 4): the samples are axes 1 and 0 of what each maps
    with ls.record(model, ["0", "0:input"]) as rec:
        torch.func.vmap(torch.func.vmap(model, in_dims=1), in_dims=1)(xs)
    seen = rec.run.tensor("0:input")
    assert seen.shape == (3, 2, 5, 4)
    assert torch.equal(seen, xs.permute(1, 2, 0, 3))
    assert rec.run.records("0").__next__().note == {"vmap": "the first 2 axes are the samples of torch.func.vmap"}


def test_gradients_inside_a_transform_are_values_too():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(2, 4)
    with ls.record(model, "2:grad_output") as rec:
        torch.func.grad(lambda x: model(x).sum())(x)
    assert torch.equal(rec.run.tensor("2:grad_output"), torch.ones(2, 1))


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


def test_a_recording_that_begins_inside_the_forward_of_another_sees_what_is_called_in_it():
    inner = small()
    kept = []

    def forward(m, x):
        clones = Clones(m.inner)
        with ls.record(m.inner, EVERY) as rec:
            out = clones.call(m.inner, x)
        for handle in clones.handles:
            handle.remove()
        kept.append((rec, clones))
        return out

    model = zoo.Holder(forward, inner=inner)
    outer = Clones(model)
    with ls.record(model, EVERY) as rec:
        for _ in range(3):
            outer.call(model, X)
    assert len(kept) == 3
    for run, clones in [*kept, (rec, outer)]:
        assert_recorded(run.run, clones, keep="tensor", account=run.completeness)


def test_hooks_of_others_that_come_and_go_in_the_middle_of_a_forward_change_no_record():
    model = small()
    clones = Clones(model)
    fleeting = []

    def come_and_go(module, args, out):
        while fleeting:
            fleeting.pop().remove()
        for other in model.modules():
            if other is not module:
                fleeting.append(other.register_forward_hook(lambda *given: None))
                fleeting.append(other.register_forward_pre_hook(lambda *given: None))

    handle = model[0].register_forward_hook(come_and_go)
    with ls.record(model, EVERY) as rec:
        for step in range(6):
            clones.call(model, X)
            if step == 3:
                handle.remove()
    assert rec.missing == []
    assert_recorded(rec.run, clones, keep="tensor", account=rec.completeness)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int4, torch.uint2])
def test_a_dtype_without_statistics_is_named_and_the_model_goes_on(dtype):
    model = zoo.Holder(
        lambda m, x: (m.odd(torch.empty(4, dtype=dtype)), m.usual(x)), odd=nn.Identity(), usual=nn.Tanh()
    )
    with ls.record(model, ["odd", "usual"], keep="both") as rec:
        model(X)
    assert torch.equal(rec["usual"], X.tanh())
    [missing] = rec.missing
    assert str(missing.point) == "odd:output"
    assert str(dtype)[6:] in missing.reason
