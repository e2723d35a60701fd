"""The eager runtime keeps the contract, and does what only hooks can."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits, hooks_on
from layerscope.points import Moment, Point
from layerscope.runtimes import eager, find
from runtimes.contract import Contract
from seen import Seen


class TestEager(Contract):
    def prepare(self, model, x):
        return model


def seen(model, wanted, *args, ops=None, **kwargs):
    sink = Seen()
    with eager.watch(model, wanted, sink, ops=ops):
        model(*args, **kwargs)
    return sink


def texts(sink):
    return [f"{point} {moment}" for moment, point, _ in sink.records]


# Names ------------------------------------------------------------------------------------------


def test_wrappers_leave_the_names_as_they_are():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = nn.Module()
    wrapped.add_module("module", inner)
    wrapped.forward = inner.forward
    assert [p.name for p in eager.points(wrapped)] == [p.name for p in eager.points(inner)]
    sink = Seen()
    with eager.watch(wrapped, {"1": {"output"}}, sink):
        wrapped(torch.ones(1, 4))
    assert texts(sink) == ["1:output step=0"]
    assert_no_hooks_left(wrapped)


def test_checkpoint_wrappers_inside_the_model_leave_the_names_as_they_are():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 4))
    assert [p.name for p in eager.points(model)] == ["", "0", "0.0", "0.1", "1"]
    assert texts(seen(model, {"0.0": {"output"}}, torch.ones(1, 4))) == ["0.0:output step=0"]


def test_a_ddp_wrapper_keeps_the_names(tmp_path):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model, (x,) = zoo.plain()
        wrapped = DistributedDataParallel(model)
        assert [p.name for p in eager.points(wrapped)] == [p.name for p in eager.points(model)]
        sink = seen(wrapped, {"2": {"output"}, "": {"output"}}, x)
        assert texts(sink) == ["2:output step=0", ".:output step=0"]
    finally:
        dist.destroy_process_group()


def test_a_shared_module_is_one_module_with_two_names():
    model, (x,) = zoo.shared()
    assert eager.modules_of(model).shared == {"b": "a"}
    assert [p.name for p in eager.points(model)] == ["", "a", "b"]
    sink = seen(model, {"a": {"output"}}, x)
    assert texts(sink) == ["a:output step=0", "a:output step=0 call=1"]
    assert_same_bits(sink.records[1][2], model.a(model.a(x)))


def test_a_module_that_contains_itself_is_listed_once():
    model = nn.Module()
    model.child = nn.Linear(2, 2)
    model.child.parent = model
    assert [p.name for p in eager.points(model)] == ["", "child", "child.parent"]
    assert eager.modules_of(model).shared == {"child.parent": ""}


# Calls and values -------------------------------------------------------------------------------


def test_k_calls_are_k_records():
    model, (x,) = zoo.called_thrice()
    sink = seen(model, {"layer": {"input", "output"}}, x)
    assert [(p.side, m.call) for m, p, _ in sink.records] == [
        ("input", 0), ("output", 0), ("input", 1), ("output", 1), ("input", 2), ("output", 2),
    ]  # fmt: skip
    assert_same_bits(sink.records[5][2], model.layer(model.layer(model.layer(x))))


def test_recursion_counts_calls_from_the_outside_in_and_is_one_step():
    model, (x,) = zoo.recursive()
    sink = seen(model, {"": {"output"}, "layer": {"output"}}, x)
    assert sink.begun == 1
    assert [m.call for m, p, _ in sink.records if p.name == "layer"] == [0, 1, 2]
    assert [m.call for m, p, _ in sink.records if p.name == ""] == [2, 1, 0]  # the innermost returns first
    around = zoo.Holder(lambda m, x: m.part(x) + m.part(x), part=model)
    sink = seen(around, {"part": {"output"}}, x)  # nothing but the end of its calls is watched until it calls itself
    assert sink.begun == 1
    assert [m.call for m, p, _ in sink.records] == [2, 1, 0, 5, 4, 3]


@pytest.mark.parametrize(
    ("make", "wanted", "expected"),
    [
        (zoo.tuple_outputs, "block:output", ["block:output[0]", "block:output[2][0]"]),
        (zoo.dict_outputs, "block:output", ["block:output[hidden]", 'block:output["odd key/]"]', "block:output[3]"]),
        (zoo.named_outputs, "first:output", ["first:output[hidden]", "first:output[weights]"]),
        (zoo.named_outputs, "second:output", ["second:output[first]", "second:output[second]"]),
        (zoo.named_outputs, "second:input", ["second:input[0][hidden]", "second:input[0][weights]"]),
        (zoo.keyword_inputs, "block:input", ["block:input[0]", "block:input[scale]", "block:input[extras][bias]"]),
    ],
)
def test_nested_values_are_walked_leaf_by_leaf(make, wanted, expected):
    model, args = make()
    point = Point.parse(wanted)
    sink = seen(model, {point.name: {point.side}}, *args)
    assert [str(p) for _, p, _ in sink.records] == expected


def test_a_model_output_of_transformers_is_walked():
    from transformers.modeling_outputs import BaseModelOutput

    block = zoo.Holder(lambda m, x: BaseModelOutput(last_hidden_state=x, attentions=(x + 1, x + 2)))
    model = zoo.Holder(lambda m, x: m.block(x).last_hidden_state, block=block)
    sink = seen(model, {"block": {"output"}}, torch.ones(2))
    assert [str(p) for _, p, _ in sink.records] == [
        "block:output[last_hidden_state]", "block:output[attentions][0]", "block:output[attentions][1]",
    ]  # fmt: skip


def test_a_value_that_refers_to_itself_ends():
    knot: list = [torch.ones(1)]
    knot.append(knot)
    model = zoo.Holder(lambda m, x: m.block(x)[0], block=zoo.Holder(lambda m, x: knot))
    assert [str(p) for _, p, _ in seen(model, {"block": {"output"}}, torch.ones(1)).records] == ["block:output[0]"]
    knot += [knot, knot]  # walked naively, two to the power of the depth
    assert len(seen(model, {"block": {"output"}}, torch.ones(1)).records) == 1


def test_a_side_without_tensors_is_told_with_its_reason():
    model, args = zoo.no_tensors()
    sink = seen(model, {"teller": {"output"}}, *args)
    assert sink.empties == [(Point("teller"), "its output holds no tensor: None")]


def test_an_input_is_seen_before_the_module_changes_it():
    model, (x,) = zoo.in_place()
    sink = seen(model, {"1": {"input"}, "0": {"output"}}, x)
    before = model[0](x)
    assert (before < 0).any()
    assert_same_bits(sink.records[0][2], before)
    assert_same_bits(sink.records[1][2], before)


def test_a_hook_of_the_user_that_replaces_the_output_is_honoured():
    model, (x,) = zoo.plain()
    model[0].register_forward_hook(lambda module, args, out: out + 100)
    plain = model(x)
    sink = seen(model, {"0": {"output"}}, x)
    assert (sink.records[0][2] > 50).all()
    assert_same_bits(model(x), plain)
    assert hooks_on(model) == 1


# When things go wrong ---------------------------------------------------------------------------


def test_an_exception_in_the_middle_keeps_the_records_before_it_and_the_next_step_is_right():
    def forward(m, x):
        x = m.layer(x)
        if x.sum() == 0:
            raise ZeroDivisionError
        return x

    model = zoo.Holder(lambda m, x: m.last(m.inner(x)), inner=zoo.Holder(forward, layer=nn.Identity()), last=nn.ReLU())
    sink = Seen()
    with eager.watch(model, {"inner.layer": {"output"}, "inner": {"output"}, "last": {"output"}}, sink):
        with pytest.raises(ZeroDivisionError):
            model(torch.zeros(2))
        model(torch.ones(2))
    assert texts(sink) == [
        "inner.layer:output step=0", "inner.layer:output step=1", "inner:output step=1", "last:output step=1",
    ]  # fmt: skip
    assert sink.forwards == [True, False]
    assert sink.empties == []
    assert_no_hooks_left(model)


def test_a_forward_called_while_an_exception_is_handled_is_no_failure():
    model, args = zoo.no_tensors()
    sink = Seen()
    with eager.watch(model, {"teller": {"output"}}, sink):
        try:
            raise ValueError
        except ValueError:
            model(*args)
    assert sink.forwards == [False]
    assert len(sink.empties) == 1


def test_an_interrupt_leaves_the_next_forward_a_new_step():
    def forward(m, x):
        if x.sum() == 0:
            raise KeyboardInterrupt
        return m.layer(x)

    model = zoo.Holder(forward, layer=nn.Identity())
    sink = Seen()
    with eager.watch(model, {"layer": {"output"}}, sink):
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(2))
        model(torch.ones(2))
    assert texts(sink) == ["layer:output step=1"]


def test_after_an_interrupt_nothing_outside_the_model_counts_as_inside_it():
    def forward(m, x):
        if x.sum() == 0:
            raise KeyboardInterrupt
        return m.layer(x)

    model = zoo.Holder(forward, layer=nn.Identity())
    sink = Seen()
    with eager.watch(model, {"layer": {"output"}}, sink, ops=lambda name: "sin" if "sin" in name else None):
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(2))
        torch.ones(2).sin()
        model.layer(torch.ones(2))
    assert texts(sink) == ["layer:output step=1"]


def test_a_part_called_on_its_own_is_one_step_whatever_is_tapped_in_it():
    model = zoo.Holder(lambda m, x: m.part(x), part=nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    sink = Seen()
    with eager.watch(model, {"part.0": {"output"}, "part.2": {"output"}}, sink):
        model.part(torch.ones(1, 2))
    assert [m.step for m, _, _ in sink.records] == [0, 0]


def test_tracing_and_compiling_pass_through():
    model, (x,) = zoo.plain()
    plain = model(x)
    sink = Seen()
    with eager.watch(model, {name: {"input", "output"} for name in ("", "0", "1", "2")}, sink):
        traced = torch.jit.trace(model, (x,))
        exported = torch.export.export(model, (x,)).module()
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert sink.failures == []
    for out in (traced(x), exported(x), compiled):
        torch.testing.assert_close(out, plain)


def test_a_sink_that_raises_does_not_reach_the_model():
    class Angry(Seen):
        def seen(self, *args, **kwargs):
            raise OSError("no more room")

    model, (x,) = zoo.plain()
    sink = Angry()
    with eager.watch(model, {"0": {"input", "output"}}, sink):
        out = model(x)
    assert_same_bits(out, model(x))
    assert [str(error) for _, error in sink.failures] == ["no more room", "no more room"]


# Copies, pickles, threads, forks ----------------------------------------------------------------


def test_a_deep_copy_is_silent_and_works_afterwards():
    model, (x,) = zoo.plain()
    sink = Seen()
    with eager.watch(model, {"0": {"input", "output"}}, sink):
        twin = copy.deepcopy(model)
        out = twin(x)
    assert sink.records == []
    assert_same_bits(out, model(x))
    assert_same_bits(twin(x), model(x))


def test_the_model_can_be_saved_while_it_is_watched_and_loads_without_us():
    model, (x,) = zoo.plain()
    file = io.BytesIO()
    with eager.watch(model, {"0": {"input", "output"}}, Seen()):
        torch.save(model, file)
    assert b"layerscope" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same_bits(loaded(x), model(x))


def test_state_dicts_are_unaffected():
    model, _ = zoo.plain()
    before = list(model.state_dict())
    with eager.watch(model, {"0": {"output"}}, Seen()):
        assert list(model.state_dict()) == before


def test_two_threads_keep_their_own_order():
    model, _ = zoo.called_thrice()
    sink = Seen()
    start = threading.Barrier(4)

    def run(value):
        start.wait()
        for _ in range(20):
            model(torch.full((1, 4), float(value)))

    with eager.watch(model, {"layer": {"output"}}, sink):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(sink.records) == 4 * 20 * 3
    by_step: dict[int, list[int]] = {}
    for moment, _, _ in sink.records:
        by_step.setdefault(moment.step, []).append(moment.call)
    assert all(calls == [0, 1, 2] for calls in by_step.values())


def test_a_forked_child_does_not_record():
    import multiprocessing

    model, (x,) = zoo.plain()
    sink = Seen()
    with eager.watch(model, {"0": {"output"}}, sink):
        queue = multiprocessing.get_context("fork").SimpleQueue()

        def child():
            model(x)
            queue.put(len(sink.records))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        assert queue.get() == 0
        process.join()
        model(x)
    assert len(sink.records) == 1


def test_a_thousand_watches_leave_nothing():
    model, _ = zoo.plain()
    for _ in range(1000):
        with eager.watch(model, {"0": {"output"}, "2": {"input"}}, Seen()):
            pass
    assert_no_hooks_left(model)


# Gradients --------------------------------------------------------------------------------------


def with_full_backward_hooks(model, name, run):
    """What PyTorch's own module hooks see: the oracle for gradients."""
    found = {}

    def hook(module, grad_input, grad_output):
        found["grad_input"], found["grad_output"] = grad_input, grad_output

    handle = dict(model.named_modules())[name].register_full_backward_hook(hook)
    try:
        run()
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("make", "name"), [(zoo.plain, "2"), (zoo.residual, "branch"), (zoo.half_precision, "0"), (zoo.residual, "")]
)
def test_gradients_are_what_full_backward_hooks_see(make, name):
    model, (x,) = make()
    x = x.detach().requires_grad_()
    oracle = with_full_backward_hooks(model, name, lambda: model(x).float().square().sum().backward())
    sink = Seen()
    with eager.watch(model, {name: {"grad_input", "grad_output"}}, sink):
        model(x).float().square().sum().backward()
    found = {point: tensor for _, point, tensor in sink.records}
    assert_same_bits(found[Point(name, "grad_output")], oracle["grad_output"][0])
    assert_same_bits(found[Point(name, "grad_input", (0,))], oracle["grad_input"][0])


