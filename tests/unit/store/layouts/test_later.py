"""A tensor whose file is opened when it is asked for."""

from __future__ import annotations

import pytest
import torch

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.store.address import folder
from layerscope.store.layouts.later import Later
from layerscope.store.layouts.torchfiles import saved


def later(path, dtype="float32", shape=(2, 3)):
    return Later(folder(path), "x.pt", dtype, shape, saved, "the list")


def test_nothing_is_opened_before_it_is_asked_for(tmp_path):
    item = later(tmp_path).item(Point("x"), Moment(step=3), note={"a": 1})
    assert (item.point, item.moment.step, item.dtype, item.shape, item.nbytes) == (Point("x"), 3, "float32", (2, 3), 24)
    with pytest.raises(Damaged, match=r"x\.pt is not there any more"):
        item.load()


@pytest.mark.parametrize("turned", [False, True])
def test_values_come_in_row_major_order_whatever_the_strides(tmp_path, turned):
    values = torch.arange(6.0).reshape(2, 3)
    torch.save(values.T.contiguous().T if turned else values, tmp_path / "x.pt")
    found = later(tmp_path)
    assert torch.equal(found.load(), values)
    assert next(found.pieces(5)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (3, 2)), ("int32", (2, 3))])
def test_what_is_not_what_was_said_is_damaged(tmp_path, dtype, shape):
    torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "x.pt")
    with pytest.raises(Damaged, match=r"holds float32 of shape \[2, 3\], and the list speaks of"):
        later(tmp_path, dtype, shape).load()
