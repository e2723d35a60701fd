"""The layers, the embedding and the head are found by structure, in the real architectures."""

import pytest
import torch
from torch import nn

import architectures
from layerscope.compiled.embedding import embedding_of
from layerscope.compiled.stack import head_of, stack_of

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


@pytest.mark.parametrize("name", EXPECTED)
def test_the_real_architectures(name):
    stack, embedding, head = EXPECTED[name]
    model, inputs = architectures.make(name), architectures.inputs(name)
    layers = stack_of(model)
    assert layers == [f"{stack}.{n}" for n in range(3)]
    assert head_of(model) == head
    with torch.no_grad():
        found = embedding_of(model, layers, (), inputs)
        first = []
        hook = model.get_submodule(layers[0]).register_forward_pre_hook(
            lambda m, a, k: first.append((a, k)), with_kwargs=True
        )
        made = []
        module = model.get_submodule(found.point.name)
        other = module.register_forward_hook(lambda m, a, out: made.append(out))
        model(**inputs)
        hook.remove()
        other.remove()
    args, kwargs = first[0]
    given = args[0] if args else kwargs["hidden_states"]
    assert found.point.name == embedding
    assert torch.equal(made[found.call], given)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)


def test_lists_inside_blocks_and_lists_of_single_layers_are_no_stack():
    class Expert(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(9))

    model = nn.Module()
    model.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))
    model.layers = nn.ModuleList(Expert() for _ in range(2))
    assert stack_of(model) == ["layers.0", "layers.1"]


def test_a_sequential_of_blocks_is_a_stack_and_one_of_layers_is_not():
    assert stack_of(nn.Sequential(Block(), Block())) == ["0", "1"]
    assert stack_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == []


def test_the_biggest_of_several_counts_unless_one_is_the_decoder():
    model = nn.Module()
    model.encoder = nn.ModuleList(Block(8) for _ in range(4))
    model.decoder = nn.ModuleList(Block(2) for _ in range(2))
    assert stack_of(model) == ["decoder.0", "decoder.1"]
    model = nn.Module()
    model.vision = nn.ModuleList(Block(2) for _ in range(4))
    model.text = nn.ModuleList(Block(8) for _ in range(2))
    assert stack_of(model) == ["text.0", "text.1"]
