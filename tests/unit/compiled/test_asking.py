"""What `record_layer_outputs` asks for."""

import pytest
from torch import nn

from layerscope.compiled.asking import asked
from layerscope.compiled.stack import stack_of
from layerscope.errors import BadText, NoSuchPoint, Unsupported
from layerscope.models.tiny import tiny_transformer

MODEL = tiny_transformer(layers=3, hidden=8, heads=2)
LAYERS = stack_of(MODEL)


def points(record):
    return [str(point) for point in asked(MODEL, record, LAYERS).points]


def test_true_is_every_layer_and_false_is_none():
    assert points(True) == [f"model.layers.{n}:output" for n in range(3)]
    assert points(False) == []


def test_numbers_are_layers_in_order_of_depth_and_count_from_the_end_too():
    assert points({2, 0}) == ["model.layers.0:output", "model.layers.2:output"]
    assert points([-1, 2]) == ["model.layers.2:output"]


def test_patterns_name_any_module_and_side():
    assert points("model.norm:input") == ["model.norm:input"]
    assert points(["**.mlp", "!model.layers.0.mlp"]) == ["model.layers.1.mlp:output", "model.layers.2.mlp:output"]


@pytest.mark.parametrize(
    ("record", "error", "says"),
    [
        ({3}, NoSuchPoint, "there is no layer 3: TinyTransformer has 3, from 0"),
        ("model.blocks.*", NoSuchPoint, "nearest"),
        ("model.norm:grad_output", Unsupported, "computes a forward alone"),
        ("op:aten.mm", Unsupported, "operations are not tapped"),
        (3, BadText, "record_layer_outputs=3 is not known"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(record, error, says):
    with pytest.raises(error, match=says):
        asked(MODEL, record, LAYERS)


def test_a_model_without_a_list_of_blocks_has_its_layers_named():
    with pytest.raises(NoSuchPoint, match="no list of like blocks"):
        asked(nn.Linear(2, 2), True, [])