def test_an_input_used_twice_inside_a_module_gets_the_sum_of_both_ways():
    model = zoo.Holder(lambda m, x: m.square(x), square=zoo.Holder(lambda m, x: x * x.sin()))
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    sink = Seen()
    with eager.watch(model, {"square": {"grad_input"}}, sink):
        model(x).sum().backward()
    [(_, point, gradient)] = sink.records
    assert point == Point("square", "grad_input", (0,))
    closed_form = x.detach().sin() + x.detach() * x.detach().cos()
    torch.testing.assert_close(gradient, closed_form, rtol=1e-12, atol=0)


def attends(m, query, key, value, scale=None):
    weights = (m.q(query) @ m.k(key).T * (1 if scale is None else scale.mean())).softmax(-1)
    return weights @ m.v(value) + query, weights


def attending():
    """One tensor as three arguments, positional and by keyword, beside one that is given once; dropout inside."""
    layers = {name: nn.Linear(4, 4) for name in "qkv"}
    attn = zoo.Holder(lambda m, *args, **kwargs: m.drop(attends(m, *args, **kwargs)[0]), drop=nn.Dropout(0.3), **layers)
    return zoo.Holder(lambda m, x: m.attn(x, x, value=x, scale=m.one(x)) + x, attn=attn, one=nn.Linear(4, 1))


