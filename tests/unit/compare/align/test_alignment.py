"""Alignment against hand-written pairs."""

import pytest

from aligned import outputs, paired, seen, why
from layerscope.compare.align.alignment import Pair, RunPoint, align
from layerscope.compare.align.pairing import PairingRule, parse_rules
from layerscope.points import Point

QKV = "fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj"


def shaped(**shapes):
    return [RunPoint(Point.parse(text), shape, 1) for text, shape in shapes.items()]


# Names -------------------------------------------------------------------------------------------


def test_the_same_name_comes_before_one_that_means_the_same():
    found = align(seen("model.layers.0", "layers.0"), seen("layers.0", "model.layers.0"))
    assert {(p.reference, p.candidate, p.method) for p in found.pairs} == {
        (p, p, "exact") for p in (Point("layers.0"), Point("model.layers.0"))
    }


def test_what_two_points_of_one_run_could_be_neither_is():
    found = align(seen("model.embed_tokens", "wte"), seen("embedding"))
    assert found.pairs == ()
    reason = why(found.only_candidate)["embedding:output"]
    assert "2 points of the reference would be embedding: model.embed_tokens:output, wte:output" in reason
    assert paired(align(seen("wte"), seen("embedding"))) == {"wte:output": "embedding:output"}


def test_sides_never_mix():
    found = align(seen("model.norm:input"), seen("model.norm:output"))
    assert found.pairs == ()
    assert "the candidate has model.norm, but only its output" in why(found.only_reference)["model.norm:input"]


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        ("model.layers.0[0]", "layers.0"),
        ("model.layers.0", "model.layers.0[0]"),
        ("model[last_hidden_state]", "model"),
        (".[logits]", "."),
        ("model.layers.0:input[hidden_states]", "layers.0:input[0]"),
    ],
)
def test_the_one_value_of_a_module_pairs_with_the_bare_one(reference, candidate):
    (pair,) = align(seen(reference), seen(candidate)).pairs
    assert (pair.method, pair.candidate) == ("normalised", Point.parse(candidate))


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (("attn[1]",), ("attn",)),
        ((".[logits]",), (".[last_hidden_state]",)),
        (("model[last_hidden_state]", "model[0]"), ("model",)),
        (("attn:input[position_ids]",), ("attn:input[0]",)),
    ],
)
def test_a_leaf_that_may_be_another_value_does_not(reference, candidate):
    found = align(seen(*reference), seen(*candidate, shape=(3, 8)))
    assert found.pairs == ()
    assert len(found.only_reference) == len(reference)
    assert "which may be another value" in found.only_reference[0][1]


def test_the_reason_of_a_pair_says_what_is_what():
    (pair,) = align(seen("model.layers.3[0]"), seen("layers.3")).pairs
    assert pair.because == "model.layers.3 is layers.3, [0] is the value itself"


def test_pairs_come_in_the_order_of_the_reference():
    names = ["layers.1", "embedding", "layers.0", "logits"]
    found = align(seen(*names), seen(*reversed(names)))
    assert [pair.reference.name for pair in found.pairs] == names


# Order and shape ---------------------------------------------------------------------------------


def test_equally_many_of_one_shape_pair_in_order_and_say_how_weak_that_is():
    found = align(seen("stem", "body", "tail"), seen("a", "b", "c"))
    assert paired(found, "order") == outputs({"stem": "a", "body": "b", "tail": "c"})
    assert found.pairs[1].because == "2nd of 3 of shape [2, 8], by order alone: the weakest evidence"


def test_different_counts_of_one_shape_pair_nothing():
    found = align(seen("stem", "body", "tail"), seen("a", "b"))
    assert found.pairs == ()
    assert "of shape [2, 8], 3 are left here and 2 there" in why(found.only_reference)["stem:output"]
    assert "of shape [2, 8], 2 are left here and 3 there" in why(found.only_candidate)["a:output"]


def test_other_shapes_and_other_sides_are_not_paired_in_order():
    assert align(seen("stem"), seen("a", shape=(2, 9))).pairs == ()
    assert align(seen("stem"), seen("a:input")).pairs == ()
    assert align(seen("stem", shape=None), seen("a", shape=None)).pairs == ()


