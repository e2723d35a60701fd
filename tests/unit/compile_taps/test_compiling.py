"""`compile` itself: what is asked for is there for this input, and the model is as it was."""

import copy
import threading
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import architectures
import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.compile_taps import compiling
from layerscope.compile_taps.backends import Made
from layerscope.errors import Incomplete, NothingRecorded, Unsupported
from layerscope.models.tiny import tiny_transformer

IDS = torch.arange(10).reshape(2, 5)


def eager(module, example_inputs):
    return module


def tiny():
    return tiny_transformer(layers=3, hidden=16, heads=2)


def hooked(model, *args, **kwargs):
    """The oracle: PyTorch's own hooks on embedding and layers."""
    kept = []
    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [m.register_forward_hook(lambda m, a, out: kept.append(out.clone())) for m in modules]
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return kept


@pytest.fixture(scope="module")
def traced():
    model = tiny()
    return model, ls.compile(model, (IDS,), backend=torch.jit.trace)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_hidden_states_are_those_of_each_input_and_not_of_the_one_it_was_traced_with(traced):
    model, compiled = traced
    for ids in (IDS, IDS + 7, IDS[:1, :3] * 2):
        assert_same_bits(compiled(ids), model(ids))
        found = ls.get_layer_hidden_states()
        assert len(found) == 4
        for state, expected in zip(found, hooked(model, ids), strict=True):
            assert_same_bits(state, expected)


def test_the_model_is_left_as_it_was(traced):
    model, _ = traced
    assert_no_hooks_left(model)
    assert "forward" not in model.__dict__


def test_taps_go_by_the_names_of_the_modules_and_the_logits_by_their_own(traced):
    _, compiled = traced
    value = compiled(IDS)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head", "logits"]
    assert list(compiled.taps()) == names
    assert_same_bits(compiled.taps()["logits"], value)


