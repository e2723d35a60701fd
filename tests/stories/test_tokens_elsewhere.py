"""A cache, another chunking, padding on the other side: the same tokens, in other rows. Which module is off, if any?

One run computes whole sequences, the other what is new; positions among the inputs tell which row is which token.
"""

from __future__ import annotations

import pytest
import torch

import families
import layerscope as ls
from stories.test_judged_from_folders import cast, recorded

FAULTY = "model.layers.1.mlp.up_proj"
IDS = families.inputs("llama")["input_ids"]


def generating(*, cache):
    def run(model):
        model.generate(input_ids=IDS[:1, :8], max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=cache)

    return run


def in_chunks(*sizes):
    """Give twelve tokens of two sequences a few at a time, as a server does that fills its cache."""

    def run(model):
        past, at = None, 0
        for size in sizes:
            positions = torch.arange(at, at + size)[None].expand(2, -1)
            given = {"input_ids": IDS[:, at : at + size], "position_ids": positions, "use_cache": True}
            past = model(**given, past_key_values=past).past_key_values
            at += size

    return run


def padded(side):
    """Two sequences of other lengths; padding on one side, and positions that count tokens."""
    lengths = 24, 15
    ids, mask = torch.zeros_like(IDS), torch.zeros_like(IDS)
    for row, length in enumerate(lengths):
        at = slice(24 - length, None) if side == "left" else slice(length)
        ids[row, at], mask[row, at] = IDS[row, :length], 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def faulty(dtype=torch.float32, *, by=1.01):
    model = families.family("llama", dtype=dtype)
    with torch.no_grad():
        model.get_submodule(FAULTY).weight.mul_(by)
    return model


WAYS = {
    "a cache against none": (generating(cache=False), generating(cache=True)),
    "none against a cache": (generating(cache=True), generating(cache=False)),
    "at once against token by token": (in_chunks(12), in_chunks(8, 1, 1, 1, 1)),
    "token by token against at once": (in_chunks(8, 1, 1, 1, 1), in_chunks(12)),
    "other chunks": (in_chunks(8, 1, 1, 1, 1), in_chunks(4, 4, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("floors", [True, False], ids=["floors", "estimate"])
def test_the_same_tokens_in_other_steps_are_no_difference_and_a_fault_is_named(way, floors):
    one, two = WAYS[way]
    reference = recorded(families.family("llama"), None, floors=floors, run=one)
    for how in ({}, {"attention": "sdpa"}, {"dtype": torch.bfloat16}):
        result = ls.compare(reference, recorded(families.family("llama", **how), None, run=two))
        assert str(result.verdict) == "noise", (how, result.verdict.because)
        again = [row for row in result.rows if "token position" in row.because]
        assert {row.point.name for row in again} >= {"model.layers.0", FAULTY}
        assert not [row for row in result.rows if row.kind == "unpaired" and row.counterpart is not None]
    result = ls.compare(reference, recorded(faulty(), None, run=two))
    assert (str(result.verdict), result.first_divergence.name) == ("differs", FAULTY)


def test_padding_on_the_other_side_is_no_difference_and_a_fault_is_named():
    reference = recorded(families.family("llama"), padded("left"), floors=True)
    for how in ({}, {"attention": "sdpa"}, {"dtype": torch.bfloat16}):
        given = cast(padded("right"), how.get("dtype", torch.float32))
        result = ls.compare(reference, recorded(families.family("llama", **how), given))
        assert str(result.verdict) in ("same", "noise"), (how, result.verdict.because)
        assert all("token position" in row.because for row in result.rows if row.name == FAULTY)
    result = ls.compare(reference, recorded(faulty(), padded("right")))
    assert (str(result.verdict), result.first_divergence.name) == ("differs", FAULTY)


def test_positions_that_are_wrong_are_a_difference():
    reference = recorded(families.family("llama"), padded("left"), floors=True)
    given = padded("right")
    given["position_ids"] = torch.arange(24).expand(2, -1) + 3
    assert str(ls.compare(reference, recorded(families.family("llama"), given)).verdict) == "differs"


@pytest.mark.parametrize(
    ("one", "two"), [("eager", "grouped_mm"), ("grouped_mm", "eager"), ("grouped_mm", "batched_mm")]
)
def test_experts_that_run_their_tokens_in_other_calls_or_another_order_are_no_difference(one, two):
    given = families.inputs("qwen2moe")

    def run(how, *, dtype=torch.float32, floors=False, fault=False):
        model = families.family("qwen2moe", dtype=dtype)
        model.set_experts_implementation(how)
        if fault:
            with torch.no_grad():
                model.model.layers[1].mlp.experts.gate_up_proj[2].mul_(1.05)
        return recorded(model, given, floors=floors)

    reference = run(one, floors=True)
    for dtype in (torch.float32, torch.bfloat16):
        result = ls.compare(reference, run(two, dtype=dtype))
        assert str(result.verdict) in ("same", "noise"), (dtype, result.verdict.because)
        assert not [row for row in result.rows if row.kind == "unpaired"]
    result = ls.compare(reference, run(two, fault=True))
    assert (str(result.verdict), result.first_divergence.name) == ("differs", "model.layers.1.mlp.experts.act_fn")
