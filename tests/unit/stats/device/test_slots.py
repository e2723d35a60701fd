"""Which tensors the kernels take, and how; what they make of them is tested in tests/kernels."""

from __future__ import annotations

import torch

from layerscope.stats.device import takes
from layerscope.stats.device.slots import KINDS
from layerscope.stats.tensor_views import ITEMS


def test_every_dtype_has_a_kernel_but_those_that_hold_two_numbers_in_one():
    known = {str(dtype).removeprefix("torch.") for dtype in KINDS}
    assert set(ITEMS) - known == {"complex32", "complex64", "complex128", "float4_e2m1fn_x2"}


def test_more_items_than_the_counters_can_count_are_left_to_the_host():
    assert takes(torch.empty(2**31 - 1, dtype=torch.bfloat16, device="meta"))
    assert not takes(torch.empty(2**31, dtype=torch.bfloat16, device="meta"))
    assert not takes(torch.empty(8, dtype=torch.complex64, device="meta"))


def test_a_tile_is_a_whole_number_of_the_fingerprints_blocks():
    from layerscope.stats.fingerprints import BLOCK

    assert all(kind.threads * kind.vector % BLOCK == 0 for kind in KINDS.values())
    assert all(kind.vector in (4, 8) for kind in KINDS.values())
