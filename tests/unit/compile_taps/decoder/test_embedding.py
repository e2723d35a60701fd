"""Who made what the first layer is given; the real architectures are in test_stack.py."""

import pytest
import torch
import transformers
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.compile_taps.decoder import followed
from layerscope.compile_taps.decoder.embedding import Makers

IDS = torch.arange(8).view(2, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        return x + self.layer(x) if mask is None else x * mask + self.layer(x)


def model(forward, **more):
    return zoo.Holder(forward, blocks=nn.ModuleList([Block(), Block()]), **more)


def embedding(model, *args):
    with torch.no_grad():
        found = followed(model, {"blocks": ["blocks.0", "blocks.1"]}, args, {}).embeddings.get("blocks")
    return found and (str(found.point), found.call)


def test_an_embedding_that_the_model_itself_makes_is_the_input_of_the_first_layer():
    assert embedding(model(lambda m, x: m.blocks[0](x + 1)), torch.zeros(1, 4)) == ("blocks.0:input[0]", 0)


def test_of_an_embedding_that_is_called_twice_the_call_counts_that_the_first_layer_sees():
    shared = model(lambda m, x: (m.embed(x), m.blocks[0](m.embed(x + 1)))[1], embed=nn.Embedding(9, 4))
    assert embedding(shared, IDS) == ("embed:output", 1)


def test_no_embedding_where_no_layer_runs():
    assert embedding(model(lambda m, x: x), torch.zeros(1, 4)) is None


def test_an_embedding_that_is_added_to_in_place_is_not_what_its_module_gave():
    def added(m, ids):
        x = m.embed(ids)
        x += 1
        return m.blocks[0](x)

    holder = model(added, embed=nn.Embedding(9, 4))
    assert embedding(holder, IDS) == ("blocks.0:input[0]", 0)
    compiled = ls.compile(holder, (IDS,), backend="torchscript", record_layer_outputs={0})
    with torch.no_grad():
        compiled(IDS)
        assert_same_bits(ls.get_layer_hidden_states()[0], holder.embed(IDS) + 1)


def test_what_is_given_before_the_states_is_not_taken_for_them():
    masked = model(lambda m, x: m.blocks[0](mask=torch.ones(4), x=m.embed(x)), embed=nn.Embedding(9, 4))
    assert embedding(masked, IDS) == ("embed:output", 0)
    by_own_code = model(lambda m, x: m.blocks[0](mask=torch.ones(4), x=m.embed(x) * 2), embed=nn.Embedding(9, 4))
    assert embedding(by_own_code, IDS) == ("blocks.0:input[x]", 0)


def test_of_modules_that_pass_a_tensor_on_the_outermost_made_it_and_who_made_another_did_not():
    makers, x = Makers(), torch.zeros(3)
    makers.gave("embed.drop", x)
    makers.gave("embed", (x, torch.ones(3)))
    assert str(makers.of(x).point) == "embed:output[0]"
    assert makers.of(torch.zeros(3)) is None
    makers.forget()
    assert makers.of(x) is None


@pytest.mark.parametrize("backend", ["torchscript", "export"])
def test_the_embedding_comes_first_where_the_models_own_code_adds_positions(backend):
    def forward(m, ids):
        x = m.tokens(ids) + m.positions(torch.arange(ids.shape[1]))
        for block in m.blocks:
            x = block(x)
        return x

    holder = model(forward, tokens=nn.Embedding(30, 4), positions=nn.Embedding(16, 4)).eval()
    compiled = ls.compile(holder, (IDS,), backend=backend)
    with torch.no_grad():
        compiled(IDS + 3)
        first = holder.tokens(IDS + 3) + holder.positions(torch.arange(4))
        expected = [first, holder.blocks[0](first), holder.blocks[1](holder.blocks[0](first))]
    for state, oracle in zip(ls.get_layer_hidden_states(), expected, strict=True):
        assert_same_bits(state, oracle)
    assert compiled.table.embedded


def test_opt_has_the_hidden_states_that_transformers_says():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 3}
    config = transformers.OPTConfig(vocab_size=99, num_attention_heads=2, max_position_embeddings=32, **sizes)
    opt = transformers.OPTForCausalLM(config).eval()
    inputs = {"input_ids": IDS, "use_cache": False}
    compiled = ls.compile(opt, inputs, backend="torchscript")
    with torch.no_grad():
        compiled(input_ids=IDS + 5, use_cache=False)
        expected = opt(input_ids=IDS + 5, use_cache=False, output_hidden_states=True).hidden_states
    found = ls.get_layer_hidden_states()
    assert len(found) == len(expected) == 4
    for state, oracle in zip(found[:3], expected, strict=False):  # transformers' last one is normalised
        assert_same_bits(state, oracle)
