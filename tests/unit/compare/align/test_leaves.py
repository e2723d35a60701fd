"""Leaves that a compiler renumbered: a router of (logits, scores, choices), traced, exported and faulty."""

import math

from layerscope.compare.align.alignment import align
from layerscope.compare.align.leaves import exchanged, pair_leaves
from layerscope.compare.align.pairing import parse_rules
from layerscope.compare.align.run_points import RunPoint
from layerscope.points import Point

LOGITS, SCORES, CHOICES = ((48, 4), "floats"), ((48, 2), "floats"), ((48, 2), "whole numbers")


def value(*forms, name="gate", leaves=None, side="output"):
    """The leaves of one value: [0], [1], ... or as named."""
    leaves = [(at,) for at in range(len(forms))] if leaves is None else leaves
    return [RunPoint(Point(name, side, leaf), form[0], 1, form) for leaf, form in zip(leaves, forms, strict=True)]


SOURCE = value(LOGITS, SCORES, CHOICES)


def nowhere(reference, candidate):
    raise AssertionError("no value had to be looked at")


def table(**far):
    """How far apart leaves are: r1c2=0.5 is the reference's [1] from the candidate's [2]; all others are far."""
    return lambda a, b: far.get(f"r{a.leaf[0]}c{b.leaf[0]}", 1.0)


def paired(found):
    return {str(pair.reference): str(pair.candidate) for pair in found.pairs}


def why(only):
    return {str(point): reason for point, reason in only}


def test_shape_and_kind_of_numbers_decide_without_a_look_at_the_values():
    traced = value(CHOICES, SCORES)
    found = pair_leaves(SOURCE, traced, nowhere)
    assert paired(found) == {"gate:output[1]": "gate:output[1]", "gate:output[2]": "gate:output[0]"}
    assert found.pairs[1].because == "[2] is [0], the only leaf of whole numbers [48, 2]"
    assert why(found.only_reference) == {
        "gate:output[0]": "no leaf of this value holds floats [48, 4] in the candidate, which has [0] whole numbers "
        "[48, 2], [1] floats [48, 2]; compilers leave out unused values, and show what the source keeps to itself."
    }
    assert found.only_candidate == []


def test_of_several_the_nearest_is_taken_and_the_other_left_over():
    exported = value(SCORES, CHOICES, SCORES)
    found = pair_leaves(SOURCE, exported, table(r1c0=0.05, r1c2=0.0))
    assert paired(found) == {"gate:output[1]": "gate:output[2]", "gate:output[2]": "gate:output[1]"}
    assert "of 1 and 2 leaves of floats [48, 2] the nearest by value" in found.pairs[0].because
    assert why(found.only_candidate)["gate:output[0]"].startswith(
        "only the candidate has it: of 2 leaves of floats [48, 2] here and 1 there"
    )
    assert paired(pair_leaves(SOURCE, exported, table(r1c0=0.0, r1c2=0.05)))["gate:output[1]"] == "gate:output[0]"


def test_the_same_list_of_leaves_is_trusted_however_far_the_values_are():
    assert pair_leaves(SOURCE, value(LOGITS, SCORES, CHOICES), nowhere) == ([], [], [])


def test_a_fault_that_leaves_nothing_near_still_has_a_partner():
    found = pair_leaves(SOURCE, value(SCORES, CHOICES, SCORES), lambda a, b: math.inf)
    assert paired(found)["gate:output[1]"] == "gate:output[0]"  # by order, since no name is the same
    two = value(SCORES, SCORES), value(SCORES, SCORES, CHOICES)
    assert paired(pair_leaves(*two, lambda a, b: math.inf)) == {
        f"gate:output[{n}]": f"gate:output[{n}]" for n in (0, 1)
    }


def test_where_no_leaf_fits_nothing_is_settled_so_that_the_names_show_the_shapes():
    other = [((48, 3), "floats"), ((48, 3), "whole numbers")]
    assert pair_leaves(SOURCE, value(*other), nowhere) == ([], [], [])
    found = align(SOURCE, value(*other), apart=nowhere)
    assert {(str(p.reference), p.method) for p in found.pairs} == {(f"gate:output[{n}]", "exact") for n in (0, 1)}


def test_a_field_and_a_bare_value_of_one_form_are_the_same():
    [pair] = pair_leaves(value(LOGITS, leaves=[("logits",)]), value(LOGITS, leaves=[()]), nowhere).pairs
    assert pair.because == "[logits] is the value itself, the only leaf of floats [48, 4]"