def test_a_thread_sees_its_own_last_call_and_none_before_the_first(traced):
    model, compiled = traced
    compiled(IDS)
    seen = {}
    ready = threading.Barrier(2)

    def work(name, ids):
        seen[name, "before"] = (ls.get_layer_hidden_states(), compiled.taps())
        with torch.no_grad():
            for _ in range(5):
                ready.wait()
                compiled(ids)
                ready.wait()
                seen[name] = ls.get_layer_hidden_states()

    inputs = {"one": IDS + 1, "two": IDS + 50}
    threads = [threading.Thread(target=work, args=item) for item in inputs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, ids in inputs.items():
        assert seen[name, "before"] == (None, {})
        assert_same_bits(seen[name][-1], hooked(model, ids)[-1])
    assert_same_bits(ls.get_layer_hidden_states()[-1], hooked(model, IDS)[-1])


def test_only_some_layers():
    model = tiny()
    compiled = ls.compile(model, (IDS,), backend=eager, record_layer_outputs={0, 2})
    compiled(IDS)
    expected = hooked(model, IDS)
    found = ls.get_layer_hidden_states()
    assert [torch.equal(state, expected[at]) for state, at in zip(found, (0, 1, 3), strict=True)] == [True] * 3


def test_layers_by_pattern_come_after_the_embedding_too():
    compiled = ls.compile(tiny(), (IDS,), backend=eager, record_layer_outputs="model.layers.{0,-1}")
    compiled(IDS)
    assert len(ls.get_layer_hidden_states()) == 3
    assert list(compiled.taps()) == ["model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head", "logits"]


def test_where_no_layer_is_named_the_states_are_what_is_named():
    model, args = zoo.plain()
    compiled = ls.compile(model, args, backend=eager, record_layer_outputs=["0", "2:input"])
    compiled(*args)
    found = ls.get_layer_hidden_states()
    assert_same_bits(found[0], model[0](*args))
    assert_same_bits(found[1], model[0](*args).relu())


def test_without_taps_nothing_is_kept():
    model = tiny()
    compiled = ls.compile(model, (IDS,), backend=torch.jit.trace, record_layer_outputs=False)
    assert_same_bits(compiled(IDS + 1), model(IDS + 1))
    assert compiled.taps() == {}
    assert ls.get_layer_hidden_states() is None
    llama = ls.compile(architectures.make("llama"), {"input_ids": IDS}, backend=eager, record_layer_outputs=False)
    llama(input_ids=IDS)
    assert llama.taps() == {}
    assert not any("clone" in node.kind() for node in compiled._artefact.inlined_graph.nodes())
    assert str(compiled.observer_effect) == "not measured: there are no taps"


def test_a_model_output_comes_back_as_one_whatever_way_the_model_is_called():
    model = architectures.make("llama")
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
    compiled = ls.compile(model, inputs, backend=torch.jit.trace)
    expected = model(**inputs)
    for value in (compiled(**inputs), compiled(IDS, inputs["attention_mask"])):
        assert type(value) is CausalLMOutputWithPast
        assert_same_bits(value.logits, expected.logits)
        assert value.past_key_values is None
    assert_same_bits(compiled.taps()["logits"], expected.logits)


def test_logits_are_there_though_the_model_returns_token_ids_alone():
    model = tiny()
    greedy = zoo.Holder(lambda m, ids: m.inner(ids)[:, -1].argmax(-1), inner=model)
    compiled = ls.compile(greedy, (IDS,), backend=torch.jit.trace)
    tokens = compiled(IDS + 3)
    assert tokens.dtype == torch.int64
    assert_same_bits(compiled.taps()["logits"], model(IDS + 3))


@pytest.mark.parametrize(
    "make", [zoo.tuple_outputs, zoo.dict_outputs, zoo.named_outputs, zoo.keyword_inputs, zoo.shared]
)
def test_awkward_models_are_tapped_as_they_are_seen_by_hooks(make):
    model, args = make()
    name = next(name for name, _ in model.named_children())
    compiled = ls.compile(model, args, backend=torch.jit.trace, record_layer_outputs=name)
    assert_same_bits(compiled(*args), model(*args))
    with ls.record(model, name) as rec:
        model(*args)
    expected = [rec.run.tensor(str(p), call=moment.call) for p in rec.run.points for moment in rec.run.moments]
    assert [torch.equal(a, b) for a, b in zip(compiled.taps().values(), expected, strict=True)] == [True] * len(
        expected
    )


def test_what_does_not_fire_is_missing_with_the_reason():
    model, args = zoo.never_called()
    compiled = ls.compile(model, args, backend=eager, record_layer_outputs=["used", "unused"])
    assert [(m.point, m.reason) for m in compiled.missing] == [("unused:output", "never called")]
    model, args = zoo.attention()
    compiled = ls.compile(model, args, backend=eager, record_layer_outputs=["attn", "attn.out_proj"])
    [missing] = compiled.missing
    assert missing.reason.startswith("called functionally")
    model, args = zoo.no_tensors()
    compiled = ls.compile(model, args, backend=eager, record_layer_outputs=[".", "teller"])
    assert [m.reason for m in compiled.missing] == ["it ran, and its output holds no such tensor"]


def test_taps_that_all_stay_silent_are_an_error():
    model, args = zoo.never_called()
    with pytest.raises(NothingRecorded, match="unused:output: never called"):
        ls.compile(model, args, backend=eager, record_layer_outputs="unused")


def test_a_graph_that_gives_fewer_taps_than_expected_is_an_error():
    compiled = ls.compile(tiny(), (IDS,), backend=lambda m, e: lambda *x: m(*x)[:-1], observer="skip")
    with pytest.raises(Incomplete, match="4 taps fired in this call and 5 were compiled in"):
        compiled(IDS)


@pytest.mark.parametrize(
    "inputs", [{"input_ids": IDS}, {"input_ids": IDS, "use_cache": True}], ids=["left out", "asked"]
)
def test_a_cache_that_a_graph_cannot_return_is_said_and_cannot_be_used_by_mistake(inputs, caplog, tmp_path):
    model = architectures.make("llama")
    compiled = ls.compile(model, inputs, backend=torch.jit.trace)
    said = "the model returns a DynamicCache, which a compiled graph cannot: it is left out"
    assert said in compiled.notes
    assert said in caplog.text
    loaded = ls.load_compiled(compiled.save(tmp_path / "compiled"))
    for each in (compiled, loaded):
        cache = each(**inputs).past_key_values
        assert repr(cache) == "<a DynamicCache that the compiled graph left out>"
        with pytest.raises(AttributeError, match=r"backend='inductor', which can.*use_cache=False"):
            cache.get_seq_length()
        with pytest.raises(Unsupported, match=r"it was called with input_ids.*past_key_values=LeftOut"):
            each(**inputs, past_key_values=cache)


def test_a_model_that_returns_no_cache_has_nothing_left_out(caplog):
    model = architectures.make("llama")
    compiled = ls.compile(model, {"input_ids": IDS, "use_cache": False}, backend=torch.jit.trace)
    assert compiled(input_ids=IDS, use_cache=False).past_key_values is None
    assert not any("left out" in note for note in compiled.notes)
    assert "left out" not in caplog.text


@pytest.mark.stress
def test_a_cache_comes_through_inductor():
    model = architectures.make("llama")
    compiled = ls.compile(model, {"input_ids": IDS, "use_cache": True}, backend="inductor")
    with torch.no_grad():
        cache = compiled(input_ids=IDS, use_cache=True).past_key_values
    assert cache.get_seq_length() == IDS.shape[1]
    assert compiled.notes == []


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, scale=2.0, *more):
        return sum(more, self.inner(x)) * (1.0 if scale is None else scale)


