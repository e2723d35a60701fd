"""Parts of both sides go side by side."""

import numpy as np
import pytest
import torch

from layerscope.compare.measure import operands
from layerscope.compare.measure.operands import chunk_pairs, operand
from layerscope.errors import Unsupported


@pytest.mark.parametrize("part", [1, 5, 7, 1000])
def test_parts_are_equally_long_and_in_order(part, monkeypatch):
    monkeypatch.setattr(operands, "CHUNK", part)
    monkeypatch.setattr("layerscope.stats.tensor_views._COPY", 11)
    x, y = torch.arange(60.0).reshape(3, 20), torch.arange(60.0).reshape(20, 3).T
    found = [(one.copy(), other.copy()) for one, other in chunk_pairs(operand(x), operand(y))]
    assert all(one.size == other.size <= part for one, other in found)
    np.testing.assert_array_equal(np.concatenate([one for one, _ in found]), x.reshape(-1))
    np.testing.assert_array_equal(np.concatenate([other for _, other in found]), y.reshape(-1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "int8", "bool", "int16", "uint16"])
def test_narrow_values_become_float32_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    tensor = codes.view(getattr(torch, dtype)) if dtype != "bool" else codes > 7
    side = operand(tensor)
    ((one, _),) = chunk_pairs(side, side)
    values = side.values(one)
    assert values.dtype == side.kind == np.float32
    expected = tensor.numpy() if dtype == "uint16" else tensor.double().numpy()
    np.testing.assert_array_equal(values, expected.astype(np.float64))


def test_what_has_no_values_is_refused():
    with pytest.raises(Unsupported, match="meta"):
        operand(torch.empty(3, device="meta"))
    with pytest.raises(Unsupported, match="list"):
        operand([1.0, 2.0])
