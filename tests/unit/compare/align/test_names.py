"""Names that mean the same, with the real module names of transformers' architectures and hand-written pairs."""

from functools import cache

import pytest
import torch

from aligned import outputs, paired, seen, why
from layerscope.compare.align.alignment import align
from layerscope.compare.align.names import Names, canonical, ending_of, numbers_of, tower_of
from layerscope.compare.align.run_points import RunPoint
from layerscope.points import Point


def test_the_prefix_of_an_architecture_is_no_part_of_what_a_name_means():
    names = Names.of(["bert.encoder.layer.3.output", "bert.pooler", "model.embed_tokens", "lm_head"])
    assert canonical(names, without=None)["bert.encoder.layer.3.output"] == "encoder.layers.3.output"
    assert canonical(names, without="encoder")["bert.encoder.layer.3.output"] == "layers.3.output"
    assert canonical(names, without=None)["model.embed_tokens"] == "embedding"
    assert canonical(names, without=None)["lm_head"] == "logits"


def test_numbers_ends_and_towers_are_read_from_a_name():
    assert [numbers_of(name) for name in ("h.3.mlp", "layer_3.mlp", "fc1")] == [(3,), (3,), ()]
    assert [ending_of(name) for name in ("layers.3", "layers.3.mlp.0", "")] == ["layers", "mlp", ""]
    assert [tower_of(name) for name in ("visual.blocks.0", "layers.0")] == ["visual", ""]


SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TOKENS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}
CONFIGS = {
    "Llama": SMALL | TOKENS,
    "GPT2": {"n_layer": 2, "n_embd": 16, "n_head": 2} | TOKENS,
    "Bert": SMALL | TOKENS,
    "T5": {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2} | TOKENS,
    "Mamba": {"num_hidden_layers": 2, "hidden_size": 16} | TOKENS,
    "MiniMaxM2": SMALL | TOKENS | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "ViT": SMALL,
}


