"""Zip archives, looked over before anybody's reader reads them; zipfile wrote them."""

import warnings
import zipfile

import pytest

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import LocalFolder
from layerscope.store.layouts.archives import archive, is_zip


def listed(tmp_path):
    with archive(LocalFolder(tmp_path), "a.zip") as (_, members):
        return [(member.filename, member.file_size) for member in members]


def write(tmp_path, *names, **options):
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.zip", "w", **options) as zipped:
        warnings.simplefilter("ignore")
        for name in names:
            zipped.writestr(name, bytes(500))


def test_members_are_listed_and_folders_are_none(tmp_path):
    write(tmp_path, "k", "/etc/../packed")
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as zipped:
        zipped.writestr("folder/", b"")
    assert listed(tmp_path) == [("k", 500), ("/etc/../packed", 500)]
    assert is_zip(LocalFolder(tmp_path), "a.zip")


def test_a_file_that_does_not_begin_as_an_archive_is_none(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"text")
    assert not is_zip(LocalFolder(tmp_path), "a.zip")
    with pytest.raises(Damaged, match="not a zip file"):
        listed(tmp_path)


@pytest.mark.parametrize("names", [("k", "k"), ("data/0", "DATA/0")])
def test_a_name_that_is_there_twice_is_refused(tmp_path, names):
    write(tmp_path, *names)
    with pytest.raises(Damaged, match=rf"a\.zip: '{names[1]}' is in it twice"):
        listed(tmp_path)


def test_a_member_that_states_more_than_its_bytes_can_hold_is_refused(tmp_path):
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        write(tmp_path, "k", compression=method)
        raw = (tmp_path / "a.zip").read_bytes()
        at = raw.index(b"PK\x01\x02") + 24  # the size before compression, in the directory
        (tmp_path / "a.zip").write_bytes(raw[:at] + (1 << 31).to_bytes(4, "little") + raw[at + 4 :])
        with pytest.raises(Damaged, match=r"'k' states 2147483648 bytes, more than \d+ bytes in a file of \d+ can"):
            listed(tmp_path)


def test_methods_and_locks_that_nobody_needs_are_refused(tmp_path):
    write(tmp_path, "k", compression=zipfile.ZIP_BZIP2)
    with pytest.raises(Unsupported, match="compressed by method 12"):
        listed(tmp_path)
    write(tmp_path, "k")
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(raw)
    with pytest.raises(Unsupported, match="encrypted"):
        listed(tmp_path)
