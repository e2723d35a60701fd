"""Numpy's files read by us, against numpy's own loader."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged, Unsupported
from layerscope.points import Point
from layerscope.store import Manifest
from layerscope.store.address import LocalFolder
from layerscope.store.layouts.arrays import NUMPY, array, npy, npz
from layerscope.store.layouts.foreign import ForeignRun

SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]


def values(dtype, shape):
    rng = np.random.default_rng(0)
    whole = rng.standard_normal(shape) * 50
    return (whole + 1j * whole if dtype.startswith("complex") else np.abs(whole)).astype(dtype)


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_numpy_saved_is_what_is_read(tmp_path, dtype, shape):
    saved = values(dtype, shape)
    np.save(tmp_path / "a.npy", saved)
    extent = npy(LocalFolder(tmp_path), "a.npy")
    assert (extent.dtype, extent.shape, extent.nbytes) == (dtype, shape, saved.nbytes)
    read = extent.load()
    assert read.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(read.numpy(), saved, strict=True)


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64", "uint64"])
def test_the_other_byte_order_and_column_order_are_the_same_values(tmp_path, dtype):
    saved = values(dtype, (2, 3, 4))
    np.save(tmp_path / "a.npy", np.asfortranarray(saved.astype(saved.dtype.newbyteorder(">"))))
    extent = npy(LocalFolder(tmp_path), "a.npy")
    assert extent.swapped
    assert not extent.in_order
    np.testing.assert_array_equal(extent.load().numpy(), saved)


def test_a_stretch_is_those_values_and_reads_no_others(tmp_path):
    saved = values("float32", (7, 11))
    np.save(tmp_path / "a.npy", saved)
    extent = npy(LocalFolder(tmp_path), "a.npy")
    assert extent.in_order
    np.testing.assert_array_equal(extent.stretch(5, 40).numpy(), saved.reshape(-1)[5:40])


def test_every_version_of_the_header_is_read(tmp_path):
    for version in ((1, 0), (2, 0), (3, 0)):
        with (tmp_path / "a.npy").open("wb") as file:
            np.lib.format.write_array(file, np.arange(6.0), version=version)
        assert npy(LocalFolder(tmp_path), "a.npy").load().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_gives_each_array_by_its_key(tmp_path, save):
    saved = {
        "mode_2-1_input": values("float32", (2, 3)),
        "a/../b": np.arange(5),
        "column": np.asfortranarray(np.eye(3)),
    }
    save(tmp_path / "a.npz", **saved)
    members = npz(LocalFolder(tmp_path), "a.npz")
    assert list(members) == list(np.load(tmp_path / "a.npz").files)
    for key, wanted in saved.items():
        extent = array(members[key])
        assert (extent.opened is None) == (save is np.savez)
        np.testing.assert_array_equal(extent.load().numpy(), wanted)
        if extent.in_order:
            np.testing.assert_array_equal(extent.stretch(1, 4).numpy(), wanted.reshape(-1)[1:4])


def test_a_changed_byte_of_an_archive_is_noticed(tmp_path):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", a=np.random.default_rng(0).standard_normal(1000))
        raw = bytearray((tmp_path / "a.npz").read_bytes())
        raw[2000] ^= 1
        (tmp_path / "a.npz").write_bytes(raw)
        with pytest.raises(Damaged, match=r"a\.npz.*(checksum|truncated)"):
            array(npz(LocalFolder(tmp_path), "a.npz")["a"]).load()


def saved_bytes(value, **kwargs):
    file = io.BytesIO()
    np.save(file, value, **kwargs)
    return file.getvalue()


def header(shape="(2,)", descr="'<f4'", fortran="False"):
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("raw", "error", "says"),
    [
        (saved_bytes(np.array([{}, []], object), allow_pickle=True), Unsupported, "pickled Python objects"),
        (saved_bytes(np.zeros(4, "V2")), Unsupported, "bfloat16"),
        (saved_bytes(np.zeros(4, [("a", "f4")])), Unsupported, "structured array"),
        (saved_bytes(np.array(["text"])), Unsupported, "torch has no dtype"),
        (saved_bytes(np.zeros(4, "longdouble")), Unsupported, "torch has no dtype"),
        (saved_bytes(np.zeros(4))[:-1], Damaged, r"float64 of shape \[4\] takes 32 bytes, not 31"),
        (saved_bytes(np.zeros(4))[:40], Damaged, "ends within its header"),
        (b"", Damaged, "no .npy array"),
        (b"\x93NUMPY", Damaged, "ends within its header"),
        (b"PK\x03\x04....", Damaged, "no .npy array"),
        (b"\x93NUMPY\x07\x00\x02\x00\x00\x00{}", Damaged, "version 7"),
        (header("(9999999999999, 9999999999999)"), Damaged, "is truncated"),
        (header("(-1,)"), Damaged, "header does not read"),
        (header("(True,)"), Damaged, "header does not read"),
        (header("__import__('os').getcwd()"), Damaged, "header does not read"),
        (header("(" * 2000), Damaged, "header does not read"),
        (header(descr="'nonsense'"), Damaged, "header does not read"),
        (header(fortran="3"), Damaged, "header does not read"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_file_and_reason(tmp_path, raw, error, says):
    (tmp_path / "bad.npy").write_bytes(raw)
    with pytest.raises(error, match=says) as told:
        npy(LocalFolder(tmp_path), "bad.npy")
    assert str(tmp_path / "bad.npy") in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_cut_after_it_was_opened_is_damaged_and_not_short(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(1000))
    extent = npy(LocalFolder(tmp_path), "a.npy")
    with (tmp_path / "a.npy").open("r+b") as file:
        file.truncate(500)
    for read in (extent.load, lambda: extent.stretch(0, 1000)):
        with pytest.raises(Damaged, match="is truncated"):
            read()


def test_a_member_that_states_more_than_its_bytes_can_hold_allocates_nothing(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", saved_bytes(np.zeros(1000)))
    raw = (tmp_path / "a.npz").read_bytes()
    at = raw.index(b"PK\x01\x02") + 24  # the size before compression, in the directory
    (tmp_path / "a.npz").write_bytes(raw[:at] + (1 << 31).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(Damaged, match=r"more than .* can hold"):
        npz(LocalFolder(tmp_path), "a.npz")


def test_a_large_array_is_gone_through_in_little_memory(tmp_path):
    count = 1 << 25  # 128 MiB, of which the file system keeps the header alone
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
        file.truncate(file.tell() + 4 * count)
    item = npy(LocalFolder(tmp_path), "a.npy").item(Point("layers.0"))
    run = ForeignRun("a", "quamba", [item], manifest=Manifest())
    (entry,) = run.records()
    tracemalloc.start()
    seen = sum(piece.numel() for piece in entry.pieces(1 << 17))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == count
    assert 1 << 19 <= peak < 4 << 20