def test_an_argument_with_another_name_is_no_partner_in_order():
    assert align(seen("stem:input[mask]"), seen("a:input[0]")).pairs == ()
    assert len(align(seen("stem:input[mask]"), seen("a:input[mask]")).pairs) == 1


def test_names_that_end_alike_pair_before_the_rest():
    found = align(seen("x.norm", "x.fc"), seen("y.fc", "y.norm"))
    assert paired(found, "order") == outputs({"x.norm": "y.norm", "x.fc": "y.fc"})


def test_another_layer_is_no_partner_however_well_its_shape_fits():
    reference, candidate = seen("layers.0", "layers.1", "layers.2"), seen("h.1", "h.2", "h.3")
    found = align(reference, candidate)
    assert paired(found) == outputs({"layers.1": "h.1", "layers.2": "h.2"})
    assert why(found.only_reference).keys() == {"layers.0:output"}


def test_a_run_that_counts_from_one_pairs_in_order():
    found = align(seen("stage.0", "stage.1", "stage.2"), seen("level_1", "level_2", "level_3"))
    assert paired(found, "order") == outputs({f"stage.{i}": f"level_{i + 1}" for i in range(3)})
    assert align(seen("stage.0", "stage.1"), seen("level_2", "level_3")).pairs == ()


def test_nothing_is_paired_in_order_across_what_is_known():
    before, after = seen("new", "known"), seen("known", "other")
    assert paired(align(before, after)) == {"known:output": "known:output"}
    assert paired(align(before, seen("other", "known"))) == outputs({"new": "other", "known": "known"})


# Rules -------------------------------------------------------------------------------------------


def test_a_declared_pair_comes_before_the_same_name():
    found = align(seen("a", "b"), seen("a", "b"), rules=parse_rules("pair a -> b\npair b -> a"))
    assert paired(found, "override") == outputs({"a": "b", "b": "a"})
    assert found.pairs[0].because == "rule `pair a -> b`"


def test_a_rename_reaches_everything_within():
    found = align(
        seen("net.s.0", "net.s.0.fc:input", "net.s.1"),
        seen("body.0", "body.0.fc:input", "body.1"),
        rules=[PairingRule("rename", "net.s.*", "body.*")],
    )
    assert paired(found, "override") == {
        "net.s.0:output": "body.0:output",
        "net.s.0.fc:input": "body.0.fc:input",
        "net.s.1:output": "body.1:output",
    }


def test_a_declared_partner_that_is_not_there_leaves_a_point_to_its_name_or_is_said():
    reference, rules = seen("net.0", "net.1"), [PairingRule("rename", "net.*", "body.*")]
    assert paired(align(reference, seen("body.0", "net.1"), rules=rules)) == outputs(
        {"net.0": "body.0", "net.1": "net.1"}
    )
    found = align(reference, seen("body.0"), rules=rules)
    assert paired(found) == outputs({"net.0": "body.0"})
    assert "makes it body.1:output, which the candidate does not have" in why(found.only_reference)["net.1:output"]


def test_a_fusion_that_only_some_layers_have_leaves_the_others_to_their_names():
    reference = seen(*(f"{layer}.{x}_proj" for layer in ("a", "b") for x in "qkv"))
    candidate = [*seen("a.qkv_proj", shape=(2, 24)), *seen("b.q_proj", "b.k_proj", "b.v_proj")]
    found = align(reference, candidate, rules=parse_rules(QKV))
    assert paired(found, "exact") == outputs({f"b.{x}_proj": f"b.{x}_proj" for x in "qkv"})
    assert paired(found, "override") == outputs({f"a.{x}_proj": "a.qkv_proj" for x in "qkv"})


def test_parts_are_cut_out_of_the_fused_projection_in_the_order_of_the_rule():
    reference = shaped(**{"l.q_proj": (2, 8), "l.k_proj": (2, 4), "l.v_proj": (2, 4)})
    found = align(reference, shaped(**{"l.qkv_proj": (2, 16)}), rules=parse_rules(QKV))
    assert [(p.reference.name, p.candidate.name, p.candidate_cut, p.reference_cut) for p in found.pairs] == [
        ("l.q_proj", "l.qkv_proj", (0, 8), None),
        ("l.k_proj", "l.qkv_proj", (8, 12), None),
        ("l.v_proj", "l.qkv_proj", (12, 16), None),
    ]
    assert found.only_reference == found.only_candidate == ()


