"""Zip archives: members by name and place, against zipfile."""

import random
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
        with member.opened() as read:
            assert (bytes(read(3, 5000)), bytes(read(6000, 100))) == (data[3:5003], data[6000:6100])
            assert bytes(read(7, len(data) - 7)) == data[7:]
        assert b"".join(member.parts(1000)) == data


def packed(tmp_path, *, change):
    """Return a compressed member of noise, after `change` was made to its compressed bytes."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", bytes(10_000) + random.Random(0).randbytes(10_000))
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    change(raw)
    (tmp_path / "a.zip").write_bytes(raw)
    (member,) = members(LocalFolder(tmp_path), "a.zip")
    return member


def flip(raw):
    raw[5000] ^= 1


def blank(raw):
    raw[2000:8000] = bytes(6000)


def another_checksum(raw):
    raw[raw.index(b"PK\x01\x02") + 16] ^= 1
    raw[14] ^= 1


@pytest.mark.parametrize("change", [flip, blank, another_checksum])
def test_changed_bytes_are_damaged_at_the_end_at_the_latest(tmp_path, change):
    def gone_through():
        with member.opened() as read:
            for start in range(0, member.size, 1000):
                read(start, 1000)

    member = packed(tmp_path, change=lambda raw: None)
    gone_through()
    member = packed(tmp_path, change=change)
    with pytest.raises(Damaged, match=r"a\.zip \(inside\) is truncated, or not what was written \(.+\)"):
        gone_through()


def test_what_is_read_in_part_is_compared_with_its_checksum_all_the_same(tmp_path):
    member = packed(tmp_path, change=another_checksum)
    with pytest.raises(Damaged, match="CRC"), member.opened() as read:
        assert read(5, 10) == bytes(10)


def test_to_ask_for_more_than_there_is_is_damaged(tmp_path):
    member = packed(tmp_path, change=lambda raw: None)
    with pytest.raises(Damaged, match=r"a\.zip \(inside\) ends before its values do"), member.opened() as read:
        read(19_000, 1001)


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
