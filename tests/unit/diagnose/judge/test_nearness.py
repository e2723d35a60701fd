"""Which pairs the kernel takes, how they lie, that it compiles; what it makes of them is tested in tests/kernels."""

from __future__ import annotations

import pytest
import torch

from layerscope.diagnose.judge import nearness
from layerscope.stats.tensor_views import ITEMS


def test_every_dtype_has_a_reading_but_those_that_hold_two_numbers_in_one():
    known = {str(dtype).removeprefix("torch.") for dtype in nearness._READ}
    assert set(ITEMS) - known == {"complex32", "complex64", "complex128", "float4_e2m1fn_x2"}


def test_tensors_on_the_host_are_not_taken():
    assert not nearness.takes(torch.ones(3), torch.ones(3))
    assert not nearness.takes([1.0], torch.ones(3))


def test_plain_tensors_on_one_device_are_taken(monkeypatch):
    monkeypatch.setattr(nearness, "_there", lambda tensor: True)
    monkeypatch.setattr(nearness, "why_not", lambda: "")
    wide = torch.empty(2**31, dtype=torch.bfloat16, device="meta")
    assert nearness.takes(wide[1:], wide[:-1].float())
    assert not nearness.takes(wide, wide)
    assert not nearness.takes(wide[:8], torch.ones(8))
    assert not nearness.takes(torch.ones(8, dtype=torch.complex64), torch.ones(8))
    assert not nearness.takes(torch.ones(8).to_sparse(), torch.ones(8))
    monkeypatch.setattr(nearness, "why_not", lambda: "Triton is not installed")
    assert not nearness.takes(torch.ones(8), torch.ones(8))


def test_a_thread_reads_sixteen_bytes_of_the_wider_side():
    assert nearness._vector(torch.bfloat16, torch.bfloat16) == 8
    assert nearness._vector(torch.bfloat16, torch.float32) == 4
    assert nearness._vector(torch.float64, torch.int8) == 2
    assert nearness._vector(torch.uint8, torch.bool) == 8


def test_what_does_not_lie_in_order_or_on_sixteen_bytes_is_copied():
    plain = torch.randn(8, 16)
    assert nearness._lying(plain).data_ptr() == plain.data_ptr()
    for view in (plain.t(), plain.view(-1)[1:], torch.complex(plain, plain).conj().imag):
        lying = nearness._lying(view)
        assert lying.is_contiguous()
        assert lying.data_ptr() % 16 == 0
        assert not lying.is_neg()
        assert torch.equal(lying, view)


def test_the_kernel_compiles_for_the_devices_it_is_written_for(monkeypatch):
    hopper = pytest.importorskip("hopper", reason="Triton is not installed")
    monkeypatch.setattr(nearness, "launching", hopper.compiled)
    made = nearness._launching.__wrapped__(torch.device("cuda", 0), torch.float32, torch.bfloat16)
    assert len(made) > 1000
