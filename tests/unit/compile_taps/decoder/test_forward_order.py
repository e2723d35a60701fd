"""A forward is followed: the order of its calls, blocks from the outside alone, and ids that are the caller's."""

import pytest
import torch
from torch import nn

import zoo
from asserts import assert_no_hooks_left
from layerscope.compile_taps.decoder import followed, lists_of

IDS = torch.tensor([[5, 3, 3], [1, 0, 2]])


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def model(forward=lambda m, ids: m.layers[1](m.layers[0](m.tokens(ids) + m.positions(torch.arange(3))))):
    tables = {"tokens": nn.Embedding(9, 4), "positions": nn.Embedding(9, 4)}
    return zoo.Holder(forward, layers=nn.ModuleList([block(), block()]), **tables)


def way(model, *args, **kwargs):
    with torch.no_grad():
        return followed(model, lists_of(model), args, kwargs)


def test_calls_are_in_the_order_they_begin_and_blocks_are_not_looked_into():
    found = way(model(), IDS)
    assert found.began == ["", "tokens", "positions", "layers.0", "layers.1"]
    assert found.blocks == {"layers.0", "layers.1"}
    assert found.beside == set()


def test_ids_of_the_caller_are_told_from_others_by_memory_and_by_value():
    assert way(model(), IDS).tables == {"tokens": 0, "positions": 2}
    assert way(model(), IDS[:, ::2].repeat(1, 2)[:, :3]).tables["tokens"] == 0
    copying = model(lambda m, ids: m.layers[0](m.tokens(ids.long())))
    assert way(copying, IDS.int()).tables == {"tokens": 1}


def test_two_blocks_that_are_given_the_same_tensor_are_side_by_side():
    def beside(m, ids):
        x = m.tokens(ids)
        return m.layers[0](x) + m.layers[1](x)

    assert way(model(beside), IDS).beside == {"layers"}


def test_memory_that_is_used_again_is_not_the_same_tensor():
    def again(m, ids):
        for layer in m.layers:
            layer(torch.ones(2, 3, 4))  # freed by the caller before the next one is made
        return ids

    assert way(model(again), IDS).beside == set()


def test_the_model_itself_gets_no_hooks():
    whole = model()
    way(whole, IDS)
    assert_no_hooks_left(whole)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_sparse_tensors_between_blocks_are_followed_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = zoo.Holder(
        lambda m, x, mask: m.inner(x, src_key_padding_mask=mask), inner=nn.TransformerEncoder(layer, 2)
    )
    padded = torch.tensor([[False, False, True], [False, False, False]])  # torch makes a nested tensor of it
    found = way(encoder.eval(), torch.zeros(2, 3, 8), padded)
    assert found.beside == set()
    assert str(found.embeddings["inner.layers"].point) == "inner.layers.0:input[0]"
    sparse = model(lambda m, ids: m.layers[1](m.layers[0](torch.eye(4).to_sparse()).to_sparse()))
    assert way(sparse, IDS).beside == set()