def test_leaves_of_unknown_form_are_left_to_their_names():
    unknown = [RunPoint(Point("gate", leaf=(0,)), None, 1)]
    assert pair_leaves(unknown, SOURCE, nowhere) == ([], [], [])


def test_alignment_looks_at_leaves_only_where_names_are_not_the_source_s():
    traced = value(CHOICES, SCORES)
    trusted, not_trusted = align(SOURCE, traced), align(SOURCE, traced, apart=nowhere)
    assert {str(p.reference): str(p.candidate) for p in trusted.pairs}["gate:output[0]"] == "gate:output[0]"
    assert {(str(p.reference), str(p.candidate), p.method) for p in not_trusted.pairs} == {
        ("gate:output[1]", "gate:output[1]", "leaves"),
        ("gate:output[2]", "gate:output[0]", "leaves"),
    }
    assert why(not_trusted.only_reference).keys() == {"gate:output[0]"}


def test_a_module_under_another_prefix_is_paired_leaf_by_leaf_too():
    ours, theirs = (
        value(*f, name=n)
        for f, n in (((LOGITS, SCORES, CHOICES), "model.layers.0.mlp.gate"), ((CHOICES, SCORES), "layers.0.mlp.gate"))
    )
    found = align(ours, theirs, apart=nowhere)
    assert {(p.reference.leaf, p.candidate.leaf) for p in found.pairs} == {((1,), (1,)), ((2,), (0,))}


def test_a_declared_pair_comes_before_the_values():
    rules = parse_rules("pair gate[1] -> gate[2]")
    found = align(SOURCE, value(SCORES, CHOICES, SCORES), rules=rules, apart=table(r1c0=0.0))
    methods = {str(p.reference): (str(p.candidate), p.method) for p in found.pairs}
    assert methods["gate:output[1]"] == ("gate:output[2]", "override")
    assert methods["gate:output[2]"] == ("gate:output[1]", "leaves")


# The same leaves in another order ----------------------------------------------------------------

PAIR = value(SCORES, SCORES)
NEXT = [RunPoint(Point("next"), (2, 8), 1, ((2, 8), "floats"))]
SWAPPED = {"r0c1": 0.0, "r1c0": 0.0}


def leafless(far, *, following=0.0):
    return lambda a, b: following if not a.leaf else far.get(f"r{a.leaf[0]}c{b.leaf[0]}", 1.0)


def leaves_of(found):
    return [(p.reference.leaf, p.candidate.leaf) for p in found.pairs if p.reference.name == "gate"]


def test_the_same_leaves_in_another_order_are_exchanged_where_what_runs_next_agrees():
    found = align([*PAIR, *NEXT], [*PAIR, *NEXT], apart=leafless(SWAPPED))
    assert leaves_of(found) == [((0,), (1,)), ((1,), (0,))]
    assert {p.method for p in found.pairs} == {"leaves", "exact"}


def test_they_stay_where_what_runs_next_differs_or_nothing_does():
    straight = [((0,), (0,)), ((1,), (1,))]
    assert leaves_of(align([*PAIR, *NEXT], [*PAIR, *NEXT], apart=leafless(SWAPPED, following=0.5))) == straight
    assert leaves_of(align(PAIR, PAIR, apart=leafless(SWAPPED))) == straight
    assert leaves_of(align([*NEXT, *PAIR], [*NEXT, *PAIR], apart=leafless(SWAPPED))) == straight


def test_they_stay_where_the_other_order_does_not_explain_every_value():
    one_is_off = {"r0c1": 0.0, "r1c0": 0.3}
    assert exchanged(PAIR, PAIR, table(**one_is_off)) == []
    as_near = {"r0c0": 0.05, "r1c1": 0.05, "r0c1": 0.0, "r1c0": 0.0}
    assert exchanged(PAIR, PAIR, table(**as_near)) == []
    assert len(exchanged(PAIR, PAIR, table(**SWAPPED))) == 2


def test_leaves_with_numbers_and_leaves_with_names_are_told_together():
    both = value(SCORES, CHOICES, leaves=[("logits",), (0,)])
    found = pair_leaves(value(SCORES, LOGITS), both, nowhere)
    assert "which has [0] whole numbers [48, 2], [logits] floats [48, 2]" in why(found.only_reference)["gate:output[1]"]
