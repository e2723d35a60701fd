"""Steps count by themselves until the caller counts."""

from __future__ import annotations

import pytest

from layerscope.points import Moment
from layerscope.recorder.clock import Clock


def test_left_alone_each_forward_is_a_step_and_a_batch():
    clock = Clock(rank=3, step=10)
    assert [clock.begin(), clock.begin()] == [Moment(None, 10, 0, 0, 3), Moment(None, 11, 1, 0, 3)]


def test_an_epoch_alone_restarts_the_batches_and_leaves_the_steps_counting():
    clock = Clock()
    seen = []
    for epoch in (1, 2):
        clock.set(epoch=epoch)
        seen += [clock.begin(), clock.begin()]
    assert [(m.epoch, m.step, m.batch) for m in seen] == [(1, 0, 0), (1, 1, 1), (2, 2, 0), (2, 3, 1)]


def test_saying_the_same_epoch_again_changes_nothing():
    clock = Clock()
    clock.set(epoch=1)
    clock.begin()
    clock.set(epoch=1)
    assert clock.begin() == Moment(1, 1, 1)


def test_a_named_batch_holds_until_the_next_and_is_one_step():
    clock = Clock()
    clock.set(epoch=2, batch=7)
    first, second = clock.begin(), clock.begin()
    assert first is second
    assert first == Moment(2, 0, 7)
    clock.set(epoch=2, batch=8)
    assert clock.begin() == Moment(2, 1, 8)


def test_a_named_moment_that_no_forward_used_takes_no_step():
    clock = Clock()
    clock.set(batch=0)
    clock.set(batch=1)
    assert clock.begin() == Moment(None, 0, 1)


def test_a_named_step_is_taken_as_it_is_and_counting_goes_on_after_it():
    clock = Clock()
    clock.set(step=100)
    assert clock.begin().step == 100
    clock.set(epoch=0)
    assert clock.begin() == Moment(0, 101, 0)


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"batch": "3"}, {"step": 1.5}, {"step": True}])
def test_what_is_no_moment_is_refused(wrong):
    with pytest.raises(ValueError, match="is not a moment; give a whole number from 0 on"):
        Clock().set(**wrong)


def test_naming_the_same_moment_again_goes_on_with_it():
    clock = Clock()
    seen = []
    for _ in range(3):
        clock.set(epoch=0, step=5, batch=1)
        seen.append(clock.begin())
    assert seen[0] is seen[1] is seen[2]


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    clock = Clock()
    clock.set(epoch=np.int64(2), batch=np.int32(4))
    assert clock.begin() == Moment(2, 0, 4)
