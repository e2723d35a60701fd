"""Near-ties, on scores whose gaps are written by hand."""

from __future__ import annotations

import pytest
import torch

from layerscope.compare.routing import Flips, changed, flips

# Expert 1 and 2 of row 0 are 0.001 apart, those of row 1 are 2 apart; the mean square of all is 7.5 to within 0.1 %.
SCORES = torch.tensor([[0.0, 3.0, 3.001, 4.0], [0.0, 1.0, 3.0, 4.0]])
CHOSEN = torch.tensor([[3, 2], [3, 2]])
TIED = torch.tensor([[3, 1], [3, 2]])
FAR = torch.tensor([[3, 2], [3, 1]])
ERROR = 1e-3  # times 8 times the root of the mean square: 0.022


def test_a_flip_between_scores_that_are_almost_equal_is_a_near_tie():
    found = flips(CHOSEN, TIED, SCORES, error=ERROR)
    assert (found.changed, found.tied) == ({0}, 1)
    assert found.gap == pytest.approx(0.001, rel=1e-3)
    assert found.at_near_ties


def test_a_flip_between_scores_far_apart_is_none():
    found = flips(CHOSEN, FAR, SCORES, error=ERROR)
    assert (found.changed, found.tied, found.gap) == ({1}, 0, 2.0)
    assert not found.at_near_ties


def test_how_near_a_tie_must_be_follows_the_error_of_the_scores():
    assert not flips(CHOSEN, TIED, SCORES, error=1e-6).at_near_ties
    assert flips(CHOSEN, FAR, SCORES, error=0.1).at_near_ties


def test_one_flip_far_from_a_tie_spoils_the_others():
    both = torch.tensor([[3, 1], [3, 1]])
    found = flips(CHOSEN, both, SCORES, error=ERROR)
    assert (found.changed, found.tied) == ({0, 1}, 1)
    assert not found.at_near_ties


def test_another_order_of_the_same_choices_is_no_flip():
    found = flips(CHOSEN, CHOSEN.flip(-1), SCORES, error=ERROR)
    assert found == Flips(frozenset(), 0, 0.0)
    assert not found.at_near_ties
    assert changed(CHOSEN, CHOSEN.flip(-1)) == frozenset()


def test_of_several_experts_that_changed_the_widest_gap_counts():
    scores = torch.tensor([[1.0, 1.001, 1.002, 5.0]])
    near = flips(torch.tensor([[0, 3]]), torch.tensor([[1, 3]]), scores, error=ERROR)
    assert near.at_near_ties
    one_far = flips(torch.tensor([[2, 3]]), torch.tensor([[0, 1]]), scores, error=ERROR)
    assert one_far.gap == pytest.approx(4.0)
    assert not one_far.at_near_ties


@pytest.mark.parametrize("index", [4, 99, -1])
def test_an_index_that_the_scores_do_not_have_says_that_they_are_other_scores(index):
    strange = CHOSEN.clone()
    strange[1, 1] = index
    assert flips(CHOSEN, strange, SCORES, error=ERROR) is None
    assert flips(strange, CHOSEN, SCORES, error=ERROR) is None


@pytest.mark.parametrize("scores", [SCORES[:1], torch.empty(0, 4), torch.tensor(1.0)])
def test_scores_of_another_number_of_rows_are_other_scores(scores):
    assert flips(CHOSEN, TIED, scores, error=ERROR) is None


def test_leading_axes_are_rows():
    found = flips(CHOSEN[None], TIED[None], SCORES[:, None], error=ERROR)
    assert found == flips(CHOSEN, TIED, SCORES, error=ERROR)


def test_half_precision_scores_are_looked_at_too():
    assert flips(CHOSEN, FAR, SCORES.bfloat16(), error=ERROR).gap == 2.0


def test_the_rows_whose_choices_changed_are_named():
    assert changed(CHOSEN, TIED) == {0}
    assert changed(CHOSEN, CHOSEN.clone()) == frozenset()


def test_a_candidate_of_another_shape_is_read_in_the_reference_s_rows():
    """Declared `flat`: the same choices without the axis of length 1."""
    one, other = torch.tensor([[0], [1], [2]]), torch.tensor([0, 3, 2])
    assert changed(one, other) == {1}
    scores = torch.tensor([[9.0, 0, 0, 0], [0, 5.0, 0, 5.0], [0, 0, 9.0, 0]])
    assert flips(one, other, scores, error=ERROR) == Flips(frozenset({1}), 1, 0.0)


def test_without_scores_there_is_no_near_tie():
    unknown = Flips(frozenset({1}), 0, float("nan"))
    assert not unknown.scored
    assert not unknown.at_near_ties
    assert flips(CHOSEN, TIED, SCORES, error=ERROR).scored
