"""Rows that belong to one token, by hand-written positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerscope.compare.align.positions import Positions, SharedRows, by_position, positions_of
from layerscope.points import Moment, Point
from layerscope.store import MemoryRun
from layerscope.store.manifest import Manifest


def entries(**tensors):
    """Records of one step: a leaf of the model's input each, unless the name says otherwise."""
    run = MemoryRun(Manifest())
    for name, value in tensors.items():
        run.add(Point.parse(name if ":" in name else f".:input[{name}]"), Moment(), tensor=value)
    found = {}
    for entry in run.records():
        found.setdefault(entry.point, {})[entry.moment] = entry
    return found


def entry(value, point="layers.0:output"):
    return next(iter(entries(**{point: value})[Point.parse(point)].values()))


def told(**tensors):
    return positions_of(entries(**tensors))[None, 0, 0, 0]


ONE, TWO = (Positions(np.array(rows), np.array(rows)) for rows in ([[-1, 0, 1], [0, 1, 2]], [[0, 1, -1], [0, 1, 2]]))


def test_a_mask_counts_the_tokens_and_its_last_columns_are_the_rows():
    ids, mask = torch.zeros(2, 2, dtype=torch.long), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    found = told(input_ids=ids, attention_mask=mask, position_ids=torch.zeros(1, 2, dtype=torch.long))
    assert found.keys.tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]
    assert found.rows.tolist() == [[1, 2], [2, 3]]


def test_without_a_mask_stated_positions_count_for_every_sequence():
    found = told(input_ids=torch.zeros(2, 3, dtype=torch.long), cache_position=torch.arange(4, 7))
    assert found.rows.tolist() == [[4, 5, 6]] * 2
    assert found.keys.shape == (2, 7)
    assert positions_of(entries(input_ids=torch.zeros(1, 3, dtype=torch.long))) == {}


@pytest.mark.parametrize("layout", ["rows", "heads", "flat"])
def test_rows_of_the_same_tokens_are_picked_in_one_order(layout):
    values = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
    other = values.clone()
    other[0] = values[0, [1, 2, 0]]  # padded on the other side
    shaped = {
        "rows": lambda t: t,
        "heads": lambda t: t.unsqueeze(1).expand(2, 5, 3, 4),
        "flat": lambda t: t.reshape(6, 4),
    }[layout]
    mine, its = SharedRows(ONE, TWO).of(entry(shaped(values)), entry(shaped(other)))
    assert torch.equal(mine.tensor(), its.tensor())
    assert tuple(mine.tensor().shape) == mine.shape == its.shape
    assert mine.tensor().numel() == 5 * 4 * (5 if layout == "heads" else 1)
    assert torch.equal(torch.cat([*mine.pieces(7)]), mine.tensor().reshape(-1))


def test_attention_weights_are_picked_by_row_and_by_key():
    weights = torch.softmax(torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(0)), -1)
    weights[0, :, :, 0] = 0  # nobody looks at padding
    weights = weights / weights.sum(-1, keepdim=True)
    other = weights.clone()
    other[0] = weights[0][:, [1, 2, 0]][:, :, [1, 2, 0]]
    mine, its = SharedRows(ONE, TWO).of(entry(weights), entry(other))
    assert torch.equal(mine.tensor(), its.tensor())
    assert mine.shape[-1] == 3


def test_what_has_no_axis_of_that_length_is_left_whole():
    short = Positions(np.array([[2]]), np.array([[0, 1, 2]]))
    long = Positions(np.array([[0, 1, 2]]), np.array([[0, 1, 2]]))
    rows = SharedRows(long, short)
    assert rows.of(entry(torch.zeros(1, 1, 8)), entry(torch.zeros(1, 1, 8))) is None
    assert rows.of(entry(torch.zeros(1, 3, 8)), entry(torch.zeros(1, 1, 9))) is None
    assert rows.of(entry(torch.zeros(1, 3, 8)), entry(torch.zeros(1, 1, 8)))[0].shape == (1, 1, 8)


def test_a_step_that_computes_at_once_belongs_to_each_that_computes_a_part():
    whole = Positions(np.array([[0, 1, 2]]), np.array([[0, 1, 2]]))
    parts = {(None, at, 0, 0): Positions(np.array([[at]]), np.arange(at + 1)[None]) for at in range(3)}
    first, *rest = [Moment(step=at) for at in range(3)]

    def share(mine, its):
        return whole.share(parts[None, its.step, 0, 0])

    pairs, lone, other = by_position(([(first, first, "")], [], rest), share)
    assert [(mine.step, its.step) for mine, its, _ in pairs] == [(0, 0), (0, 1), (0, 2)]
    assert (lone, other) == ([], [])
    pairs, lone, other = by_position(([(first, first, "")], rest, []), lambda mine, its: share(its, mine))
    assert [(mine.step, its.step) for mine, its, _ in pairs] == [(0, 0), (1, 0), (2, 0)]
