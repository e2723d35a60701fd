"""What `record_layer_outputs` asks for."""

import numpy as np
import pytest
from torch import nn

from layerscope.compile_taps.decoder import lists_of
from layerscope.compile_taps.layer_points import asked
from layerscope.errors import BadText, NoSuchPoint, Unsupported
from layerscope.models.tiny import tiny_transformer

MODEL = tiny_transformer(layers=3, hidden=8, heads=2)
[LAYERS] = lists_of(MODEL).values()


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


def test_what_can_be_gone_through_once_gives_all_of_its_items():
    names = ["model.layers.0", "model.layers.1"]
    expected = ["model.layers.0:output", "model.layers.1:output"]
    assert points(name for name in names) == points(map(str, names)) == expected
    assert points(n for n in (0, 1)) == points(iter([1, 0])) == points(range(2)) == points(np.arange(2)) == expected


def test_numbers_and_patterns_go_together():
    assert points([0, "model.layers.1"]) == points([0, 1])
    assert points([-1, "**.mlp", "!model.layers.{0,1}.mlp"]) == ["model.layers.2:output", "model.layers.2.mlp:output"]
    assert points([0, 1, "!model.layers.1"]) == ["model.layers.0:output"]


def test_of_a_number_the_hidden_states_are_meant_and_of_a_name_all_that_it_returns():
    assert asked(MODEL, [0, 1], LAYERS).states_alone == {"model.layers.0", "model.layers.1"}
    assert asked(MODEL, [0, 1, "model.layers.1"], LAYERS).states_alone == {"model.layers.0"}
    assert asked(MODEL, "model.layers.1", LAYERS).states_alone == frozenset()
    assert asked(MODEL, [1, "model.layers.1:input"], LAYERS).states_alone == {"model.layers.1"}


@pytest.mark.parametrize(
    ("record", "error", "says"),
    [
        ({3}, NoSuchPoint, "there is no layer 3: TinyTransformer has 3, from 0"),
        ("model.blocks.*", NoSuchPoint, "nearest"),
        ("model.norm:grad_output", Unsupported, "computes a forward alone"),
        ("op:aten.mm", Unsupported, "operations are not tapped"),
        (3, BadText, "record_layer_outputs=3 is not known"),
        ([0, None], BadText, r"record_layer_outputs=\[0, None\] is not known"),
        ([True, False], BadText, "is not known"),
        ([], BadText, r"record_layer_outputs=\[\] asks for nothing; give False to compile without taps"),
        (iter(()), BadText, "asks for nothing"),
        ([0, 7, "model.norm"], NoSuchPoint, "there is no layer 7"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(record, error, says):
    with pytest.raises(error, match=says):
        asked(MODEL, record, LAYERS)


def test_a_model_without_a_list_of_blocks_has_its_layers_named():
    with pytest.raises(NoSuchPoint, match="no list of like blocks"):
        asked(nn.Linear(2, 2), True, [])
    with pytest.raises(NoSuchPoint, match="no list of like blocks"):
        asked(nn.Linear(2, 2), [0, "."], [])
