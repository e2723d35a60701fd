"""A tensor in somebody's file: one contract for every format, against the library that wrote it."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layerscope.errors import Damaged, LayerscopeError
from layerscope.points import Moment, Point
from layerscope.store.address import folder
from layerscope.store.layouts import unread
from layerscope.store.layouts.arrays import NUMPY, array, npy, npz
from layerscope.store.layouts.huggingface import _in_file
from layerscope.store.layouts.torchfiles import saved, tensor_in
from layerscope.store.layouts.unread import later

SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3, 4), (1, 7, 33)]
LAYOUTS = ["rows", "columns", "turned", "holes", "swapped"]
BEYOND_NUMPY = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


def made(dtype, shape):
    values = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape) % 100
    return values.to(getattr(torch, dtype))


def strided(tensor, layout):
    """Return the same values lying in another way."""
    back = tuple(range(tensor.dim()))[::-1]
    if layout == "columns":
        return tensor.permute(back).contiguous().permute(back)
    if layout == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "holes" and tensor.dim():
        between = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)[..., ::2]
        return between.copy_(tensor)
    return tensor


def as_numpy(tensor, layout):
    values = strided(tensor, layout).numpy()
    return values.astype(values.dtype.newbyteorder(">")) if layout == "swapped" else values


def save_npy(path, tensor, layout):
    np.save(path / "x", as_numpy(tensor, layout))
    (path / "x.npy").rename(path / "x")


def save_npz(save):
    def write(path, tensor, layout):
        with (path / "x").open("wb") as file:
            save(file, x=as_numpy(tensor, layout))

    return write


def save_pt(zipped):
    def write(path, tensor, layout):
        torch.save(strided(tensor, layout), path / "x", _use_new_zipfile_serialization=zipped)

    return write


def read_npz(files, name):
    return array(files, name, next(iter(npz(files, name).values())))


def read_pt(files, name):
    return tensor_in(saved(files, name), f"{files.address}/{name}")


OLD = [name for name in NUMPY if not name.startswith("uint") or name == "uint8"]  # what torch reads from its old format
FORMATS = {
    "npy": (save_npy, npy, NUMPY, LAYOUTS),
    "npz": (save_npz(np.savez), read_npz, NUMPY, LAYOUTS),
    "packed": (save_npz(np.savez_compressed), read_npz, NUMPY, LAYOUTS),
    "pt": (save_pt(True), read_pt, [*NUMPY, *BEYOND_NUMPY], LAYOUTS[:4]),
    "old pt": (save_pt(False), read_pt, [*OLD, "bfloat16"], LAYOUTS[:4]),
    "safetensors": (
        lambda path, tensor, layout: save_file({"data": tensor}, path / "x"),
        _in_file,
        [name for name in [*NUMPY, *BEYOND_NUMPY] if name != "complex128"],
        ["rows"],
    ),
}
each = pytest.mark.parametrize("kind", FORMATS)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@each
def test_every_dtype_and_layout_is_read_whole_and_in_pieces(tmp_path, monkeypatch, kind):
    save, read, dtypes, layouts = FORMATS[kind]
    monkeypatch.setattr(unread, "_BLOCK", 64)
    monkeypatch.setattr(unread, "_AT_A_TIME", 64)
    for dtype, shape, layout in product(dtypes, SHAPES, layouts):
        wanted = made(dtype, shape)
        save(tmp_path, wanted, layout)
        found = read(folder(tmp_path), "x")
        whole = found.load()
        facts = (found.dtype, found.shape, found.nbytes)
        assert facts == (dtype, shape, wanted.nbytes)
        assert (whole.dtype, whole.shape) == (wanted.dtype, wanted.shape)
        assert bits(whole) == bits(wanted)
        for items in (3, 10, 1 << 20):
            pieces = list(found.pieces(items))
            assert all(0 < len(piece) <= items and piece.dim() == 1 for piece in pieces)
            assert bits(torch.cat([wanted.reshape(-1)[:0], *pieces])) == bits(wanted)


@each
def test_what_is_handed_out_is_its_own_and_the_file_stays(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    wanted = made("float32", (4, 6))
    save(tmp_path, wanted, "rows")
    before = (tmp_path / "x").read_bytes()
    found = read(folder(tmp_path), "x")
    whole, first = found.load(), next(found.pieces(5))
    whole.zero_()
    first.zero_()
    assert torch.equal(found.load(), wanted)
    assert (tmp_path / "x").read_bytes() == before
    whole, pieces = found.load(), list(found.pieces(5))
    (tmp_path / "x").unlink()
    assert torch.equal(whole, wanted)
    assert torch.equal(torch.cat(pieces), wanted.reshape(-1))


@each
def test_two_who_go_through_one_tensor_do_not_disturb_each_other(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    save(tmp_path, made("int16", (100,)), "rows")
    found = read(folder(tmp_path), "x")
    for one, other in zip(found.pieces(7), found.pieces(7), strict=True):
        assert one.tolist() == other.tolist()
    pieces = found.pieces(7)
    assert next(pieces).tolist() == [1, 2, 3, 4, 5, 6, 7]
    pieces.close()


@each
def test_a_file_that_is_cut_changed_or_gone_after_it_was_opened_is_damaged(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    save(tmp_path, made("float64", (1 << 18,)), "rows")
    raw = (tmp_path / "x").read_bytes()
    found = read(folder(tmp_path), "x")
    assert len(found.load()) == 1 << 18

    def cut():
        (tmp_path / "x").write_bytes(raw[: len(raw) // 2])

    def another():
        save(tmp_path, made("float64", (999,)), "rows")

    for change in (cut, another, (tmp_path / "x").unlink):
        change()
        for use in (found.load, lambda: list(found.pieces(1000))):
            with pytest.raises(Damaged, match=f"{tmp_path}/x"):
                use()
    (tmp_path / "x").write_bytes(raw)
    pieces = found.pieces(10)
    assert next(pieces).tolist() == list(range(1, 11))
    if kind not in ("npz", "packed"):  # a stream that is open reads what is left, to its checksum
        cut()
        with pytest.raises(Damaged, match=f"{tmp_path}/x"):
            list(pieces)


@each
def test_a_file_cut_at_any_length_is_damaged_in_one_sentence_by_its_name(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    save(tmp_path, made("float32", (100,)), "rows")
    raw = (tmp_path / "x").read_bytes()
    for left in range(0, len(raw), 23):
        (tmp_path / "x").write_bytes(raw[:left])
        with pytest.raises(LayerscopeError) as told:
            read(folder(tmp_path), "x").load()
        assert f"{tmp_path}/x" in str(told.value)
        assert "\n" not in str(told.value)


@each
def test_changed_bytes_give_an_answer_or_a_refusal_and_no_other_error(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    save(tmp_path, made("float32", (30,)), "rows")
    raw = (tmp_path / "x").read_bytes()
    rng = random.Random(0)
    refusals = []
    for _ in range(150):
        changed = bytearray(raw)
        changed[rng.randrange(len(raw))] = rng.randrange(256)
        (tmp_path / "x").write_bytes(changed)
        try:
            found = read(folder(tmp_path), "x")
            assert found.nbytes <= len(raw)
            assert len(found.load().reshape(-1)) == sum(map(len, found.pieces(7)))
        except LayerscopeError as error:
            refusals.append(str(error))
    assert len(refusals) > 1
    assert all(f"{tmp_path}/x" in said for said in refusals)


@each
def test_what_lies_elsewhere_is_the_same(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    wanted = made("float32", (5, 3))
    save(tmp_path, wanted, "rows")
    files = folder(f"memory://unread/{kind}")
    files.put("x", (tmp_path / "x").read_bytes())
    found = read(files, "x")
    assert torch.equal(found.load(), wanted)
    assert torch.equal(torch.cat(list(found.pieces(4))), wanted.reshape(-1))
    with pytest.raises(FileNotFoundError):
        read(files, "none")


@each
def test_an_item_says_where_it_stands_and_what_it_is(tmp_path, kind):
    save, read, _, _ = FORMATS[kind]
    save(tmp_path, made("float32", (2, 3)), "rows")
    found = read(folder(tmp_path), "x")
    item = found.item(Point("p"), Moment(step=3), note={"a": 1})
    assert (item.point, item.moment, item.dtype, item.shape, item.nbytes) == (
        Point("p"), Moment(step=3), "float32", (2, 3), 24,
    )  # fmt: skip
    assert item.note == {"a": 1}
    assert item.load().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert [piece.tolist() for piece in item.pieces(4)] == [[1, 2, 3, 4], [5, 6]]
    assert str(found) == "float32 of shape [2, 3]"


def test_blocks_come_in_row_major_order_and_none_is_too_large():
    for shape, most in product([(), (5,), (2, 3, 4), (7, 1, 3), (0, 3), (1, 1, 9)], [1, 2, 5, 12, 100]):
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        found = [values[at].reshape(-1) for at in unread.blocks(shape, most)]
        assert all(len(block) <= most for block in found)
        assert np.concatenate(found).tolist() == values.reshape(-1).tolist()


def test_what_is_read_later_is_opened_when_it_is_asked_for_and_must_be_what_was_said(tmp_path):
    files = folder(tmp_path)

    def said(dtype="float32", shape=(2, 3)):
        return later(files, "x", dtype, shape, read_pt, "the list")

    item = said().item(Point("x"), Moment(step=3))
    assert (item.dtype, item.shape, item.nbytes) == ("float32", (2, 3), 24)
    with pytest.raises(Damaged, match="x is not there any more"):
        item.load()
    torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "x")
    assert item.load().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert next(item.pieces(5)).tolist() == [0, 1, 2, 3, 4]
    for dtype, shape in (("float32", (3, 2)), ("int32", (2, 3))):
        with pytest.raises(Damaged, match=r"holds float32 of shape \[2, 3\], and the list speaks of"):
            said(dtype, shape).load()
