"""What is called logits: the model's own head, or a linear layer after the stack as wide as the vocabulary."""

import pytest
import torch
import transformers
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.compile_taps.decoder import followed, head_of, lists_of, stack_of

IDS = torch.arange(12).view(2, 6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(x)


def model(forward, **more):
    return zoo.Holder(forward, layers=nn.ModuleList(Block() for _ in range(2)), **more)


def through(m, x):
    for layer in m.layers:
        x = layer(x)
    return x


def embedded(m, ids):
    return through(m, m.tokens(ids) + m.positions(torch.arange(ids.shape[1])))


def head(model, *args, **kwargs):
    lists = lists_of(model)
    with torch.no_grad():
        way = followed(model, lists, args, kwargs)
    return head_of(model, stack_of(model, lists, way), way)


def tables(tokens=30, positions=8):
    return {"tokens": nn.Embedding(tokens, 8), "positions": nn.Embedding(positions, 8)}


def test_a_linear_layer_after_the_stack_as_wide_as_the_vocabulary_is_the_head():
    assert head(model(lambda m, ids: m.out(embedded(m, ids)), out=nn.Linear(8, 30), **tables()), IDS) == "out"


def test_one_as_wide_as_the_table_of_positions_is_not():
    pooled = model(lambda m, ids: m.pool(embedded(m, ids)), pool=nn.Linear(8, 8), **tables(positions=8))
    assert head(pooled, IDS) is None
    wide = model(lambda m, ids: m.pool(embedded(m, ids)), pool=nn.Linear(8, 16), **tables(positions=16))
    assert head(wide, IDS) is None
    assert "logits" not in taps(wide, IDS)


def test_one_that_runs_before_or_inside_the_stack_is_not():
    before = model(lambda m, ids: embedded(m, m.into(m.tokens(ids)).argmax(-1)), into=nn.Linear(8, 30), **tables())
    assert head(before, IDS) is None
    inside = model(embedded, **tables(tokens=30))
    inside.layers[1].layer = nn.Linear(8, 8)
    inside.tokens = nn.Embedding(8, 8)
    assert head(inside, IDS % 8) is None


def test_one_that_never_runs_is_not():
    assert head(model(embedded, out=nn.Linear(8, 30), lm_head=nn.Linear(8, 30), **tables()), IDS) is None


def test_a_copy_of_the_ids_is_still_the_callers():
    copying = model(lambda m, ids: m.out(embedded(m, ids.long())), out=nn.Linear(8, 30), **tables())
    assert head(copying, IDS.int()) == "out"


def test_of_a_decoder_the_vocabulary_counts_and_not_of_its_encoder():
    def forward(m, source, target):
        memory = through(m.encoder, m.source(source))
        return m.out(through(m.decoder, m.target(target) + m.positions(torch.arange(6)) + memory))

    parts = {"encoder": model(None), "decoder": model(None), "source": nn.Embedding(20, 8)}
    parts |= {"target": nn.Embedding(30, 8), "positions": nn.Embedding(8, 8), "out": nn.Linear(8, 30)}
    assert head(zoo.Holder(forward, **parts), IDS, IDS + 1) == "out"


def test_what_the_model_itself_gives_comes_first_and_nothing_is_no_answer():
    spoken = model(lambda m, ids: m.out(m.own(embedded(m, ids))), own=nn.Linear(8, 8), out=nn.Linear(8, 30), **tables())
    spoken.get_output_embeddings = lambda: spoken.own
    assert head(spoken, IDS) == "own"
    spoken.get_output_embeddings = lambda: None
    assert head(spoken, IDS) == "out"


def test_a_head_by_name_need_not_be_a_linear_layer():
    named = model(lambda m, ids: m.lm_head(embedded(m, ids)), lm_head=nn.Sequential(nn.Linear(8, 5)), **tables())
    assert head(named, IDS) == "lm_head"


def taps(model, *args, record=True, **kwargs):
    compiled = ls.compile(model, args or kwargs, backend="torchscript", record_layer_outputs=record)
    with torch.no_grad():
        compiled(*args, **kwargs)
    return compiled.taps()


def test_a_module_of_the_name_logits_keeps_its_name():
    x = torch.randn(2, 6, 8)
    own = model(lambda m, x: m.logits(through(m, x)), unused=nn.Embedding(8, 8), logits=nn.Linear(8, 5)).eval()
    assert "logits" not in taps(own, x)
    with torch.no_grad():
        assert_same_bits(taps(own, x, record="logits")["logits"], own(x))


def test_a_module_of_the_name_logits_is_not_hidden_by_the_head():
    def forward(m, ids):
        states = embedded(m, ids)
        return m.out(states).argmax(-1), m.logits(states)

    both = model(forward, out=nn.Linear(8, 30), logits=nn.Linear(8, 5), **tables()).eval()
    assert taps(both, IDS)["logits"].shape == (2, 6, 30)
    with torch.no_grad():
        assert_same_bits(taps(both, IDS, record=["layers.*", "logits"])["logits"], both(IDS)[1])


@pytest.mark.parametrize("name", ["bert", "clip"])
def test_base_models_have_no_logits_though_sizes_meet(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    if name == "bert":  # hidden states as wide as there are positions
        config = transformers.BertConfig(vocab_size=99, intermediate_size=96, **sizes)
        base, inputs = transformers.BertModel(config), {"input_ids": IDS}
    else:  # a projection as wide as the patches of the picture tower
        picture = {**sizes, "intermediate_size": 96, "image_size": 32, "patch_size": 4}
        del picture["max_position_embeddings"]
        config = transformers.CLIPConfig(
            text_config={"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 64, **sizes},
            vision_config=picture,
            projection_dim=65,
        )
        base, inputs = transformers.CLIPModel(config), {"input_ids": IDS, "pixel_values": torch.zeros(2, 3, 32, 32)}
    assert head(base.eval(), **inputs) is None
    if name == "bert":
        assert "logits" not in taps(base, **inputs)
