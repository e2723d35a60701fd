"""Which points are the layers of the main stack, against pairs written by hand."""

import pytest

from layerscope.errors import Ambiguous, NoSuchPoint
from layerscope.points import Point
from layerscope.store.layouts.decoder import decoder, leaf_of


def points(*texts):
    return [Point.parse(text) for text in texts]


@pytest.mark.parametrize(
    "stack", ["model.layers", "transformer.h", "layers", "blocks", "backbone.layers", "encoder.layer", "net"]
)
def test_the_numbered_stack_is_found_by_its_name(stack):
    names = [f"{stack}.{n}" for n in (0, 1, 2, 10)]
    found = decoder(points(*names, f"{stack}.0.mlp", "norm"), address="r")
    assert {depth: point.name for depth, point in found.layers.items()} == dict(zip((0, 1, 2, 10), names, strict=True))


def test_a_plain_sequence_of_modules_is_a_stack():
    assert list(decoder(points("0", "1", "2"), address="r").layers.values()) == points("0", "1", "2")


def test_the_experts_of_a_layer_are_not_the_layers():
    experts = [f"model.layers.{n}.mlp.experts.{e}" for n in range(2) for e in range(8)]
    found = decoder(points("model.layers.0", "model.layers.1", *experts), address="r")
    assert [point.name for point in found.layers.values()] == ["model.layers.0", "model.layers.1"]


def test_the_longer_of_two_stacks_is_taken_and_of_two_alike_none():
    vision = [f"vision.layers.{n}" for n in range(2)]
    text = [f"text.layers.{n}" for n in range(3)]
    assert next(iter(decoder(points(*vision, *text), address="r").layers.values())).name == "text.layers.0"
    with pytest.raises(Ambiguous, match=r"r has 2 stacks of 2 layers: vision\.layers\.\*, text\.layers\.\*; choose"):
        decoder(points(*vision, *text[:2]), address="r")


def test_a_tuple_is_its_first_leaf_and_gradients_are_no_layers():
    given = points("model.layers.0:output[0]", "model.layers.0:output[1]", "model.layers.1:output[hidden_states]")
    found = decoder([*given, *points("model.layers.2:grad_output")], address="r")
    assert found.layers == {0: given[0], 1: given[2]}


def test_the_input_is_the_first_argument_or_the_one_that_is_called_so():
    given = points("l.0:input[0]", "l.0:input[mask]", "l.1:input[mask]", "l.1:input[hidden_states]", "l.2:input[odd]")
    assert leaf_of(given, "l.0", "input") == given[0]
    assert leaf_of(given, "l.1", "input") == given[3]
    assert leaf_of(given, "l.2", "input") == given[4]
    assert leaf_of(given, "l.3", "input") is None


@pytest.mark.parametrize(
    ("names", "embedding"),
    [
        (["model.embed_tokens"], "model.embed_tokens"),
        (["transformer.wte", "transformer.wpe"], "transformer.wte"),
        (["embeddings.word_embeddings", "embeddings"], "embeddings"),
        (["backbone.embedding"], "backbone.embedding"),
        (["norm"], None),
    ],
)
def test_the_embedding_is_the_outermost_module_of_such_a_name(names, embedding):
    found = decoder(points(*names, "layers.0"), address="r").embedding
    assert (found.name if found else None) == embedding


def test_the_logits_are_the_models_own_or_those_of_the_head():
    assert decoder(points("layers.0", "lm_head"), address="r").logits == Point("lm_head")
    both = points("layers.0", "lm_head", ".:output[logits]")
    assert decoder(both, address="r").logits == Point("", leaf=("logits",))


def test_a_run_without_numbered_modules_says_what_is_looked_for():
    with pytest.raises(NoSuchPoint, match=r"no decoder layers among the 1 points of r: names such as model\.layers\.3"):
        decoder(points("norm"), address="r")
