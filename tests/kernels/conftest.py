"""Kernels run on a GPU, or in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`."""

from __future__ import annotations

import os

import pytest
import torch

_REASON = "there is no CUDA device; TRITON_INTERPRET=1 runs the kernels without one"


@pytest.fixture(autouse=True)
def _somewhere_to_run():
    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip(_REASON)