def test_split_is_the_other_way_round():
    candidate = shaped(**{"m.gate_proj": (2, 3), "m.up_proj": (2, 5)})
    rules = parse_rules("split **.gate_up_proj -> **.gate_proj, **.up_proj")
    found = align(shaped(**{"m.gate_up_proj": (2, 8)}), candidate, rules=rules)
    assert [(p.reference.name, p.reference_cut, p.candidate.name) for p in found.pairs] == [
        ("m.gate_up_proj", (0, 3), "m.gate_proj"),
        ("m.gate_up_proj", (3, 8), "m.up_proj"),
    ]


def test_widths_that_do_not_add_up_leave_the_parts_unpaired_and_name_both():
    reference = shaped(**{"l.q_proj": (2, 8), "l.k_proj": (2, 4), "l.v_proj": (2, 4)})
    found = align(reference, shaped(**{"l.qkv_proj": (2, 24)}), rules=parse_rules(QKV))
    assert found.pairs == ()
    for reason in (*why(found.only_reference).values(), *why(found.only_candidate).values()):
        assert "8 + 4 + 4 = 16 wide, l.qkv_proj:output of the candidate is 24" in reason


def test_a_fusion_with_a_part_missing_says_what_there_is():
    reference = shaped(**{"l.q_proj": (2, 8), "l.k_proj": (2, 4)})
    found = align(reference, shaped(**{"l.qkv_proj": (2, 16)}), rules=parse_rules(QKV))
    assert found.pairs == ()
    assert "needs 3 parts of l.qkv_proj:output, and the reference has 2" in why(found.only_reference)["l.q_proj:output"]


def test_inputs_of_fused_projections_are_compared_whole_and_their_gradients_not_at_all():
    sides = ("input[0]", "grad_input[0]", "grad_output[0]")
    names = [f"l.{each}_proj:{side}" for each in "qkv" for side in sides]
    reference = seen(*names, shape=(2, 8))
    fused = [
        *seen("l.qkv_proj:input[0]", "l.qkv_proj:grad_input[0]"),
        *seen("l.qkv_proj:grad_output[0]", shape=(2, 24)),
    ]
    found = align(reference, fused, rules=parse_rules(QKV))
    inputs = [p for p in found.pairs if p.reference.side == "input"]
    assert [(p.reference.name, p.candidate.name, p.candidate_cut) for p in inputs] == [
        (f"l.{each}_proj", "l.qkv_proj", None) for each in "qkv"
    ]
    assert [p.candidate_cut for p in found.pairs if p.reference.side == "grad_output"] == [(0, 8), (8, 16), (16, 24)]
    left = why(found.only_reference)
    assert left.keys() == {f"l.{each}_proj:grad_input[0]" for each in "qkv"}
    assert all("the sum over its parts" in reason for reason in left.values())


def test_ignored_points_are_in_neither_list():
    found = align(seen("a", "b.rotary_emb"), seen("a", "c.rotary_emb"), rules=parse_rules("ignore **.rotary_emb"))
    assert paired(found) == {"a:output": "a:output"}
    assert found.ignored == (Point("b.rotary_emb"), Point("c.rotary_emb"))
    assert found.only_reference == found.only_candidate == ()


def test_flat_marks_the_pairs_it_names_and_no_other():
    reference, candidate = seen("layers.0", "norm", shape=(2, 3, 4)), seen("layers.0", "norm", shape=(6, 4))
    found = align(reference, candidate, rules=parse_rules("flat layers.*"))
    assert [(p.reference.name, p.flat) for p in found.pairs] == [("layers.0", True), ("norm", False)]


def test_a_pair_is_a_plain_value():
    (pair,) = align(seen("a"), seen("a")).pairs
    assert pair == Pair(Point("a"), Point("a"), "exact", "the same name")