@cache
def modules(architecture, head):
    """Return what can be called in a transformers model, children before parents as they finish."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{architecture}Config")(**CONFIGS[architecture])
    with torch.device("meta"):
        model = getattr(transformers, architecture + head)(config)
    names = [name for name, module in model.named_modules() if not isinstance(module, torch.nn.ModuleList)]
    return seen(*(Point(name).place for name in names))


FOREIGN = ("embedding", "layers.0", "layers.1", "logits")
AS_FOREIGN = {
    ("Llama", "ForCausalLM"): ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"),
    ("GPT2", "LMHeadModel"): ("transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"),
    ("Bert", "ForMaskedLM"): ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", None),
    ("Bert", "Model"): ("embeddings", "encoder.layer.0", "encoder.layer.1", None),
    ("Mamba", "ForCausalLM"): ("backbone.embeddings", "backbone.layers.0", "backbone.layers.1", "lm_head"),
    ("MiniMaxM2", "ForCausalLM"): ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"),
    ("ViT", "ForImageClassification"): ("vit.embeddings", "vit.layers.0", "vit.layers.1", None),
    ("T5", "ForConditionalGeneration"): (None, None, None, "lm_head"),  # two stacks, and no one says which
}


@pytest.mark.parametrize("architecture", AS_FOREIGN, ids="".join)
def test_a_foreign_dump_pairs_with_embedding_layers_and_logits_of_a_model_and_with_nothing_else(architecture):
    expected = {native: foreign for native, foreign in zip(AS_FOREIGN[architecture], FOREIGN, strict=True) if native}
    model = modules(*architecture)
    found = align(model, seen(*FOREIGN))
    assert paired(found) == paired(found, "normalised") == outputs(expected)
    assert {point.name for point, _ in found.only_candidate} == set(FOREIGN) - set(expected.values())
    turned = align(seen(*FOREIGN), model)
    assert paired(turned) == outputs({foreign: native for native, foreign in expected.items()})


def test_the_two_stacks_of_t5_are_told_and_not_guessed_at():
    model = modules("T5", "ForConditionalGeneration")
    reason = why(align(model, seen(*FOREIGN)).only_candidate)["layers.0:output"]
    assert "the reference has several stacks (decoder, encoder)" in reason


def test_an_encoder_is_never_a_decoder():
    model = modules("T5", "ForConditionalGeneration")
    encoder = [each for each in model if each.point.name.startswith("encoder.block")]
    decoder = [each for each in model if each.point.name.startswith("decoder.block")]
    apart = align(encoder, decoder)
    assert paired(apart) == {}
    assert "encoder layers, and the candidate has decoder" in why(apart.only_reference)["encoder.block.0:output"]
    assert len(align(encoder, model).pairs) == len(encoder)
    assert all(p.reference == p.candidate for p in align(encoder, model).pairs)


def test_one_stack_of_a_model_that_shows_a_second_is_not_the_main_one():
    shown = seen("encoder.block.0", "encoder.block.1", "decoder.final_layer_norm")
    assert paired(align(shown, seen("layers.0", "layers.1"))) == {}
    assert paired(align(shown[:2], seen("layers.0", "layers.1"))) == outputs(
        {"encoder.block.0": "layers.0", "encoder.block.1": "layers.1"}
    )


@pytest.mark.parametrize(
    ("architecture", "head", "prefix"),
    [
        ("Llama", "ForCausalLM", "model."),
        ("GPT2", "LMHeadModel", "transformer."),
        ("Bert", "ForMaskedLM", "bert."),
        ("Mamba", "ForCausalLM", "backbone."),
        ("ViT", "ForImageClassification", "vit."),
    ],
)
def test_a_model_with_a_head_pairs_with_the_one_without(architecture, head, prefix):
    whole, base = modules(architecture, head), modules(architecture, "Model")
    there = {each.point.name for each in whole}
    found = paired(align(whole, base), "normalised")
    assert found == outputs(
        {f"{prefix}{s.point.name}": s.point.name for s in base if f"{prefix}{s.point.name}" in there}
    )
    assert len(found) >= 20


def test_wrappers_and_lora_are_looked_through():
    model = modules("Llama", "ForCausalLM")
    lora = [
        RunPoint(Point(f"base_model.model.{s.point.name}{'.base_layer' * s.point.name.endswith('q_proj')}"), s.shape, 1)
        for s in model
        if s.point.name
    ]
    found = paired(align(model, lora), "normalised")
    q = "model.layers.1.self_attn.q_proj"
    assert found[f"{q}:output"] == f"base_model.model.{q}.base_layer:output"
    assert len(found) == len(lora)
    ddp = [RunPoint(Point(f"module._orig_mod.{s.point.name}"), s.shape, 1) for s in model if s.point.name]
    assert len(align(model, ddp).pairs) == len(ddp)


def test_an_adapter_that_is_there_itself_is_the_projection_and_its_base_layer_is_not():
    found = align(seen("layers.0.q_proj"), seen("base.layers.0.q_proj.base_layer", "base.layers.0.q_proj"))
    assert paired(found) == {"layers.0.q_proj:output": "base.layers.0.q_proj:output"}
    assert why(found.only_candidate).keys() == {"base.layers.0.q_proj.base_layer:output"}


def test_the_layers_of_different_architectures_pair_and_their_insides_only_where_they_are_called_the_same():
    gpt, llama = modules("GPT2", "LMHeadModel"), modules("Llama", "ForCausalLM")
    found = paired(align(gpt, llama), "normalised")
    assert found["transformer.h.1:output"] == "model.layers.1:output"
    assert found["transformer.h.1.mlp:output"] == "model.layers.1.mlp:output"
    assert "transformer.h.1.attn.c_attn:output" not in found


@pytest.mark.parametrize("stack", ["layers.{}", "layer_{}", "layer.{}", "blocks.{}", "h.{}", "model.decoder.layers.{}"])
def test_every_way_of_writing_the_main_stack_means_the_same(stack):
    names = [stack.format(i) for i in range(3)]
    found = align(seen(*names), seen("model.layers.0", "model.layers.1", "model.layers.2"))
    assert paired(found) == outputs({name: f"model.layers.{i}" for i, name in enumerate(names)})


def test_a_vision_tower_is_not_the_language_model():
    both = seen("model.visual.blocks.0", "model.language_model.layers.0")
    assert paired(align(both, seen("layers.0"))) == {"model.language_model.layers.0:output": "layers.0:output"}
    assert paired(align(both[:1], seen("layers.0"))) == {}