@pytest.mark.parametrize("kind", ["own", "torch's"])
def test_one_tensor_given_as_several_arguments_has_a_gradient_of_each(kind):
    torch.manual_seed(0)
    if kind == "own":
        model, given = attending(), {(0,), (1,), ("value",), ("scale",)}
    else:
        model, given = zoo.Holder(lambda m, x: m.attn(x, x, x)[0], attn=nn.MultiheadAttention(4, 2)), {(0,), (1,), (2,)}
    x = torch.randn(3, 4, requires_grad=True)

    def run():
        torch.manual_seed(1)
        x.grad = None
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        return [out.detach(), x.grad, torch.get_rng_state(), *(p.grad for p in model.parameters())]

    oracle = apart(model, run) if kind == "own" else with_full_backward_hooks(model, "attn", run)["grad_input"]
    plain = run()
    for times in (1, 2):
        sink = Seen()
        inner = "attn.q" if kind == "own" else "attn.out_proj"
        with eager.watch(model, {"attn": {"grad_input"}, inner: {"output"}}, sink):
            for _ in range(times):
                watched = run()
        for one, other in zip(plain, watched, strict=True):
            assert_same_bits(one, other)
        assert sink.failures == []
        gradients = {(point.leaf, moment.step): t for moment, point, t in sink.records if point.side == "grad_input"}
        assert set(gradients) == {(leaf, step) for leaf in given for step in range(times)}
        assert all(moment.call == 0 for moment, _, _ in sink.records)
        for leaf, expected in zip(sorted(given, key=str), oracle, strict=True):
            torch.testing.assert_close(gradients[leaf, times - 1], expected, rtol=1e-4, atol=1e-6)


