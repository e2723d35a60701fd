"""Pairing moments against hand-written pairs."""

from layerscope.compare.align.moments import pair_moments
from layerscope.points import Moment


def test_the_same_moments_pair_and_the_rest_is_left():
    reference, candidate = [Moment(step=n, batch=n) for n in range(4)], [Moment(step=n, batch=n) for n in range(2, 7)]
    pairs, ours, theirs = pair_moments(reference, candidate)
    assert pairs == [(m, m, "") for m in reference[2:]]
    assert (ours, theirs) == (reference[:2], candidate[2:])


def test_shifted_steps_pair_in_order_when_there_are_equally_many_and_not_otherwise():
    reference, candidate = [Moment(step=n) for n in range(3)], [Moment(step=n) for n in (10, 11, 12)]
    pairs, ours, theirs = pair_moments(reference, candidate)
    assert pairs == [(a, b, "in order") for a, b in zip(reference, candidate, strict=True)]
    assert ours == theirs == []
    assert pair_moments(reference, candidate[:2]) == ([], reference, candidate[:2])


def test_a_run_without_epochs_pairs_by_step():
    reference = [Moment(step=n, batch=n) for n in range(4)]
    candidate = [Moment(epoch=n // 2, step=n, batch=n % 2) for n in range(1, 4)]
    pairs, ours, theirs = pair_moments(reference, candidate)
    assert [(a.step, b.step) for a, b, _ in pairs] == [(1, 1), (2, 2), (3, 3)]
    assert {text for _, _, text in pairs} == {"by step: one run has no epochs"}
    assert (ours, theirs) == (reference[:1], [])


def test_steps_that_begin_anew_in_each_epoch_pair_in_order():
    reference = [Moment(step=n, batch=n) for n in range(4)]
    candidate = [Moment(epoch=n // 2, step=n % 2, batch=n % 2) for n in range(4)]
    pairs, _, _ = pair_moments(reference, candidate)
    assert pairs == [(a, b, "in order") for a, b in zip(reference, candidate, strict=True)]


def test_ranks_pair_by_their_number():
    one, several = [Moment(rank=1)], [Moment(rank=n) for n in range(3)]
    assert pair_moments(one, several) == ([(one[0], several[1], "")], [], [several[0], several[2]])
    assert pair_moments(one, [Moment(rank=0)]) == ([], one, [Moment(rank=0)])
