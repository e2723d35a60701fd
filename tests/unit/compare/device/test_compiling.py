"""The kernels for pairs compile for the devices they are written for; what they compute is tested in tests/kernels."""

from __future__ import annotations

import pytest
import torch

from layerscope.compare.device import mending, nearness, pairs, striding

hopper = pytest.importorskip("hopper", reason="Triton is not installed")
DEVICE = torch.device("cuda", 0)
WIDE = pytest.mark.stress


@pytest.mark.parametrize(
    ("kernel", "dtype", "by_token"),
    [
        (striding.stride, torch.bfloat16, True),
        pytest.param(striding.stride, torch.float32, False, marks=WIDE),
        pytest.param(striding.stride, torch.float64, False, marks=WIDE),
        pytest.param(mending.mend, torch.bfloat16, True, marks=WIDE),
        pytest.param(mending.mend, torch.uint8, False, marks=WIDE),
    ],
    ids=["stride-bfloat16", "stride-float32", "stride-float64", "mend-bfloat16", "mend-uint8"],
)
def test_a_pass_over_a_pair_compiles(kernel, dtype, by_token, monkeypatch):
    monkeypatch.setattr(pairs, "launching", hopper.compiled)
    narrow = dtype.itemsize < 8
    unit = pairs.vector(dtype, dtype)
    made = pairs._launching.__wrapped__(kernel, DEVICE, dtype, dtype, narrow, not narrow, by_token, unit, 32)
    assert len(made) > 1000


def test_the_lean_pass_compiles(monkeypatch):
    monkeypatch.setattr(nearness, "launching", hopper.compiled)
    made = nearness._launching.__wrapped__(DEVICE, torch.float32, torch.bfloat16)
    assert len(made) > 1000
