"""Where a tensor lies in a file."""

from itertools import permutations

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.store.address import LocalFolder
from layerscope.store.layouts import extents
from layerscope.store.layouts.extents import Extent


@pytest.fixture
def files(tmp_path):
    (tmp_path / "raw").write_bytes(b"head" + np.arange(24, dtype="<i4").tobytes())
    return LocalFolder(tmp_path)


def test_row_major_values_are_read_whole_and_by_the_stretch(files):
    extent = Extent(files, "raw", 4, "int32", (4, 6))
    assert extent.load().tolist() == np.arange(24).reshape(4, 6).tolist()
    assert [piece.tolist() for piece in extent.pieces(3)][1] == [3, 4, 5]
    assert (extent.count, extent.nbytes, extent.span) == (24, 96, 96)


def test_strides_are_followed_and_take_the_span_they_need(files):
    column = Extent(files, "raw", 4, "int32", (4, 6), (1, 4))
    assert column.load().tolist() == np.arange(24).reshape(6, 4).T.tolist()
    every = Extent(files, "raw", 4, "int32", (4,), (6,))
    assert (every.load().tolist(), every.nbytes, every.span) == ([0, 6, 12, 18], 16, 76)


@pytest.mark.parametrize("items", [1, 5, 7, 64, 1000])
@pytest.mark.parametrize(("block", "at_a_time"), [(64, 16), (200, 64), (1 << 20, 1 << 20), (1, 1)])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_pieces_are_the_values_in_row_major_order_however_they_lie(
    monkeypatch, tmp_path, order, block, at_a_time, items
):
    monkeypatch.setattr(extents, "_BLOCK", block)
    monkeypatch.setattr(extents, "_AT_A_TIME", at_a_time)
    lying = np.arange(4 * 5 * 6, dtype="<i4").reshape(4, 5, 6)
    (tmp_path / "raw").write_bytes(b"head" + lying.tobytes())
    seen = lying.transpose(order)
    stride = tuple(step // 4 for step in seen.strides)
    extent = Extent(LocalFolder(tmp_path), "raw", 4, "int32", seen.shape, stride)
    pieces = list(extent.pieces(items))
    assert all(0 < piece.numel() <= items and piece.dim() == 1 for piece in pieces)
    assert torch.cat(pieces).tolist() == seen.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4,), (6,)), ((3, 4), (0, 2)), ((2, 3), (12, 0)), ((1, 1), (5, 7)), ((), ()), ((3, 4), (1, 1))],
)
def test_holes_repeats_and_overlaps_are_pieces_as_torch_sees_them(monkeypatch, files, shape, stride):
    monkeypatch.setattr(extents, "_BLOCK", 12)
    monkeypatch.setattr(extents, "_AT_A_TIME", 8)
    extent = Extent(files, "raw", 4, "int32", shape, stride)
    wanted = torch.arange(24, dtype=torch.int32).as_strided(shape, stride)
    assert torch.cat(list(extent.pieces(3))).tolist() == wanted.reshape(-1).tolist()


def test_a_piece_stays_what_it_was_when_the_next_is_read(monkeypatch, files):
    monkeypatch.setattr(extents, "_BLOCK", 16)
    pieces = Extent(files, "raw", 4, "int32", (4, 6), (1, 4)).pieces(2)
    first = next(pieces)
    assert sum(piece.numel() for piece in pieces) == 22
    assert first.tolist() == [0, 4]


def test_nothing_has_no_pieces(files):
    assert list(Extent(files, "raw", 4, "int32", (0, 3), (1, 0)).pieces(5)) == []


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
    with pytest.raises(Damaged, match="raw is truncated: 4 bytes"):
        list(Extent(files, "raw", 4, "int32", (5, 5), (1, 5)).pieces(3))


def test_an_item_is_read_piece_by_piece_however_its_values_lie(files):
    item = Extent(files, "raw", 4, "int32", (24,)).item(Point("p"), Moment(step=3), note={"a": 1})
    assert (item.point, item.moment, item.shape, item.note) == (Point("p"), Moment(step=3), (24,), {"a": 1})
    column = Extent(files, "raw", 4, "int32", (4, 6), (1, 4)).item(Point("p"))
    assert [piece.tolist() for piece in item.pieces(20)] == [[*range(20)], [*range(20, 24)]]
    assert next(column.pieces(6)).tolist() == [*range(0, 24, 4)]
