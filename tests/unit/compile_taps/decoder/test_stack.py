"""The layers and the embedding are found by structure and by how they run, in the real architectures."""

import pytest
import torch
from torch import nn

import architectures
import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.compile_taps.decoder import followed, head_of, lists_of, stack_of
from layerscope.errors import NoSuchPoint

EXPECTED = {
    "llama": ("model.layers", "model.embed_tokens", "lm_head"),
    "gpt2": ("transformer.h", "transformer.drop", "lm_head"),
    "bert": ("encoder.layer", "embeddings", None),
    "mamba": ("backbone.layers", "backbone.embeddings", "lm_head"),
    "minimax-m2": ("model.layers", "model.embed_tokens", "lm_head"),
    "t5": ("decoder.block", "decoder.embed_tokens", "lm_head"),
    "vit": ("layers", "embeddings", None),
    "convnet": ("blocks", "stem", None),
}


def stack(model, *args, **kwargs):
    lists = lists_of(model)
    with torch.no_grad():
        return stack_of(model, lists, followed(model, lists, args, kwargs))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_real_architectures(name):
    listed, embedding, head = EXPECTED[name]
    model, inputs = architectures.make(name), architectures.inputs(name)
    with torch.no_grad():
        way = followed(model, lists_of(model), (), inputs)
    found = stack_of(model, lists_of(model), way)
    assert found.layers == found.ran == [f"{listed}.{n}" for n in range(3)]
    assert found.disorder == ""
    assert head_of(model, found, way) == head
    first, made = [], []
    given = model.get_submodule(found.layers[0]).register_forward_pre_hook(
        lambda m, a, k: first.append((a, k)), with_kwargs=True
    )
    module = model.get_submodule(found.embedding.point.name)
    gave = module.register_forward_hook(lambda m, a, out: made.append(out))
    with torch.no_grad():
        model(**inputs)
    given.remove()
    gave.remove()
    args, kwargs = first[0]
    assert found.embedding.point.name == embedding
    assert torch.equal(made[found.embedding.call], args[0] if args else kwargs["hidden_states"])


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + self.layer(x)


def blocks(count, width=4):
    return nn.ModuleList(Block(width) for _ in range(count))


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def test_lists_inside_blocks_and_lists_of_single_layers_are_no_stack():
    class Expert(Block):
        def __init__(self):
            super().__init__()
            self.experts = blocks(9)

    model = nn.Module()
    model.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))
    model.layers = nn.ModuleList(Expert() for _ in range(2))
    assert lists_of(model) == {"layers": ["layers.0", "layers.1"]}


def test_a_sequential_of_blocks_is_a_stack_and_one_of_layers_is_not():
    assert stack(nn.Sequential(Block(), Block()), X).layers == ["0", "1"]
    assert stack(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X) is None


def test_the_biggest_of_several_counts_unless_one_is_the_decoder_of_an_encoder():
    def both(m, x):
        first, second = (through(layers, x.repeat(1, layers[0].layer.in_features // 4)) for layers in m.children())
        return first.sum() + second.sum()

    assert stack(zoo.Holder(both, encoder=blocks(4, 8), decoder=blocks(2)), X).layers == ["decoder.0", "decoder.1"]
    assert stack(zoo.Holder(both, vision=blocks(4), text=blocks(2, 8)), X).layers == ["text.0", "text.1"]
    assert len(stack(zoo.Holder(both, layers=blocks(6), decoder=blocks(2)), X).layers) == 6


def test_blocks_that_run_side_by_side_are_no_stack_whatever_they_are_under():
    heads = zoo.Holder(lambda m, x: m.heads[0](x) + m.heads[1](x), heads=blocks(2, 4))
    model = zoo.Holder(lambda m, x: m.decoder(through(m.encoder, x)), encoder=blocks(1), decoder=heads)
    assert stack(model, X).layers == ["encoder.0"]
    assert stack(heads, X) is None
    with pytest.raises(NoSuchPoint, match="no list of like blocks that run one after the other"):
        ls.compile(heads, (X,), backend=lambda m, e: m)


def test_a_state_that_is_changed_in_place_between_blocks_is_not_the_same_one():
    def residual(m, x):
        x = x.clone()
        for layer in m.layers:
            x += layer(x)
        return x

    assert stack(zoo.Holder(residual, layers=blocks(3)), X).layers == ["layers.0", "layers.1", "layers.2"]


def test_a_list_that_never_runs_is_no_stack():
    model = zoo.Holder(lambda m, x: through(m.layers, x), layers=blocks(2), unused=blocks(9))
    assert stack(model, X).layers == ["layers.0", "layers.1"]


def test_layers_that_run_in_another_order_give_their_states_in_that_order_and_it_is_said():
    model = zoo.Holder(lambda m, x: through([m.layers[n] for n in (3, 0, 2)], x), layers=blocks(4))
    compiled = ls.compile(model, (X,), backend="torchscript")
    with torch.no_grad():
        compiled(X)
        expected = [X, *(through([model.layers[n] for n in (3, 0, 2)[:count]], X) for count in (1, 2, 3))]
    for state, oracle in zip(ls.get_layer_hidden_states(), expected, strict=True):
        assert_same_bits(state, oracle)
    assert compiled.table.embedded
    assert "the layers run in the order 3, 0, 2, and their hidden states come in that order" in compiled.notes
    assert [(each.point, each.reason) for each in compiled.missing] == [("layers.1:output", "never called")]


def test_a_number_is_a_place_in_the_list_whatever_the_order_of_running():
    model = zoo.Holder(lambda m, x: through([m.layers[n] for n in (3, 0, 2)], x), layers=blocks(4))
    compiled = ls.compile(model, (X,), backend=lambda m, e: m, record_layer_outputs={0, -1})
    compiled(X)
    assert list(compiled.taps()) == ["layers.3:input[0]", "layers.3", "layers.0"]


def test_one_block_that_runs_again_and_again_is_a_stack():
    model = zoo.Holder(lambda m, x: through([m.layers[0]] * 3, x), layers=blocks(1))
    compiled = ls.compile(model, (X,), backend=lambda m, e: m)
    compiled(X)
    assert len(ls.get_layer_hidden_states()) == 4
    assert compiled.notes == []