def apart(model, run):
    """The same model with clones in the place of one tensor: a gradient of each, in the order of their names."""
    kept, forward = {}, model.attn._forward

    def cloned(m, *args, **kwargs):
        for name, tensor in [*enumerate(args), *kwargs.items()]:
            kept[str((name,))] = tensor.clone()
            kept[str((name,))].retain_grad()
        return forward(m, *(kept[f"({n},)"] for n in range(len(args))), **{n: kept[f"({n!r},)"] for n in kwargs})

    model.attn._forward = cloned
    try:
        run()
    finally:
        model.attn._forward = forward
    return [kept[name].grad for name in sorted(kept)]


def test_what_cannot_be_called_twice_is_said_and_not_summed(monkeypatch):
    model = zoo.Holder(lambda m, x: m.both(x, x), both=zoo.Holder(lambda m, a, b: a * 2 + b * 3))
    monkeypatch.setattr("layerscope.runtimes.eager.shared_arguments.why_not_again", lambda model: "it is alone")
    x = torch.ones(2, requires_grad=True)
    with ls.record(model, ["both:grad_input", "both"]) as rec:
        model(x).sum().backward()
    assert x.grad.tolist() == [5, 5]
    assert [missing.point for missing in rec.missing] == ["both:grad_input"]
    assert "one tensor is several of its arguments" in rec.missing[0].reason


