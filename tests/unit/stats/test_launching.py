"""Triton may be missing, which is said; its kernels take addresses."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from layerscope.stats import launching


def test_where_triton_is_missing_it_is_said():
    hidden = (
        "import sys; sys.modules['triton'] = None; from layerscope.stats.launching import why_not; print(why_not())"
    )
    said = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True).stdout
    assert said.startswith("Triton is not installed") or torch.version.hip is not None


def test_without_triton_the_kernels_are_plain_functions_that_nobody_calls():
    hidden = (
        "import sys; sys.modules['triton'] = None\n"
        "from layerscope.stats.device import sweeping, takes\n"
        "import torch; print(callable(sweeping.sweep), takes(torch.ones(3)))"
    )
    said = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "True"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint64, torch.float64], ids=str)
def test_an_address_is_read_as_the_item_that_lies_there(dtype):
    there = torch.tensor([7, 9], dtype=torch.float64).to(dtype)
    assert launching._lying(there[1:].data_ptr(), dtype).item() == 9


def test_a_tensor_without_items_has_an_address_too():
    assert launching._lying(torch.empty(0).data_ptr(), torch.float32).numel() == 1


@pytest.mark.parametrize(
    "sizes",
    [{"global_scratch_size": 64, "profile_scratch_size": 0}, {"global_scratch_size": 0, "profile_scratch_size": 8}, {}],
    ids=["memory", "a profile", "a version that does not say"],
)
def test_a_kernel_that_wants_scratch_memory_is_refused(sizes):
    with pytest.raises(RuntimeError, match="sweep needs scratch memory"):
        launching._refuse_scratch(SimpleNamespace(name="sweep", **sizes))
    launching._refuse_scratch(SimpleNamespace(name="sweep", global_scratch_size=0, profile_scratch_size=0))
