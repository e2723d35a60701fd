"""dtypes.py: torch's dtypes by name, without torch."""

from __future__ import annotations

import pytest
import torch

from layerscope.errors import Unsupported
from layerscope.store.dtypes import STORED, nbytes, stored


@pytest.mark.parametrize("dtype", STORED)
def test_the_itemsize_is_torchs(dtype):
    assert stored(dtype).itemsize == getattr(torch, dtype).itemsize


def test_every_ordinary_torch_dtype_has_a_place():
    kinds = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
    sub_byte = {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
    quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    untyped = {"bit", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    assert kinds - STORED.keys() <= sub_byte | quantised | untyped


@pytest.mark.parametrize(
    ("dtype", "shape", "told"),
    [
        ("float32", (2, 3), (2, 3)),
        ("float32", (), ()),
        ("complex128", (2, 3), (2, 3, 2)),
        ("complex128", (), (2,)),
        ("complex32", (0,), (0, 2)),
        ("float4_e2m1fn_x2", (2, 3), (2, 6)),
        ("float4_e2m1fn_x2", (), (2,)),
    ],
)
def test_a_header_is_told_the_stored_shape(dtype, shape, told):
    assert stored(dtype).header_shape(shape) == told


def test_an_unknown_dtype_is_refused_with_what_there_is_and_what_to_do():
    with pytest.raises(Unsupported, match=r"cannot hold dtype 'qint8'; it holds float64, .*dequantize\(\)"):
        stored("qint8")


def test_sizes_do_not_overflow():
    assert nbytes("float64", (2**40, 2**40)) == 2**83
    assert nbytes("bfloat16", ()) == 2
    assert nbytes("bfloat16", (5, 0)) == 0