def test_gradients_that_arrive_sparse_and_dense_are_added():
    table = nn.Embedding(5, 2, sparse=True)

    def forward(m, weight):
        return nn.functional.embedding(torch.tensor([1, 3]), weight, sparse=True).sum() + (weight * 2).sum()

    for order in (forward, lambda m, w: (w * 2).sum() + forward(m, w)):
        model = zoo.Holder(lambda m, w: m.both(w), both=zoo.Holder(order))
        oracle = with_full_backward_hooks(model, "both", lambda m=model: m(table.weight).backward())["grad_input"][0]
        sink = Seen()
        with eager.watch(model, {"both": {"grad_input"}}, sink):
            model(table.weight).backward()
        [(_, _, gradient)] = sink.records
        assert_same_bits(gradient.to_dense(), oracle.to_dense())


def test_gradients_that_cannot_be_added_are_missing_and_the_backward_goes_on(monkeypatch):
    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("layerscope.runtimes.eager.gradient_hooks._sum", fails)
    model = zoo.Holder(lambda m, x: m.square(x), square=zoo.Holder(lambda m, x: x * x.sin()))
    x = torch.ones(5, requires_grad=True)
    with ls.record(model, ["square:grad_input", "square:output"]) as rec:
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(5).sin() + torch.ones(5).cos())
    assert [missing.point for missing in rec.missing] == ["square:grad_input"]
    assert "MemoryError: no room" in rec.missing[0].reason


