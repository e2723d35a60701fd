"""Cases by hand: a module, the same with a fault, and what both make of one input."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from layerscope.diagnose.causes import Case


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def planted() -> Callable[..., Case]:
    """Return a function that makes a case: `spoil` changes the candidate's module, `after` its result."""

    def plant(module=None, spoil=None, *, after=None, dtype=torch.float32, inputs=None, again=None, **known) -> Case:
        torch.manual_seed(0)
        module = module if module is not None else nn.Linear(64, 96)
        inputs = inputs if inputs is not None else torch.randn(2, 16, 64)
        healthy, candidate = deepcopy(module).to(dtype), deepcopy(module).to(dtype)
        with torch.no_grad():
            if spoil is not None:
                spoil(candidate)
            wanted, floor, got = module(inputs), healthy(inputs.to(dtype)), candidate(inputs.to(dtype))
            second = again(got) if again is not None else None
            got = after(got) if after is not None else got
        return Case("suspect", module, candidate, (inputs,), wanted, got, floor, second, **known)

    return plant
