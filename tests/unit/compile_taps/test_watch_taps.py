"""A compiled model is recorded as any other: what was tapped, its ends, its logits."""

import pytest
import torch

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.errors import NoSuchPoint, Unsupported
from layerscope.models.tiny import tiny_transformer
from layerscope.runtimes import find
from runtimes.contract import Contract

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def model():
    return tiny_transformer(layers=2, hidden=16, heads=2)


@pytest.fixture(scope="module")
def compiled(model):
    return ls.compile(model, (IDS,), backend="torchscript")


def test_the_places_are_what_was_tapped(compiled):
    places = find(compiled).points(compiled)
    assert [place.name for place in places] == [
        "", "model.layers.0", "model.layers.1", "model.embed_tokens", "lm_head", "logits",
    ]  # fmt: skip
    assert places[1].types[0] == "DecoderLayer"


def test_a_recording_has_the_values_of_each_call(compiled, model, tmp_path):
    with ls.record(compiled, ["model.layers.*", "logits", "."], to=tmp_path / "run") as rec, torch.no_grad():
        first = compiled(IDS)
        second = rec.model(IDS + 5)
    assert rec.missing == []
    run = ls.open_run(tmp_path / "run")
    assert run.manifest.runtime == "torchscript, taps compiled in"
    for step, value in enumerate((first, second)):
        assert_same_bits(run.tensor("logits", step=step), value)
        assert_same_bits(run.tensor(".", step=step), value)
    with torch.no_grad(), ls.record(model, "model.layers.1") as expected:
        model(IDS + 5)
    assert_same_bits(run.tensor("model.layers.1", step=1), expected["model.layers.1"])


def test_nothing_is_recorded_after_the_block(compiled):
    with ls.record(compiled, "model.layers.0") as rec, torch.no_grad():
        compiled(IDS)
    compiled(IDS)
    assert len(rec.run.moments) == 1


def test_two_recordings_of_one_object_do_not_disturb_each_other(compiled):
    with ls.record(compiled, "model.layers.0") as outer, torch.no_grad():
        compiled(IDS)
        with ls.record(compiled, "model.layers.1") as inner:
            compiled(IDS + 1)
        compiled(IDS + 2)
    assert [len(rec.run.moments) for rec in (outer, inner)] == [3, 1]


def test_what_was_not_tapped_is_refused_with_the_way_out(compiled):
    with pytest.raises(NoSuchPoint, match="nearest"):
        ls.record(compiled, "model.layers.0.mlp")
    with pytest.raises(Unsupported, match=r"model\.layers\.0:input was not tapped when the model was compiled"):
        ls.record(compiled, "model.layers.0:input")
    with pytest.raises(Unsupported, match="no operations to watch"):
        ls.record(compiled, "op:aten.mm")


def test_what_never_fires_is_missing_with_the_reason_known_since_compiling():
    model, args = zoo.never_called()
    compiled = ls.compile(model, args, backend="torchscript", record_layer_outputs=["used", "unused"])
    with ls.record(compiled, ["used", "unused"]) as rec:
        compiled(*args)
    assert [(m.point, m.reason) for m in rec.missing] == [("unused:output", "never called")]


def test_what_is_loaded_is_recorded_too(compiled, tmp_path):
    loaded = ls.load_compiled(compiled.save(tmp_path / "saved"))
    with ls.record(loaded, "model.layers.*", to=tmp_path / "run") as rec, torch.no_grad():
        loaded(IDS)
    assert [str(point) for point in rec.run.points] == ["model.layers.0:output", "model.layers.1:output"]


def test_the_runtime_tells_what_the_taps_change(compiled):
    compiled(IDS)
    assert find(compiled).notes(compiled) == {"observer_effect": "the taps change nothing in the output"}


class TestTheContractOfEveryRuntime(Contract):
    """What is compiled with taps everywhere keeps the promises of every runtime."""

    def prepare(self, model, x):
        return ls.compile(model, (x,), backend="torchscript", record_layer_outputs="**:input,output", observer="skip")