def test_in_place_operations_still_work_where_full_backward_hooks_forbid_them():
    model, (x,) = zoo.in_place()
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        with_full_backward_hooks(model, "0", lambda: model(x).sum().backward())
    sink = Seen()
    with eager.watch(model, {"0": {"grad_output", "grad_input"}, "1": {"grad_output"}}, sink):
        model(x.requires_grad_()).sum().backward()
    assert {p.side for _, p, _ in sink.records} == {"grad_output", "grad_input"}


def test_gradients_carry_the_moment_of_their_forward():
    model, (x,) = zoo.called_thrice()
    sink = Seen()
    with eager.watch(model, {"layer": {"grad_output"}}, sink):
        (model(x).sum() + model(x).sum()).backward()
    assert sorted((m.step, m.call) for m, _, _ in sink.records) == [(s, c) for s in (0, 1) for c in (0, 1, 2)]


def test_a_backward_after_the_block_is_not_seen():
    model, (x,) = zoo.plain()
    sink = Seen()
    with eager.watch(model, {"2": {"grad_output", "grad_input"}}, sink):
        loss = model(x.requires_grad_()).sum()
    loss.backward()
    assert sink.records == []


def test_a_gradient_of_part_of_the_graph_is_told_with_what_came():
    model = zoo.Holder(lambda m, x, y: m.both(x, y), both=zoo.Holder(lambda m, x, y: (x * 2, x * 3 + y)))
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    sink = Seen()
    with eager.watch(model, {"both": {"grad_input"}}, sink):
        first, _ = model(x, y)
        torch.autograd.grad(first.sum(), x)
    assert [(str(p), t.tolist()) for _, p, t in sink.records] == [("both:grad_input[0]", [2.0, 2.0])]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_told_apart_and_not_recorded_twice(reentrant):
    model, (x,) = zoo.checkpointed(reentrant=reentrant)
    wanted = {"one.0": {"output", "grad_output"}, "two.0": {"output", "input", "grad_output"}}
    sink = Seen()
    with eager.watch(model, wanted, sink):
        model(x).sum().backward()
    outputs = [str(p) for _, p, _ in sink.records if not p.side.startswith("grad")]
    assert outputs == ["one.0:output", "two.0:input[0]", "two.0:output"]
    assert set(sink.repeats) == {"one.0", "two.0"}
    assert sink.begun == 1
    gradients = {p.name: t for _, p, t in sink.records if p.side == "grad_output"}
    plain, (y,) = zoo.checkpointed(reentrant=reentrant)
    oracle = with_full_backward_hooks(plain, "two.0", lambda: plain(y).sum().backward())
    torch.testing.assert_close(gradients["two.0"], oracle["grad_output"][0])
    assert set(gradients) == {"one.0", "two.0"}


