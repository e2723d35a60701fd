from __future__ import annotations

import pytest
import torch

import layerscope as ls
from layerscope.points import Moment, Point
from layerscope.store import MemoryRun

SCORES = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(8, 8, dtype=torch.bool).triu(diagonal=1)


def run(tensor):
    held = MemoryRun()
    held.add(Point("scores"), Moment(), tensor=tensor)
    held.close()
    return held


def compared(reference, candidate):
    [row] = ls.compare(run(reference), run(candidate)).rows
    return row


def lowest(dtype=torch.float32):
    return torch.finfo(dtype).min


@pytest.mark.parametrize("value", [lowest(), -1e9, -torch.inf])
def test_a_fault_beside_masked_values_is_seen(value):
    reference = SCORES.masked_fill(MASK, value)
    assert compared(reference, (-3 * SCORES).masked_fill(MASK, value)).kind == "root"
    healthy = compared(reference, (SCORES * (1 + 1e-7)).masked_fill(MASK, value))
    assert healthy.kind == "noise"
    assert healthy.metrics.compared == SCORES.numel() - 8 * MASK.sum()
    expected = (SCORES * (1 + 1e-7) - SCORES)[:, :, ~MASK].double().norm() / SCORES[:, :, ~MASK].double().norm()
    assert healthy.metrics.relative_l2 == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(8, 8).masked_fill(MASK, -torch.inf),
        torch.zeros(8, 8).masked_fill(MASK, lowest(torch.float16)).half(),
        torch.zeros(8, 8).masked_fill(MASK, -1e9),
    ],
    ids=["-inf", "float16", "-1e9"],
)
def test_masks_agree_whatever_stands_for_minus_infinity(other):
    assert compared(torch.zeros(8, 8).masked_fill(MASK, lowest()), other).kind == "same"


def test_a_mask_that_is_off_by_one_does_not_agree():
    reference = torch.zeros(8, 8).masked_fill(MASK, lowest())
    shifted = torch.zeros(8, 8).masked_fill(MASK.roll(1, 1), lowest(torch.float16)).half()
    assert compared(reference, shifted).kind == "nonfinite"