def test_an_explicit_none_is_not_the_default():
    model, x = Scaled(), torch.randn(2, 4)
    compiled = ls.compile(model, (x, None), backend=torch.jit.trace, record_layer_outputs="inner")
    assert_same_bits(compiled(x + 1, None), model.inner(x + 1))
    compiled = ls.compile(model, (x, 2.0), backend=torch.jit.trace, record_layer_outputs="inner")
    with pytest.raises(
        Unsupported, match=r"compiled for the arguments x, scale=2\.0; it was called with x, scale=None"
    ):
        compiled(x, None)


def test_arguments_without_names_follow_those_with_one():
    model, x = Scaled(), torch.randn(2, 4)
    compiled = ls.compile(model, (x, 3.0, x, x), backend=torch.jit.trace, record_layer_outputs="inner")
    assert_same_bits(compiled(x + 1, 3.0, x, x - 2), model(x + 1, 3.0, x, x - 2))


def test_a_call_that_fails_leaves_nothing_of_the_one_before(traced):
    _, compiled = traced
    loaded_too = ls.compile(tiny(), (IDS,), backend=eager, observer="skip")
    for each in (compiled, loaded_too):
        for wrong in ((), (IDS + 10**6,)):  # refused before the graph, and failing in it
            each(IDS)
            assert ls.get_layer_hidden_states()
            with pytest.raises((Unsupported, RuntimeError, IndexError)):
                each(*wrong)
            assert ls.get_layer_hidden_states() is None
            assert each.taps() == {}


def test_an_output_that_cannot_be_made_again_is_refused_when_it_is_compiled():
    model = zoo.Holder(lambda m, x: UserDict(y=m.inner(x)), inner=nn.Linear(4, 4))
    with pytest.raises(Unsupported, match=r"Holder returns a UserDict, which cannot be made again.*backend='inductor'"):
        ls.compile(model, (torch.ones(2, 4),), backend=eager, record_layer_outputs="inner")


def test_what_a_compiler_says_is_logged(caplog):
    def talking(flat, example, *, dynamic, precise):
        return Made(flat, ("it is only for Tuesdays",))

    backend = SimpleNamespace(NAME="talking", LIVE=False, compile=talking, call=lambda artefact, x: artefact(*x))
    compiled = compile_with(backend)
    assert compiled.notes == ["it is only for Tuesdays"]
    assert "it is only for Tuesdays" in caplog.text


def compile_with(backend):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "named", lambda _: backend)
        return ls.compile(tiny(), (IDS,), backend="talking")


# The observer effect ------------------------------------------------------------------------------


def test_the_observer_effect_is_measured_once_at_the_first_call():
    runs = []

    def counting(module, example_inputs):
        runs.append(0)
        number = len(runs) - 1

        def call(*tensors):
            runs[number] += 1
            return module(*tensors)

        return call

    compiled = ls.compile(tiny(), (IDS,), backend=counting)
    assert compiled.observer_effect is None
    compiled(IDS)
    compiled(IDS)
    assert runs == [2, 1]  # tapped, untapped
    assert compiled.observer_effect.identical


def test_an_effect_that_the_taps_have_is_told():
    def fusing(module, example_inputs):
        taps = len(module(*example_inputs)) > 1
        return lambda *x: [
            t + 0.5 if taps and t.is_floating_point() and at == 0 else t for at, t in enumerate(module(*x))
        ]

    compiled = ls.compile(tiny(), (IDS,), backend=fusing)
    compiled(IDS)
    assert compiled.observer_effect.max_abs == pytest.approx(0.5, rel=1e-3)
    assert not compiled.observer_effect.identical


def test_it_can_be_left_out_and_says_so():
    compiled = ls.compile(tiny(), (IDS,), backend=eager, observer="skip")
    compiled(IDS)
    assert str(compiled.observer_effect) == "not measured: observer='skip'"
    with pytest.raises(Unsupported, match="observer='never'"):
        ls.compile(tiny(), (IDS,), backend=eager, observer="never")


