"""Grids are found where they were made, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from layerscope.diagnose.causes.grids import grid_of

NORMAL = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [NORMAL, NORMAL.relu(), NORMAL.exp(), torch.rand(4, 40), torch.ones(8, 64)])
def test_values_that_lie_anywhere_are_on_no_grid(values, dtype):
    assert grid_of(values.to(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [0.1, 0.0731])
def test_the_step_is_the_one_that_was_used(dtype, step):
    grid = grid_of((torch.round(NORMAL / step) * step).to(dtype))
    assert grid.step == pytest.approx((step, step), rel=5e-3)
    assert grid.per == "tensor"


def test_a_zero_point_does_not_hide_the_grid():
    low, high = NORMAL.min(), NORMAL.max()
    step = (high - low) / 15
    grid = grid_of(torch.round((NORMAL - low) / step) * step + low)
    assert (grid.bits, grid.per) == (4, "tensor")


@pytest.mark.parametrize(("per", "axis"), [("row", 1), ("column", 0)])
def test_each_row_or_column_may_have_its_own_step(per, axis):
    step = NORMAL.abs().amax(axis, keepdim=True) / 127
    grid = grid_of(torch.round(NORMAL / step) * step)
    assert (grid.bits, grid.per) == (8, per)
    assert grid.step == pytest.approx((float(step.min()), float(step.max())), rel=0.3)


def test_groups_of_a_row_may_have_their_own_steps():
    groups = NORMAL.view(-1, 32)
    step = groups.abs().amax(1, keepdim=True) / 7
    grid = grid_of((torch.round(groups / step) * step).view_as(NORMAL))
    assert str(grid).endswith("(4 bits, one per group of 32)")


@pytest.mark.parametrize(
    "values", [torch.empty(0), torch.zeros(3, 0), torch.tensor(1.5), torch.full((4, 32), torch.nan)]
)
def test_what_has_nothing_to_tell_is_on_no_grid(values):
    assert grid_of(values) is None
