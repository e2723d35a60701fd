"""Choices in another order, and what lies in that order, against orders written by hand."""

import pytest
import torch

from layerscope.compare.comparison_plan import ComparisonPlan, RunRecords
from layerscope.compare.ordering import follow_choices, order_of
from layerscope.points import Moment, Point
from layerscope.store import MemoryRun

CHOICES = torch.tensor([[3, 1], [0, 3], [2, 1]])
SCORES = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.9, 0.1]])
ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))  # one for each choice
TURNED = ROWS.reshape(3, 2, 8).flip(1).reshape(6, 8)
TOKENS = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))


def followed(reference, candidate):
    """What is measured once more, of two runs of points and tensors: point, and whether it is equal then."""
    runs = []
    for of in (reference, candidate):
        run = MemoryRun()
        for text, tensor in of.items():
            run.add(Point.parse(text), Moment(), tensor=tensor)
        runs.append(RunRecords(run))
    plan = ComparisonPlan(*runs, ())
    for one in plan.pairs:
        plan.measure(one)
    follow_choices(plan.pairs)
    return {str(one.point): one.metrics.bitwise for one in plan.pairs if one.choice is not None}


def router(scores, choices, rows=ROWS, tokens=TOKENS, other=TOKENS):
    return {
        "mlp.gate[0]": scores,
        "mlp.gate[1]": choices,
        "mlp.experts.act": rows,
        "mlp.experts": tokens,
        "head": other,
    }


def test_where_each_choice_stands_in_the_candidate_s_row():
    other = torch.tensor([[1, 3], [0, 3], [2, 0]])
    assert order_of(CHOICES, other).tolist() == [[1, 0], [0, 1], [0, 1]]  # the last row holds another choice


def test_a_choice_that_occurs_twice_keeps_its_places():
    assert order_of(torch.tensor([[5, 5, 1]]), torch.tensor([[1, 5, 5]])).tolist() == [[1, 2, 0]]


def test_scores_and_expert_rows_are_read_in_the_order_of_the_choices():
    turned = router(SCORES.flip(1), CHOICES.flip(1), TURNED)
    assert followed(router(SCORES, CHOICES), turned) == {"mlp.gate:output[0]": True, "mlp.experts.act:output": True}


def test_without_another_order_of_choices_the_rows_of_experts_alone_are():
    assert followed(router(SCORES, CHOICES), router(SCORES.flip(1), CHOICES, TURNED)) == {
        "mlp.experts.act:output": True
    }
    turned = router(SCORES, CHOICES, tokens=TOKENS.flip(0))  # a row for each token, in the order of the tokens
    assert followed(router(SCORES, CHOICES), turned) == {}


def test_a_fault_in_the_scores_or_in_the_rows_is_not_read_away():
    wrong = SCORES.flip(1) * torch.tensor([[1.0, 1.5]])
    assert (
        followed(router(SCORES, CHOICES), router(wrong, CHOICES.flip(1), TURNED)).get("mlp.gate:output[0]") is not True
    )
    other = TURNED * 1.5
    assert (
        followed(router(SCORES, CHOICES), router(SCORES.flip(1), CHOICES.flip(1), other)).get("mlp.experts.act:output")
        is not True
    )


def test_what_lies_outside_the_router_s_module_stays_as_it_is():
    turned = router(SCORES.flip(1), CHOICES.flip(1), other=TOKENS.flip(0))
    assert "head:output" not in followed(router(SCORES, CHOICES), turned)


@pytest.mark.parametrize("beside", [{}, {"embed[1]": CHOICES}], ids=["alone", "beside whole numbers"])
def test_token_ids_in_another_order_carry_nothing_with_them(beside):
    reference = {"embed[0]": CHOICES, "rows": ROWS, **beside}
    assert followed(reference, {"embed[0]": CHOICES.flip(1), "rows": TURNED, **beside}) == {}