def test_reentrant_gradients_of_several_forwards_keep_their_steps():
    from torch.utils.checkpoint import checkpoint

    model = zoo.Holder(lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=nn.Linear(3, 3))
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    sink = Seen()
    with eager.watch(model, {"a": {"grad_output", "grad_input"}}, sink):
        first, second = model(x).pow(2).sum(), model(y).pow(3).sum()
        first.backward()
        second.backward()
    found = {(m.step, p.side): t for m, p, t in sink.records}
    torch.testing.assert_close(found[0, "grad_output"], 2 * model.a(x).detach())
    torch.testing.assert_close(found[1, "grad_output"], 3 * model.a(y).detach().square())
    torch.testing.assert_close(found[0, "grad_input"], x.grad)
    torch.testing.assert_close(found[1, "grad_input"], y.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_called_twice_inside_one_region_keeps_its_call_numbers(reentrant):
    from torch.utils.checkpoint import checkpoint

    def forward(m, x, checkpointed):
        def region(y):
            return m.a(torch.tanh(m.a(y)))

        return checkpoint(region, x, use_reentrant=reentrant) if checkpointed else region(x)

    model = zoo.Holder(forward, a=nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        sink = Seen()
        with eager.watch(model, {"a": {"grad_output"}}, sink):
            model(x, checkpointed).pow(2).sum().backward()
        gradients.append({m.call: t for m, _, t in sink.records})
    assert set(gradients[0]) == set(gradients[1]) == {0, 1}
    for call in (0, 1):
        torch.testing.assert_close(gradients[1][call], gradients[0][call])


def test_a_tensor_that_the_module_holds_does_not_lead_the_gradient_astray():
    def forward(m, x):
        x = x * 1
        m.b.held = m.a(x)
        return m.b(x)

    model = zoo.Holder(forward, a=nn.Linear(3, 3), b=zoo.Holder(lambda m, x: x * 2 + m.held))
    sink = Seen()
    with eager.watch(model, {"b": {"grad_input"}}, sink):
        model(torch.randn(3, requires_grad=True)).sum().backward()
    [(_, _, gradient)] = sink.records
    assert gradient.tolist() == [2, 2, 2]


def test_a_module_that_hands_its_input_on_has_a_gradient_of_its_input():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Dropout(0.5), nn.Linear(3, 3)).eval()
    sink = Seen()
    with eager.watch(model, {"1": {"grad_input", "grad_output"}, "2": {"grad_input"}}, sink):
        model(torch.randn(2, 3)).sum().backward()
    found = {str(p): t for _, p, t in sink.records}
    assert set(found) == {"1:grad_input[0]", "1:grad_output", "2:grad_input[0]"}
    assert_same_bits(found["1:grad_input[0]"], model[3].weight.sum(0).expand(2, 3).contiguous())


# Operations -------------------------------------------------------------------------------------


def test_operations_are_seen_inside_the_forward_with_the_module_they_ran_in():
    model = zoo.Holder(lambda m, x: m.a(x).softmax(-1), a=zoo.Holder(lambda m, x: x.softmax(0)))
    x = torch.randn(3, 3)
    names = {"aten._softmax.default": "aten.softmax"}
    sink = Seen()
    with eager.watch(model, {}, sink, ops=names.get):
        model(x)
        x.softmax(0)  # outside the model
    outputs = [(m, p, t) for m, p, t in sink.records if p.side == "output"]
    assert [str(p) for _, p, _ in outputs] == ["op:aten.softmax:output"] * 2
    assert [m for m, _, _ in outputs] == [Moment(), Moment(call=1)]
    assert_same_bits(outputs[0][2], x.softmax(0))
    assert [note["within"] for note in sink.notes] == ["a", "a", "", ""]


def test_a_name_that_cannot_be_made_does_not_reach_the_model():
    model, (x,) = zoo.plain()
    sink = Seen()
    with eager.watch(model, {}, sink, ops=lambda name: 1 // 0):
        model(x)
    assert {type(error) for _, error in sink.failures} == {ZeroDivisionError}


def test_our_own_operations_are_not_taken_for_the_models():
    model, (x,) = zoo.plain()
    ran = []
    with torch.no_grad(), eager.watch(model, {"0": {"output"}}, Seen(), ops=lambda name: ran.append(name)):
        model(x)
    assert ran == ["aten.t.default", "aten.addmm.default", "aten.relu.default"]


# Refusals ---------------------------------------------------------------------------------------


def test_what_cannot_be_watched_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"give record\(\) a torch.nn.Module"):
        find(lambda x: x)
    assert find(zoo.plain()[0]) is eager


def test_why_a_point_stayed_silent():
    def why(model, name):
        [reason] = eager.why_silent(model, [name]).values()
        return reason

    assert why(zoo.attention()[0], "attn.out_proj").startswith("called functionally: MultiheadAttention")
    assert why(zoo.never_called()[0], "unused") == "never called"
    listed = nn.Module()
    listed.items = nn.ModuleList([nn.Linear(1, 1)])
    assert why(listed, "items") == "never called: a ModuleList only holds other modules"
    compiled = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    compiled[0].compile()
    assert why(compiled, "0.0").startswith("compiled before the tap")
