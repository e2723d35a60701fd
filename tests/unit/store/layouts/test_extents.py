"""Where a tensor lies in a file."""

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.store.address import LocalFolder
from layerscope.store.layouts.extents import Extent


@pytest.fixture
def files(tmp_path):
    (tmp_path / "raw").write_bytes(b"head" + np.arange(24, dtype="<i4").tobytes())
    return LocalFolder(tmp_path)


def test_row_major_values_are_read_whole_and_by_the_stretch(files):
    extent = Extent(files, "raw", 4, "int32", (4, 6))
    assert extent.load().tolist() == np.arange(24).reshape(4, 6).tolist()
    assert extent.stretch(3, 6).tolist() == [3, 4, 5]
    assert (extent.count, extent.nbytes, extent.span, extent.in_order) == (24, 96, 96, True)


def test_strides_are_followed_and_take_the_span_they_need(files):
    column = Extent(files, "raw", 4, "int32", (4, 6), (1, 4))
    assert column.load().tolist() == np.arange(24).reshape(6, 4).T.tolist()
    every = Extent(files, "raw", 4, "int32", (4,), (6,))
    assert (every.load().tolist(), every.nbytes, every.span) == ([0, 6, 12, 18], 16, 76)
    assert not column.in_order
    assert not every.in_order


def test_swapped_bytes_are_put_right(tmp_path):
    wanted = np.array([1 + 2j, 3 - 4j], np.complex64)
    (tmp_path / "raw").write_bytes(wanted.astype(">c8").tobytes())
    assert Extent(LocalFolder(tmp_path), "raw", 0, "complex64", (2,), swapped=True).load().tolist() == wanted.tolist()


def test_nothing_is_an_empty_tensor_of_its_shape_and_dtype(files):
    empty = Extent(files, "raw", 4, "bfloat16", (0, 3), (3, 1)).load()
    assert (empty.shape, empty.dtype) == ((0, 3), torch.bfloat16)


def test_what_is_not_there_is_damaged(files):
    with pytest.raises(Damaged, match="raw is truncated: 4 bytes of its values are not there"):
        Extent(files, "raw", 4, "int32", (25,)).load()


def test_an_item_has_a_stretch_only_where_values_lie_in_order(files):
    item = Extent(files, "raw", 4, "int32", (24,)).item(Point("p"), Moment(step=3), note={"a": 1})
    assert (item.point, item.moment, item.shape, item.note) == (Point("p"), Moment(step=3), (24,), {"a": 1})
    assert item.stretch is not None
    assert Extent(files, "raw", 4, "int32", (4, 6), (1, 4)).item(Point("p")).stretch is None
