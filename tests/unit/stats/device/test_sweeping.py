"""The kernels compile for the devices they are written for; what they compute is tested in tests/kernels."""

from __future__ import annotations

import pytest
import torch

from layerscope.stats.device import slots

hopper = pytest.importorskip("hopper", reason="Triton is not installed")
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("dtype", "full"),
    [
        (torch.bfloat16, True),
        (torch.float32, False),
        (torch.float64, False),
        (torch.uint8, False),
        *(
            pytest.param(dtype, full, marks=pytest.mark.stress)
            for dtype in (torch.float16, torch.float32, torch.float64, torch.int64, torch.uint16, torch.float8_e5m2)
            for full in (False, True)
        ),
    ],
    ids=str,
)
def test_a_sweep_compiles(dtype, full, monkeypatch):
    monkeypatch.setattr(slots, "launching", hopper.compiled)
    assert len(slots._sweeping.__wrapped__(DEVICE, dtype, full)) > 1000
    if dtype is not torch.float64:
        assert len(slots._sweeping_all.__wrapped__(DEVICE, dtype, full)) > 1000


def test_peak_and_gathering_compile(monkeypatch):
    monkeypatch.setattr(slots, "launching", hopper.compiled)
    assert len(slots._peaking.__wrapped__(DEVICE)) > 1000
    for buckets in (0, 1 << 15, 1 << 18):
        assert len(slots._gathering.__wrapped__(DEVICE, buckets)) > 1000


def test_a_kernel_that_does_not_compile_is_noticed():
    from layerscope.stats.launching import ANY, jit, tl

    @jit
    def wrong(items, count):
        value = tl.load(items)
        for _ in tl.range(0, count):
            value = value.to(tl.float64)
        tl.store(items, value)

    with pytest.raises(Exception, match="Loop-carried variable"):
        hopper.compiled(wrong, DEVICE, torch.float32, ANY)
