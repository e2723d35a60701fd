"""What a summary made on a device must be, and tensors to try it on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerscope.stats import summarize

BYTES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8, torch.bool]
WORDS = [torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def values(dtype, size):
    """Numbers of every magnitude, or every kind of bits."""
    torch.manual_seed(size)
    if dtype in FLOATS:
        return (torch.randn(size) * torch.exp2(torch.randint(-30, 30, (size,)).float())).to(dtype)
    if dtype is torch.bool:
        return torch.rand(size) > 0.3
    words = torch.randint(-(2**63), 2**63 - 1, (size * dtype.itemsize // 8 + 1,))
    return words.view(torch.uint8)[: size * dtype.itemsize].view(dtype)


def assert_like_the_cpu(summary, tensor, *, level="full"):
    """Counts, extremes, fingerprints and sketch exactly; moments to the stated bound, of the CPU's and of numpy's."""
    bound = 2e-7 if tensor.dtype in FLOATS[:3] else 1e-9
    expected = summarize(tensor, level=level)
    exact = ("count", "nan", "posinf", "neginf", "zeros", "fingerprint", "placed", "sketch", "dtype", "shape")
    for name in exact:
        assert getattr(summary, name) == getattr(expected, name), name
    for name in ("first", "min", "max"):
        assert repr(getattr(summary, name)) == repr(getattr(expected, name)), name
    small = bound * expected.l1 / max(expected.finite, 1)  # a mean near zero has no digits of its own
    assert summary.mean == pytest.approx(expected.mean, rel=bound, abs=min(small, 1e300), nan_ok=True)
    for name in ("std", "l1", "l2", "rms"):
        assert getattr(summary, name) == pytest.approx(getattr(expected, name), rel=bound, abs=0.0, nan_ok=True), name
    if tensor.dtype in FLOATS and summary.finite and expected.absmax < 1e100:
        finite = tensor.double().flatten().numpy()
        finite = finite[np.isfinite(finite)].astype(np.longdouble)
        assert summary.std == pytest.approx(float(finite.std()), rel=bound, abs=1e-300)
        assert summary.l2 == pytest.approx(float(np.sqrt((finite**2).sum())), rel=bound, abs=1e-300)
