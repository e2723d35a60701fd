"""What rows come to, of comparisons written by hand."""

from __future__ import annotations

import pytest

from compared import against, comparison, row
from layerscope.compare.result import KINDS, PARTED, Comparison, Verdict
from layerscope.errors import NoSuchPoint
from layerscope.points import Moment, Point

HEALTHY = against("bf16", [row("a", "same", error=0.0), row("b", "noise")])
SAME = against("copy", [row("a", "same", error=0.0)])
FAULTY = against("int8", [row("a", "same"), row("b", "root"), row("c", "inherited")])
BROKEN = against("int4", [row("a", "nonfinite"), row("b", "inherited")])


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_parted_is_a_root_nonfinite_or_inherited(kind):
    assert row("a", kind).parted is (kind in {"root", "nonfinite", "inherited"})
    assert set(PARTED) < set(KINDS)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.b:output", "a.b"),
        ("a.b:output[0]", "a.b:output[0]"),
        ("a.b:input[x]", "a.b:input[x]"),
        ("a.b:grad_input", "a.b:grad_input"),
        (".:output", "."),
        ("op:aten.mm", "op:aten.mm"),
    ],
)
def test_an_output_is_shown_by_its_module_s_name(text, shown):
    assert str(row(text, "same")) == shown
    assert row(text, "same").name == Point.parse(text).name


def test_a_verdict_is_its_word():
    assert str(Verdict("noise", "because")) == "noise"


@pytest.mark.parametrize(("one", "name"), [(FAULTY, "b"), (BROKEN, "a")])
def test_the_first_divergence_is_the_first_that_was_made(one, name):
    assert one.first_divergence.name == name
    assert comparison(one).first_divergence is one.first_divergence


def test_without_a_difference_there_is_no_first_divergence():
    assert HEALTHY.first_divergence is None
    assert comparison(HEALTHY, SAME).first_divergence is None


def test_the_first_divergence_is_the_first_differing_candidate_s():
    assert comparison(HEALTHY, BROKEN, FAULTY).first_divergence.candidate == "int4"


def test_what_was_measured_is_what_has_metrics():
    one = against("int8", [row("a", "same"), row("b", "missing"), row("c", "unpaired")])
    assert [each.name for each in one.compared] == ["a"]


def test_the_verdict_is_the_worst_of_the_candidates():
    assert comparison(SAME).verdict.word == "same"
    assert comparison(SAME, HEALTHY).verdict.word == "noise"
    assert comparison(HEALTHY, FAULTY, SAME).verdict == FAULTY.verdict


def test_candidates_are_found_by_their_names_and_counted():
    found = comparison(HEALTHY, FAULTY)
    assert found["int8"] is FAULTY
    assert (len(found), list(found)) == (2, [HEALTHY, FAULTY])
    assert len(found.rows) == 5


def test_a_candidate_that_is_not_there_names_those_that_are():
    with pytest.raises(NoSuchPoint, match="no candidate is called 'int2'; there is bf16, int8"):
        comparison(HEALTHY, FAULTY)["int2"]


def test_a_comparison_prints_as_its_document():
    text = str(comparison(FAULTY))
    assert "differs" in text
    assert "b parts first" in text
    assert "differs" not in str(comparison(HEALTHY))


def test_rows_are_values():
    assert row("a", "same", moment=Moment(step=1)) == row("a", "same", moment=Moment(step=1))
    assert Comparison("a", "a", "layerscope", (HEALTHY,)).noise == ()
