"""What a failed assertion says, of comparisons written by hand and of runs whose fault is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compared import against, comparison, row
from layerscope.compare.asserting import assert_runs_match, mismatch
from layerscope.points import Moment, Point
from layerscope.store import MemoryRun

HEALTHY = [row("layers.0", "same", error=0.0), row("layers.1", "noise")]
FAULTY = [
    *HEALTHY,
    row("layers.2", "root", error=0.05),
    row("layers.3", "inherited", error=0.06),
    row("layers.4", "inherited", error=0.07),
    row("layers.5", "inherited", error=0.08),
]


def test_what_is_the_same_or_noise_is_no_mismatch():
    assert mismatch(comparison(against("int8", HEALTHY[:1]))) is None
    assert mismatch(comparison(against("int8", HEALTHY))) is None


def test_the_first_line_names_the_first_diverging_layer_and_its_reason():
    text = mismatch(comparison(against("int8", FAULTY)))
    assert text.splitlines()[0] == "differs: layers.2 parts first: because of root"


def test_the_table_has_the_last_healthy_row_the_first_that_parted_and_the_next_two():
    text = mismatch(comparison(against("int8", FAULTY)))
    table = [line.split() for line in text.splitlines() if line.startswith("layers.")]
    assert [line[0] for line in table] == ["layers.1", "layers.2", "layers.3", "layers.4"]
    [parted] = [line for line in table if line[0] == "layers.2"]
    # The candidate is the reference times 1.05, so that its relative L2 error is 0.05 in closed form.
    assert {"root", "0.05000", "50.00"} <= set(parted)


def test_moments_are_told_where_there_are_several():
    later = [replace(one, moment=Moment(step=7)) for one in FAULTY]
    assert "step=" not in mismatch(comparison(against("int8", FAULTY)))
    assert "step=7" in mismatch(comparison(against("int8", [*HEALTHY, *later])))


def test_the_text_says_who_was_compared_and_on_what_the_verdict_rests():
    text = mismatch(comparison(against("int8", FAULTY, notes=["2 records of the candidate were dropped"])))
    assert "candidate: int8, runs/int8" in text
    assert "reference: fp32, runs/fp32" in text
    assert "rests on: an estimate of the rounding of bfloat16" in text
    assert "2 records of the candidate were dropped" in text


@pytest.mark.parametrize("kind", ["missing", "unpaired", "degenerate"])
def test_what_has_no_answer_fails_unless_it_is_allowed(kind):
    found = comparison(against("int8", [*HEALTHY, row("lm_head", kind)]))
    text = mismatch(found)
    assert text.startswith("partial: 1 of 3 rows have no answer, the first is lm_head")
    assert f"lm_head is {kind}: because of {kind}" in text
    assert mismatch(found, allow_partial=True) is None


def test_a_long_list_of_what_has_no_answer_is_cut():
    alone = [row(f"layers.{n}", "unpaired") for n in range(2, 40)]
    text = mismatch(comparison(against("int8", [*HEALTHY, *alone])))
    assert "layers.6 is" in text
    assert "layers.7 is" not in text
    assert "and 33 more" in text


def test_an_empty_comparison_never_passes():
    alone = comparison(against("int8", [row("layers.0", "unpaired")]))
    for found in (comparison(), comparison(against("int8", [])), alone):
        assert mismatch(found, allow_partial=True).startswith("nothing")


def test_a_name_cannot_steer_the_terminal():
    text = mismatch(comparison(against("int8", [row(r"evil\u001b\[2J", "root")])))
    assert "\x1b" not in text


def run_of(*tensors: torch.Tensor) -> MemoryRun:
    run = MemoryRun()
    for number, tensor in enumerate(tensors):
        run.add(Point(f"layers.{number}"), Moment(), tensor=tensor)
    run.close(forwards=1, points=len(tensors))
    return run


def test_runs_that_agree_pass():
    values = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    assert assert_runs_match(run_of(*values), run_of(*values)) is None


def test_runs_that_part_fail_and_the_layer_is_named():
    first, second = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    with pytest.raises(AssertionError, match=r"\Adiffers: layers\.1 parts first"):
        assert_runs_match(run_of(first, second), run_of(first, second * 1.05))


def test_a_layer_that_the_candidate_lacks_fails_unless_it_is_allowed():
    first, second = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    with pytest.raises(AssertionError, match=r"\Apartial: 1 of 2 rows"):
        assert_runs_match(run_of(first, second), run_of(first))
    assert assert_runs_match(run_of(first, second), run_of(first), allow_partial=True) is None


def test_only_the_points_asked_for_are_compared():
    first, second = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    assert assert_runs_match(run_of(first, second), run_of(first, second * 1.05), points=["layers.0"]) is None
