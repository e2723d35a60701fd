"""What is said of a point without a partner, and of a rule that finds nothing: the text itself."""

import pytest

from aligned import seen, why
from asserts import counted
from layerscope.compare.align.alignment import align
from layerscope.compare.align.pairing import parse_rules
from layerscope.errors import NoSuchPoint

QKV = "fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj"


def test_what_finds_no_partner_is_told_what_comes_near():
    found = align(seen("model.layers.0.mlp.up_proj", shape=(2, 8)), seen("model.layers.0.mlp.upp_proj", shape=(2, 9)))
    assert why(found.only_reference)["model.layers.0.mlp.up_proj:output"] == (
        "no point of the candidate has this name, nor a normalised one; nearest: model.layers.0.mlp.upp_proj."
    )


def test_at_most_three_near_names_are_told():
    found = align(seen("a.fc"), seen(*(f"b{i}.fc" for i in range(9)), shape=(1,)))
    assert why(found.only_reference)["a.fc:output"].count(".fc") == 3


def test_five_thousand_points_that_have_nothing_in_common_take_no_time_to_speak_of():
    reference = seen(*(f"q{i * 7919}y{i}" for i in range(5000)), shape=(3,))
    candidate = seen(*(f"x{i * 7919}y" for i in range(4999)))
    found, calls = counted(lambda: align(reference, candidate))
    assert len(found.only_reference) == 5000
    assert calls < 1000 * 5000  # 400 each; their number squared would be 5,000 each


def test_without_the_rule_nothing_is_guessed_and_the_line_to_write_is_said():
    reference = seen(*(f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "qkv"))
    candidate = seen("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj", shape=(2, 24))
    found = align(reference, candidate)
    assert found.pairs == ()
    for reason in (*why(found.only_reference).values(), *why(found.only_candidate).values()):
        assert f"`{QKV}`" in reason
    assert len(align(reference, candidate, rules=parse_rules(QKV)).pairs) == 6


def test_the_suggested_line_works_where_the_names_around_it_differ():
    reference = seen(*(f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "qkv"))
    candidate = seen("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn", shape=(2, 24))
    for ours, theirs in ((reference, candidate), (candidate, reference)):
        reason = align(ours, theirs).only_reference[0][1]
        line = reason.split("`")[1]
        assert len(align(ours, theirs, rules=parse_rules(line)).pairs) == 6


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pair lm_heat -> logits", "'lm_heat' names no point of the reference, among 2; nearest: lm_head"),
        ("pair lm_head -> logitz", "'logitz' names no point of the candidate, among 2; nearest: logits"),
        ("rename net.* -> body.*", "'net.*' names no point of the reference"),
        (QKV, "'**.q_proj' names no point of the reference"),
        ("split **.qk -> **.q, **.k", "'**.q' names no point of the candidate"),
        ("ignore **.rotary", "'**.rotary' names no point of either run"),
        ("flat model.mlq", "'model.mlq' names no point of either run, among 3; nearest: model.mlp"),
    ],
)
def test_a_rule_that_matches_nothing_raises_and_names_what_is_near(line, said):
    with pytest.raises(NoSuchPoint) as caught:
        align(seen("model.mlp", "lm_head"), seen("model.mlp", "logits"), rules=parse_rules(line))
    assert str(caught.value).startswith(f"the rule `{line}` matches nothing: {said}")
