"""The stack of decoder layers, and the words for some of them."""

import pytest
import torch
from torch import nn

from layerscope.errors import Ambiguous, NoSuchPoint
from layerscope.models.minimax import minimax_m2
from layerscope.models.tiny import tiny_transformer
from layerscope.modes.layer_taps import chosen_layers, stack_of


def test_the_layers_are_the_numbered_stack_by_depth():
    assert stack_of(tiny_transformer(layers=12)) == [f"model.layers.{i}" for i in range(12)]


def test_experts_inside_layers_are_not_taken_for_layers():
    assert stack_of(minimax_m2())[-1] == "model.layers.61"


@pytest.mark.parametrize(
    ("words", "depths"),
    [("first", [0]), ("first,last", [0, 3]), ("last,first", [3, 0]), ("all", [0, 1, 2, 3]), ("1,-1,1", [1, 3])],
)
def test_words_and_numbers_choose_layers(words, depths):
    model = tiny_transformer(layers=4, hidden=16, heads=2)
    assert chosen_layers(model, words) == [f"model.layers.{i}" for i in depths]


def test_any_other_text_is_a_pattern():
    model = tiny_transformer(layers=2, hidden=16, heads=2)
    assert chosen_layers(model, "model.layers.{0,-1}.mlp") == ["model.layers.{0,-1}.mlp"]


def test_a_layer_that_is_not_there_is_said_with_those_that_are():
    model = tiny_transformer(layers=2, hidden=16, heads=2)
    with pytest.raises(NoSuchPoint, match=r"no layer 2 among the 2 of TinyTransformer, model\.layers\.0 to model"):
        chosen_layers(model, "0,2")


def test_a_model_without_a_stack_says_so():
    with pytest.raises(NoSuchPoint, match="no decoder layers among the 1 points of Linear"):
        chosen_layers(nn.Linear(2, 2), "first")


def test_two_stacks_alike_are_not_guessed_between():
    model = nn.Module()
    model.left, model.right = (nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]) for _ in range(2))
    with pytest.raises(Ambiguous, match=r"left\.\*, right\.\*"):
        chosen_layers(model, "all")


def test_a_name_with_signs_of_the_pattern_language_is_escaped():
    model = nn.ModuleDict({"a:b": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert chosen_layers(model, "last") == [r"a\:b.1"]
    assert torch.is_tensor(model["a:b"](torch.ones(1, 2)))
