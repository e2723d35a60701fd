"""The embedding where nothing of the model's own makes it; the real architectures are in test_stack.py."""

import torch
from torch import nn

import zoo
from layerscope.compiled.embedding import embedding_of

LAYERS = ["blocks.0", "blocks.1"]


def model(forward, **more):
    return zoo.Holder(forward, blocks=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), **more)


def test_an_embedding_that_the_model_itself_makes_is_the_input_of_the_first_layer():
    found = embedding_of(model(lambda m, x: m.blocks[0](x + 1)), LAYERS, (torch.zeros(1, 4),), {})
    assert (str(found.point), found.call) == ("blocks.0:input[0]", 0)


def test_of_an_embedding_that_is_called_twice_the_call_counts_that_the_first_layer_sees():
    shared = model(lambda m, x: (m.embed(x), m.blocks[0](m.embed(x + 1)))[1], embed=nn.Embedding(9, 4))
    found = embedding_of(shared, LAYERS, (torch.zeros(1, 4, dtype=torch.long),), {})
    assert (str(found.point), found.call) == ("embed:output", 1)


def test_no_embedding_where_the_first_layer_does_not_run():
    assert embedding_of(model(lambda m, x: x), LAYERS, (torch.zeros(1, 4),), {}) is None


def test_the_forward_ends_at_the_first_layer():
    ran = []
    whole = model(lambda m, x: ran.append(m.blocks[0](x)))
    embedding_of(whole, LAYERS, (torch.zeros(1, 4),), {})
    assert ran == []
