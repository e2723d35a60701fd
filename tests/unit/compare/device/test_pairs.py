"""Which pairs the kernels take, and how they are laid out; what they make of them is tested in tests/kernels."""

from __future__ import annotations

import pytest
import torch

from layerscope.compare.device import pairs
from layerscope.compare.device.reading import READ, THREADS, vector
from layerscope.stats.bits import ITEMS


def test_every_dtype_has_a_reading_but_those_that_hold_two_numbers_in_one():
    known = {str(dtype).removeprefix("torch.") for dtype in READ}
    assert set(ITEMS) - known == {"complex32", "complex64", "complex128", "float4_e2m1fn_x2"}


def test_tensors_on_the_host_are_not_taken():
    assert not pairs.takes(torch.ones(3), torch.ones(3))
    assert not pairs.takes([1.0], torch.ones(3))


def test_plain_tensors_on_one_device_are_taken(monkeypatch):
    monkeypatch.setattr(pairs, "_there", lambda tensor: True)
    monkeypatch.setattr(pairs, "why_not", lambda: "")
    wide = torch.empty(2**31, dtype=torch.bfloat16, device="meta")
    assert pairs.takes(wide[1:], wide[:-1].float())
    assert not pairs.takes(wide, wide)
    assert not pairs.takes(wide[:8], torch.ones(8))
    assert not pairs.takes(torch.ones(8, dtype=torch.complex64), torch.ones(8))
    assert not pairs.takes(torch.ones(8).to_sparse(), torch.ones(8))
    monkeypatch.setattr(pairs, "why_not", lambda: "Triton is not installed")
    assert not pairs.takes(torch.ones(8), torch.ones(8))


@pytest.mark.parametrize("each", [2, 4, 8])
@pytest.mark.parametrize("width", [0, 1, 3, 64, 65, 80, 700, 2048, 50_257, 128_256])
def test_rows_cover_every_element_and_never_two_tokens(width, each):
    for count in (width * 7 or 7, width * 5000 or 123_457):
        plan = pairs._planned(count, width, each)
        assert (plan.rows - 1) * plan.span < count <= plan.rows * plan.span
        assert plan.groups * (THREADS // plan.columns) >= plan.rows
        assert width % plan.span == 0
        assert plan.span % plan.unit == 0
        assert plan.columns in (1, 2, 4, 8, 16, 32)
        assert not plan.whole or plan.columns * each <= plan.span


def test_a_thread_reads_sixteen_bytes_of_the_wider_side():
    assert vector(torch.bfloat16, torch.bfloat16) == 8
    assert vector(torch.bfloat16, torch.float32) == 4
    assert vector(torch.float64, torch.int8) == 2
    assert vector(torch.uint8, torch.bool) == 8


def test_what_does_not_lie_in_order_or_on_sixteen_bytes_is_copied():
    plain = torch.randn(8, 16)
    assert pairs.lying(plain).data_ptr() == plain.data_ptr()
    for view in (plain.t(), plain.view(-1)[1:], torch.complex(plain, plain).conj().imag):
        lying = pairs.lying(view)
        assert lying.is_contiguous()
        assert lying.data_ptr() % 16 == 0
        assert not lying.is_neg()
        assert torch.equal(lying, view)
