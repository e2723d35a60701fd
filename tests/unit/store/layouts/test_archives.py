"""Zip archives: members by name and place, against zipfile."""

import zipfile

import pytest

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import LocalFolder, folder
from layerscope.store.layouts.archives import is_zip, members


def test_stored_members_lie_where_it_says_and_compressed_ones_unpack(tmp_path):
    data = bytes(range(256)) * 40
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("plain", data, zipfile.ZIP_STORED)
        archive.writestr("/etc/../packed", data, zipfile.ZIP_DEFLATED)
        archive.mkdir("folder") if hasattr(archive, "mkdir") else None
    plain, packed = members(LocalFolder(tmp_path), "a.zip")
    raw = (tmp_path / "a.zip").read_bytes()
    assert raw[plain.offset : plain.offset + plain.size] == data
    assert packed.offset is None
    for member in (plain, packed):
        assert member.start(7) == data[:7]
        assert bytes(member.unpacked(3)) == data[3:]
        assert b"".join(member.parts(1000)) == data


def test_an_archive_elsewhere_is_read_the_same_way(tmp_path):
    remote = folder("memory://archives")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("k", b"value")
    remote.put("a.zip", (tmp_path / "a.zip").read_bytes())
    (member,) = members(remote, "a.zip")
    assert (member.name, member.start(9)) == ("k", b"value")


def test_a_file_that_does_not_begin_as_an_archive_is_none(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    assert not is_zip(LocalFolder(tmp_path), "a")
    with pytest.raises(Damaged, match="not a zip archive"):
        members(LocalFolder(tmp_path), "a")


@pytest.mark.parametrize("left", [10, 100, -30, -1])
def test_a_cut_archive_is_damaged(tmp_path, left):
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as archive:
        archive.writestr("k", bytes(500))
    (tmp_path / "a.zip").write_bytes((tmp_path / "whole.zip").read_bytes()[:left])
    with pytest.raises(Damaged, match=r"a\.zip"):
        members(LocalFolder(tmp_path), "a.zip")


def test_methods_and_locks_that_nobody_needs_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("k", bytes(500))
    with pytest.raises(Unsupported, match="compressed by method 12"):
        members(LocalFolder(tmp_path), "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("k", bytes(5))
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(raw)
    with pytest.raises(Unsupported, match="encrypted"):
        members(LocalFolder(tmp_path), "a.zip")