def test_a_recording_may_leave_it_out_of_an_object_that_was_not_called_yet():
    compiled = ls.compile(tiny(), (IDS,), backend=eager)
    with torch.no_grad(), ls.record(compiled, "model.layers.0", options=ls.RecordOptions(observer="skip")) as rec:
        compiled(IDS)
    assert rec.run.manifest.settings["observer_effect"] == "not measured: observer='skip'"
    assert compiled.observer_effect is None
    with torch.no_grad(), ls.record(compiled, "model.layers.0") as rec:
        compiled(IDS)
    assert rec.run.manifest.settings["observer_effect"] == "the taps change nothing in the output"


@pytest.mark.parametrize("change", [lambda p: p.mul_(0.5), lambda p: p.data.mul_(0.5)], ids=["in place", "behind"])
def test_the_taps_are_not_blamed_for_weights_that_changed_since(change):
    model = tiny()

    def frozen(module, example_inputs):
        return copy.deepcopy(module)

    compiled = ls.compile(model, (IDS,), backend=frozen)
    for parameter in model.parameters():
        change(parameter)
    compiled(IDS)
    assert str(compiled.observer_effect).startswith("not measured: the model's weights changed")
    unchanged = ls.compile(model, (IDS,), backend=frozen)
    unchanged(IDS)
    assert unchanged.observer_effect.identical


def test_an_untapped_model_that_fails_does_not_take_the_call_with_it():
    made = []

    def once(module, example_inputs):
        made.append(module)
        if len(made) > 1:
            raise MemoryError("no room for two")
        return module

    model = tiny()
    compiled = ls.compile(model, (IDS,), backend=once)
    assert_same_bits(compiled(IDS), model(IDS))
    assert "not measured: the untapped model failed" in str(compiled.observer_effect)
    assert "no room for two" in str(compiled.observer_effect)


def test_the_measure_leaves_random_state_and_buffers_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    x = torch.randn(8, 4)
    plain = zoo.Holder(lambda m, x: m.inner(x), inner=model)
    compiled = ls.compile(plain, (x,), backend=eager, record_layer_outputs="inner.0")
    before = model[1].running_mean.clone()
    torch.manual_seed(3)
    compiled(x)
    after, state = model[1].running_mean.clone(), torch.random.get_rng_state()
    model[1].running_mean.copy_(before)
    torch.manual_seed(3)
    model(x)
    assert_same_bits(model[1].running_mean, after)
    assert torch.equal(torch.random.get_rng_state(), state)


# What is refused, and what a configuration says --------------------------------------------------


def test_what_is_no_module_is_refused():
    with pytest.raises(Unsupported, match=r"give the torch\.nn\.Module it was made from"):
        ls.compile(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), (torch.zeros(1, 2),))
    with pytest.raises(Unsupported, match="backend='tpu' is not known"):
        ls.compile(nn.Linear(2, 2), (torch.zeros(1, 2),), backend="tpu")


def test_what_a_compiler_cannot_compile_is_told_in_a_sentence():
    def failing(module, example_inputs):
        try:
            raise LookupError("no kernel for aten.odd.\nAnd much more.")
        except LookupError as error:
            raise RuntimeError("step 3 of 3 failed") from error

    says = r"^failing cannot compile TinyTransformer.*LookupError: no kernel for aten\.odd\. Try"
    with pytest.raises(Unsupported, match=says):
        ls.compile(tiny(), (IDS,), backend=failing)


@pytest.mark.parametrize("place", ["model", "config"])
@pytest.mark.parametrize("said", [True, False])
def test_the_configuration_of_nxd_inference_is_honoured(place, said):
    model = tiny()
    config = SimpleNamespace(record_layer_outputs=said)
    if place == "model":
        model.neuron_config = config
    else:
        model.config = SimpleNamespace(neuron_config=config)
    assert bool(ls.compile(model, (IDS,), backend=eager).table.taps) is said
    assert ls.compile(model, (IDS,), backend=eager, record_layer_outputs=True).table.taps


@pytest.mark.parametrize("backend", ["torchscript", "export"])
def test_each_part_keeps_its_own_mode(backend):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
    model[1].eval()  # frozen, as in fine-tuning
    x = torch.randn(8, 4) * 3 + 1
    expected = model(x)
    compiled = ls.compile(model, (x,), backend=backend, record_layer_outputs="*")
    assert torch.equal(compiled(x), expected)
    assert [part.training for part in model] == [True, False, True]


def test_what_a_module_counts_has_not_moved_when_it_is_compiled():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    model, x = Counting(4, 4), torch.randn(2, 4)
    compiled = ls.compile(model, (x,), backend="torchscript", record_layer_outputs="**")
    assert model.calls == 0
    assert torch.equal(compiled(x), model(x))
