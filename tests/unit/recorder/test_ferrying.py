"""The kernels that bring tensors to the host compile for an H200; tests/kernels has what they do."""

from __future__ import annotations

import pytest
import torch

from layerscope.recorder import ferrying

hopper = pytest.importorskip("hopper", reason="Triton is not installed")


@pytest.mark.parametrize("make", [ferrying.ferrying, ferrying.carrying], ids=["ferry", "carry"])
def test_it_compiles(make, monkeypatch):
    monkeypatch.setattr(ferrying, "launching", hopper.compiled)
    assert len(make.__wrapped__(torch.device("cuda", 0))) > 1000
