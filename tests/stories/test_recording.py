"""A user records a model in memory: what they ask for is there, and the model never notices."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits, hooks_on
from layerscope.points import Moment, Point
from layerscope.recorder import Tap


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def one_step(make, record):
    """Run forward and backward once; return everything recording could disturb."""
    model, args = make()
    torch.manual_seed(42)
    with record(model):
        out = model(*args)
        loss = sum(leaf.float().nan_to_num().sum() for leaf in (out if isinstance(out, tuple) else (out,)))
        if loss.requires_grad:
            loss.backward()
    return out, grads_of(model), [a.grad for a in args], torch.get_rng_state()


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("make", zoo.ALL, ids=lambda make: make.__name__)
def test_outputs_gradients_and_rng_are_bit_identical(make, disk, tmp_path):
    from contextlib import nullcontext

    to = tmp_path / "run" if disk else None
    plain = one_step(make, lambda model: nullcontext())
    recorded = one_step(make, lambda model: ls.record(model, "**:*", to=to, keep="both"))
    assert_same_bits(recorded[0], plain[0])
    for mine, theirs in zip(recorded[1] + recorded[2], plain[1] + plain[2], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same_bits(mine, theirs)
    assert_same_bits(recorded[3], plain[3])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_are_bit_identical_and_recorded_once(reentrant):
    from contextlib import nullcontext

    def make():
        return zoo.checkpointed(reentrant=reentrant)

    plain = one_step(make, lambda model: nullcontext())
    model, args = make()
    with ls.record(model, ["**:output", "**:grad_output"]) as rec:
        model(*args).sum().backward()
    for mine, theirs in zip(grads_of(model), plain[1], strict=True):
        assert_same_bits(mine, theirs)
    outputs = [e for e in rec.run.records() if e.point.side == "output"]
    assert len({(e.point, e.moment) for e in outputs}) == len(outputs) == 9
    assert rec.completeness.recomputed > 0
    assert rec.completeness.missing == []


def test_the_first_example_of_the_readme_works():
    model, (x,) = zoo.plain()
    with ls.record(model, "*") as rec:
        out = model(x)
    assert_same_bits(rec["2"], out)
    assert_same_bits(rec["0"], model[0](x))
    assert [str(p) for p in rec.run.points] == ["0:output", "1:output", "2:output"]
    assert rec.run.moments == [Moment()]
    assert not rec["0"].requires_grad
    assert_no_hooks_left(model)


def test_aliases_are_names_too():
    model, (x,) = zoo.plain()
    with ls.record(model, {"hidden": "0", "logits": "2"}) as rec:
        out = model(x)
    assert_same_bits(rec["logits"], out)
    with pytest.raises(LookupError, match="hidden"):
        rec["hiden"]


def test_inputs_with_keywords_are_recorded_by_name():
    model, (x,) = zoo.keyword_inputs()
    with ls.record(model, "block:input") as rec:
        model(x)
    assert rec["block:input[scale]"] == 2
    assert_same_bits(rec["block:input[0]"], x)
    with pytest.raises(LookupError, match=r"block:input\[0\].*block:input\[scale\]"):
        rec["block:input"]


def test_several_leaves_and_several_moments_list_the_choices():
    model, (x,) = zoo.tuple_outputs()
    with ls.record(model, "block") as rec:
        model(x)
        model(x + 1)
    with pytest.raises(LookupError, match=r"block\S*\[0\].*block\S*\[2\]\[0\]"):
        rec["block"]
    with pytest.raises(LookupError, match=r"step=0.*step=1"):
        rec["block[0]"]
    assert_same_bits(rec.run.tensor("block[0]", step=1), model.block(x + 1)[0])
    assert_same_bits(rec.run.tensor("block[2][0]", step=0), x * 2)


def test_calls_are_told_apart():
    model, (x,) = zoo.called_thrice()
    with ls.record(model, "layer") as rec:
        out = model(x)
    assert_same_bits(rec.run.tensor("layer", call=2), out)
    with pytest.raises(LookupError, match=r"call=0.*call=1.*call=2|call="):
        rec["layer"]


def test_a_shared_module_answers_to_both_names():
    model, (x,) = zoo.shared()
    with ls.record(model, "b") as rec:
        out = model(x)
    assert [p.name for p in rec.run.points] == ["a"]
    assert_same_bits(rec.run.tensor("b", call=1), out)
    assert rec.run.manifest.shared == {"b": "a"}


def test_what_is_kept_is_what_was_asked_for():
    model, (x,) = zoo.plain()
    taps = ["0", Tap("1", keep="summary"), Tap("2", keep=lambda t: t.abs().amax(-1))]
    with ls.record(model, taps) as rec:
        out = model(x)
    assert rec["0"].shape == (5, 8)
    assert_same_bits(rec["2"], out.detach().abs().amax(-1))
    hidden = model[0](x).relu().detach()
    assert rec.run.summary("1").max == hidden.max()
    assert rec.run.summary("1").zeros == (hidden == 0).sum()
    with pytest.raises(LookupError, match=r"summary|tensor"):
        rec["1"]


def test_the_moment_is_the_callers_when_it_says_so():
    model, (x,) = zoo.plain()
    with ls.record(model, "0") as rec:
        for epoch in (1, 2):
            for batch in range(3):
                rec.moment(epoch=epoch, batch=batch)
                model(x * batch)
    assert [(m.epoch, m.batch, m.step) for m in rec.run.moments] == [
        (1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 0, 3), (2, 1, 4), (2, 2, 5),
    ]  # fmt: skip
    assert_same_bits(rec.run.tensor("0", epoch=2, batch=1), model[0](x * 1))


def test_two_forwards_of_a_named_batch_are_two_calls():
    model, (x,) = zoo.plain()
    with ls.record(model, "0") as rec:
        rec.moment(epoch=0, batch=4)
        model(x)
        model(x + 1)
    assert [(m.batch, m.call) for m in rec.run.moments] == [(4, 0), (4, 1)]


def test_schedules_say_when():
    model, (x,) = zoo.plain()
    with ls.record(model, "0", when=ls.every(4) | ls.first(2)) as rec:
        for _ in range(9):
            model(x)
    assert [m.step for m in rec.run.moments] == [0, 1, 4, 8]


def test_generation_gives_a_step_per_forward():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50, pad_token_id=0
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 6)[None]
    with ls.record(model, "model.layers.*") as rec:
        model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert [m.step for m in rec.run.moments] == [0, 1, 2, 3]
    shapes = [tuple(rec.run.tensor("model.layers.1", step=s).shape) for s in range(4)]
    assert shapes == [(1, 5, 16), (1, 1, 16), (1, 1, 16), (1, 1, 16)]


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5", "Mamba", "ViT"])
def test_real_architectures_are_recorded_with_their_own_hidden_states(name):
    model, inputs, layers = architecture(name)
    with torch.no_grad(), ls.record(model, f"{layers}.*") as rec:
        out = model(**inputs, output_hidden_states=True)
    hidden = out.encoder_hidden_states if name == "T5" else out.hidden_states
    names = [p for p in rec.run.points if p.leaf in ((), (0,))]
    assert len(names) == 2
    first_layer = 0 if name == "Mamba" else 1  # Mamba's tuple leaves the embedding out
    assert_same_bits(rec[str(names[0])], hidden[first_layer])


def architecture(name):
    import transformers as tf

    torch.manual_seed(0)
    ids = {"input_ids": torch.arange(1, 9)[None]}
    small = {"vocab_size": 40}
    if name == "Llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return tf.LlamaForCausalLM(tf.LlamaConfig(**small, **sizes)).eval(), ids, "model.layers"
    if name == "GPT2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(**small, n_embd=16, n_layer=2, n_head=2)).eval(), ids, "transformer.h"
    if name == "Bert":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return tf.BertModel(tf.BertConfig(**small, **sizes)).eval(), ids, "encoder.layer"
    if name == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        model = tf.T5ForConditionalGeneration(tf.T5Config(**small, **sizes)).eval()
        return model, {**ids, "decoder_input_ids": torch.ones(1, 2, dtype=torch.long)}, "encoder.block"
    if name == "Mamba":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
        return tf.MambaForCausalLM(tf.MambaConfig(**small, **sizes)).eval(), ids, "backbone.layers"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = tf.ViTModel(tf.ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    layers = next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList))
    return model, {"pixel_values": torch.randn(1, 3, 8, 8)}, layers


def test_operations_are_recorded():
    model = zoo.Holder(lambda m, x: m.attn(x, x, x)[0], attn=nn.MultiheadAttention(8, 2))
    x = torch.randn(3, 2, 8)
    with ls.record(model, "op:aten.softmax") as rec:
        _, weights = model.attn(x, x, x, average_attn_weights=False)
        model(x)
    recorded = rec.run.tensor("op:aten.softmax", step=0)
    assert_same_bits(recorded.view(weights.shape), weights)


# Completeness -----------------------------------------------------------------------------------


def test_every_point_asked_for_is_there_or_missing_with_its_reason():
    model, (x,) = zoo.attention()
    with ls.record(model, ["attn", "attn.out_proj", "attn:grad_output"]) as rec:
        model(x)
    reasons = {m.point: m.reason for m in rec.completeness.missing}
    assert set(reasons) == {"attn.out_proj:output", "attn:grad_output"}
    assert reasons["attn.out_proj:output"].startswith("called functionally")
    assert reasons["attn:grad_output"].startswith("no gradient arrived")
    assert rec.run.missing == rec.completeness.missing == rec.missing
    assert not rec.run.complete


@pytest.mark.parametrize(
    ("make", "taps", "reason"),
    [
        (zoo.never_called, ["used", "unused"], "never called"),
        (zoo.no_tensors, [".", "teller"], "its output holds no tensor: None"),
        (zoo.plain, ["0", "1[3]"], "it has no such leaf; there is 1:output"),
        (zoo.plain, ["0", Tap("1", when="steps(7)")], "its schedule was never due"),
        (zoo.plain, ["0", "op:aten.softmax"], "no such operation ran"),
        (zoo.plain, ["0", Tap("1", keep=lambda t: t.no_such_thing)], "AttributeError"),
    ],
)
def test_the_reason_is_the_right_one(make, taps, reason):
    model, args = make()
    with ls.record(model, taps) as rec:
        model(*args)
    [missing] = rec.completeness.missing
    assert missing.reason.startswith(reason)


def test_on_error_raise_raises_at_the_end_of_the_block():
    model, (x,) = zoo.never_called()
    ran = []
    with (
        pytest.raises(RuntimeError, match="unused:output: never called"),
        ls.record(model, ["used", "unused"], on_error="raise"),
    ):
        ran.append(model(x))
    assert ran
    assert_no_hooks_left(model)
    with ls.record(model, "used", on_error="raise"):
        model(x)


def test_forwards_without_a_single_record_always_raise():
    model, (x,) = zoo.never_called()
    sentence = "1 forward ran and no tap saw a tensor: unused:output: never called"
    with pytest.raises(RuntimeError, match=sentence), ls.record(model, "unused"):
        model(x)
    with ls.record(model, "unused") as rec:
        pass
    assert rec.completeness.missing[0].reason == "no forward ran while recording"


def test_an_exception_of_the_users_is_the_one_that_comes_out():
    model, _ = zoo.never_called()
    fail = zoo.Holder(lambda m, x: 1 // 0)
    with pytest.raises(ZeroDivisionError), ls.record(model, "unused", on_error="raise"):
        fail(model(torch.zeros(1, 4)))
    assert_no_hooks_left(model)


def test_a_failed_forward_keeps_what_came_before_it():
    model, (x,) = zoo.plain()
    with ls.record(model, "0") as rec:
        model(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(1, 3))
        model(x + 1)
    assert [m.step for m in rec.run.moments] == [0, 2]


def test_forwards_that_raised_are_in_the_account():
    model, (x,) = zoo.plain()
    with ls.record(model, "0") as rec:
        model(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.zeros(1, 3))
    assert (rec.completeness.forwards, rec.completeness.failed) == (2, 1)
    assert rec.completeness.state == "complete"
    assert not rec.run.complete


def test_a_block_that_an_exception_left_is_interrupted():
    model, (x,) = zoo.plain()
    stop = zoo.Holder(lambda m, x: 1 // 0)
    with pytest.raises(ZeroDivisionError), ls.record(model, "0") as rec:
        stop(model(x))
    assert rec.run.state == "interrupted"
    assert_same_bits(rec["0"], model[0](x))


def test_a_schedule_that_raises_is_the_reason_and_the_end_of_the_block_raises():
    model, (x,) = zoo.plain()

    def wrong(moment):
        raise KeyError("x")

    with (
        pytest.raises(RuntimeError, match=r"2 forwards ran .* its schedule raised KeyError: 'x'"),
        ls.record(model, "0", when=ls.when(wrong)),
    ):
        model(model(x)[:, :1].expand(-1, 4))
    with pytest.raises(ValueError, match="is not a schedule"):
        ls.record(model, "0", when=5)


def test_lazy_modules_are_recorded(tmp_path):
    for to in (None, tmp_path / "run"):
        model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
        with ls.record(model, "*", to=to) as rec:
            model(torch.ones(2, 3))
        assert rec["0"].shape == (2, 4)
    assert (
        ls.open_run(tmp_path / "run").manifest.weights["0"].startswith("not fingerprinted: weight is not initialised")
    )


def test_operations_on_another_thread_are_missing_with_the_reason():
    model = zoo.Holder(lambda m, x: m.a(x).softmax(-1), a=nn.Identity())
    with ls.record(model, ["a", "op:aten.softmax"]) as rec:
        thread = threading.Thread(target=model, args=(torch.ones(3),))
        thread.start()
        thread.join()
    [missing] = rec.missing
    assert "on the thread that began the recording" in missing.reason


def test_a_part_that_is_compiled_is_missing_and_runs_as_before():
    model = nn.Sequential(nn.Linear(2, 2), zoo.Holder(lambda m, x: m.inner(x).relu(), inner=nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    model[1].compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        plain = model(x)
        with ls.record(model, ["0", "1.inner"]) as rec:
            out = model(x)
    assert_same_bits(out, plain)
    [missing] = rec.missing
    assert (missing.point, missing.reason.split(":")[0]) == ("1.inner:output", "compiled before the tap")
    with pytest.raises(TypeError, match="operations cannot be watched beside compiled modules"):
        ls.record(model, "op:aten.relu")


def test_a_block_in_which_nothing_ran_says_so(caplog):
    model, (x,) = zoo.plain()
    compiled = torch.compile(model, backend="eager")
    with ls.record(model, "0") as rec:
        compiled(x)
    assert "no forward of Sequential ran while recording" in caplog.text
    assert rec.missing[0].reason == "no forward ran while recording"


def test_a_recording_is_entered_once():
    model, (x,) = zoo.plain()
    recording = ls.record(model, "0")
    with recording:
        model(x)
    with pytest.raises(RuntimeError, match="entered once"), recording:
        pass


def test_a_tensor_that_cannot_be_stored_is_missing_and_the_model_runs_on():
    model = zoo.Holder(lambda m, x: m.sparse(x).to_dense(), sparse=zoo.Holder(lambda m, x: x.to_sparse()))
    with ls.record(model, ["sparse", "."]) as rec:
        out = model(torch.eye(2))
    assert out.tolist() == [[1, 0], [0, 1]]
    assert rec.completeness.missing[0].reason.startswith("Unsupported: a sparse_coo tensor is not stored")


def test_a_pattern_that_matches_nothing_raises_at_once_and_leaves_no_hook():
    model, _ = zoo.plain()
    with pytest.raises(LookupError, match=r"nearest|layerscope points"):
        ls.record(model, "layers.*")
    assert hooks_on(model) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": "everything"}, "use 'tensor', 'summary', 'both' or a function"),
        ({"on_error": "ignore"}, "use 'record' or 'raise'"),
        ({"statistics": "some"}, "use 'full', 'moments', 'channels'"),
        ({"append": True}, "append=True needs `to=`"),
        ({"when": "now and then"}, "."),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ls.record(zoo.plain()[0], "0", **options)


# Company ----------------------------------------------------------------------------------------


def test_two_recordings_at_once_see_the_same():
    model, (x,) = zoo.plain()
    with ls.record(model, "0") as outer, ls.record(model, "*") as inner:
        model(x)
    assert_same_bits(outer["0"], inner["0"])
    assert_no_hooks_left(model)


def test_deep_copies_do_not_record():
    model, (x,) = zoo.plain()
    with ls.record(model, "0") as rec:
        copy.deepcopy(model)(x)
        model(x + 1)
    assert_same_bits(rec["0"], model[0](x + 1))


def test_threads_have_steps_of_their_own():
    model, _ = zoo.called_thrice()
    with ls.record(model, "layer") as rec:
        threads = [
            threading.Thread(target=lambda i=i: [model(torch.full((1, 4), float(i))) for _ in range(10)])
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entries = list(rec.run.records())
    assert len(entries) == 3 * 10 * 3
    for step in range(30):
        assert [e.moment.call for e in rec.run.records(step=step)] == [0, 1, 2]
        x = None
        for call in range(3):
            value = rec.run.tensor("layer", step=step, call=call)
            if x is not None:
                assert_same_bits(value, model.layer(x))
            x = value


def test_a_mode_of_the_user_does_not_see_us():
    from torch.utils.flop_counter import FlopCounterMode

    model, (x,) = zoo.plain()
    with FlopCounterMode(display=False) as plain:
        model(x)
    with FlopCounterMode(display=False) as watched, ls.record(model, "*", keep="both") as rec:
        model(x)
    assert watched.get_flop_counts() == plain.get_flop_counts()
    assert len(rec.run.points) == 3


def test_inference_mode_and_a_default_device_are_no_trouble():
    model, (x,) = zoo.plain()
    with torch.inference_mode(), ls.record(model, "*", keep="both") as rec:
        model(x)
    rec["0"].requires_grad_().sum().backward()
    with torch.device("meta"), ls.record(model, "*", keep="both") as rec:
        out = model(x)
    assert_same_bits(rec["2"], out)


@pytest.mark.parametrize("change", [lambda y: y.add_(1), lambda y: y.data.add_(1), lambda y: y.numpy().__iadd__(1)])
def test_an_input_that_was_the_last_output_is_what_it_is_by_then(change):
    def forward(m, x):
        y = m.first(x)
        change(y)
        return m.second(y)

    model = zoo.Holder(forward, first=nn.Identity(), second=nn.Identity())
    for keep in ("tensor", "summary", "both"):
        with torch.no_grad(), ls.record(model, ["first:output", "second:input"], keep=keep) as rec:
            model(torch.zeros(4))
        if keep != "summary":
            assert (rec["first"].tolist(), rec["second:input[0]"].tolist()) == ([0.0] * 4, [1.0] * 4)
        if keep != "tensor":
            assert (rec.run.summary("first").max, rec.run.summary("second:input[0]").max) == (0.0, 1.0)


def test_points_that_saw_the_same_values_of_one_tensor_share_a_copy_in_memory():
    model, (x,) = zoo.plain()
    with ls.record(model, ["*:input", "*:output"]) as rec:
        model(x)
    assert rec["0"].data_ptr() == rec["1:input[0]"].data_ptr()


def test_hostile_names_come_back_unchanged(tmp_path):
    names = ["../../x", "/etc/passwd", "</script>", "a\nb", "n" * 300, "größe→層", "op:x", "a[0]:input", "\x1b[31m"]
    model = nn.Sequential()
    for name in names:
        if "." in name:
            model._modules[name] = nn.Identity()
        else:
            model.add_module(name, nn.Identity())
    for to in (None, tmp_path / "run"):
        with ls.record(model, "**:output", to=to) as rec:
            model(torch.ones(2))
        assert [p.name for p in rec.run.points if p.name] == names
        for point in rec.run.points:
            assert rec[str(point)].tolist() == [1, 1]
            assert Point.parse(str(point)) == point
    written = {path.name for path in (tmp_path / "run").rglob("*")}
    assert written == {"run.json", "rank-00000", "lock", "segment-00000.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("many", [2, 60])
def test_the_model_is_walked_once_for_all_that_is_missing(many, monkeypatch):
    from layerscope.runtimes import eager

    unused = {f"unused{i}": nn.Identity() for i in range(many)}
    model = zoo.Holder(lambda m, x: m.used(x), used=nn.Identity(), **unused)
    walks = []
    real = eager.modules_of
    with ls.record(model, "*") as rec:
        model(torch.ones(1))
        monkeypatch.setattr(eager, "modules_of", lambda m: walks.append(m) or real(m))
    assert len(rec.missing) == many
    assert len(walks) == 1
