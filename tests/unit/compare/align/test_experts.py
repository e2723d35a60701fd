"""Rows of experts, of all calls of a step together, in the order of the reference."""

from __future__ import annotations

import torch

from layerscope.compare.align.experts import grouped, order_of_rows, rows_together
from layerscope.points import Moment, Point
from layerscope.store import MemoryRun
from layerscope.store.manifest import Manifest

ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -2.0]])


def calls(*tensors):
    run = MemoryRun(Manifest())
    for call, value in enumerate(tensors):
        run.add(Point("mlp.experts.act"), Moment(call=call), tensor=value)
    return [*run.records()]


def test_the_rows_of_several_calls_are_those_of_one():
    ours, theirs = grouped(calls(ROWS[:1], ROWS[1:]), calls(ROWS[[2, 0, 3, 1]]))
    assert ours.shape == theirs.shape == (4, 2)
    assert torch.equal(ours.tensor(), ROWS)
    assert torch.equal(theirs.tensor(), ROWS)


def test_what_is_no_rows_of_one_width_is_not_taken_together():
    assert rows_together(calls(ROWS, ROWS[:1])) == 5
    assert rows_together(calls(ROWS, torch.zeros(2, 3))) is None
    assert rows_together(calls(ROWS.long())) is None
    assert rows_together(calls(ROWS[None])) is None


def test_where_several_are_nearest_to_one_the_surest_comes_first_and_no_row_comes_twice():
    other = torch.tensor([[0.1, 1.2], [1.05, 0.1], [0.3, 0.9], [0.0, -2.0]])
    assert order_of_rows(ROWS, other).tolist() == [1, 0, 2, 3]
    assert sorted(order_of_rows(torch.randn(9, 4), torch.randn(9, 4)).tolist()) == list(range(9))


def test_rows_are_known_by_their_values_and_each_is_used_once():
    assert order_of_rows(ROWS, ROWS[[1, 0, 3, 2]]).tolist() == [1, 0, 3, 2]
    assert order_of_rows(ROWS, ROWS * 1.01).tolist() == list(range(4))
    one_for_all = ROWS[:1].repeat(4, 1)
    assert order_of_rows(ROWS, one_for_all).tolist() == list(range(4))
