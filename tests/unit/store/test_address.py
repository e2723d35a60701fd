"""address.py: where a run lies, and what its files are called."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerscope.errors import MissingExtra, NotARun
from layerscope.store.address import (
    LocalFolder,
    RemoteFolder,
    _is_shared,
    claim_name,
    claim_of,
    folder,
    others_may_cut,
    rank_folder,
    rank_of,
    segment,
    segment_of,
)


def test_names_are_numbers_and_read_back():
    assert rank_folder(3) == "rank-00003"
    assert rank_of("rank-00003") == 3
    assert segment(12) == "segment-00012"
    assert segment_of("segment-00012.partial") == (12, 12, 0, ".partial", "segment-00012")
    merged = segment(3, last=66, claim=2)
    assert merged == "segment-00003-00066.claim-00002"
    assert segment_of(f"{merged}.safetensors") == (3, 66, 2, ".safetensors", merged)
    assert claim_of(claim_name(7)) == 7
    assert (claim_of("claim"), claim_of("claim-1")) == (None, None)
    assert segment_of("segment-123456.safetensors") == (123456, 123456, 0, ".safetensors", "segment-123456")
    assert segment_of("segment-00012.journal") == (12, 12, 0, ".journal", "segment-00012")


@pytest.mark.parametrize("name", ["rank-3", "rank-00003x", "../rank-00003", "rank-00003/..", "rank-", "RANK-00003"])
def test_other_names_are_not_a_rank(name):
    assert rank_of(name) is None


def test_other_names_are_no_segment():
    assert segment_of("segment-00012.safetensors.tmp") is None
    assert segment_of("segment-00012.journal.damaged") is None
    assert segment_of("/etc/passwd") is None


def test_a_path_a_text_and_a_file_address_are_the_same_folder(tmp_path):
    addresses = [tmp_path, str(tmp_path), f"file://{tmp_path}"]
    assert {folder(a).address for a in addresses} == {str(tmp_path)}
    assert all(isinstance(folder(a), LocalFolder) for a in addresses)


def test_a_tilde_is_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder("~/runs").address == str(tmp_path / "runs")


def test_a_relative_path_stays_the_same_folder_after_a_change_of_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    there = folder("runs")
    monkeypatch.chdir("/")
    assert there.address == str(tmp_path / "runs")


def test_local_files_are_listed_measured_and_read_in_stretches(tmp_path):
    (tmp_path / "b").write_bytes(b"0123456789")
    (tmp_path / "a").mkdir()
    files = LocalFolder(tmp_path)
    assert files.names() == ["a", "b"]
    assert files.names("absent") == []
    assert files.size("b") == 10
    assert files.read("b", offset=2, length=3) == b"234"
    assert files.read("b", offset=8, length=30) == b"89"
    assert files.read("b", offset=30, length=3) == b""
    assert files.read("b") == b"0123456789"
    with pytest.raises(FileNotFoundError):
        files.read("c")


def test_a_file_is_put_whole_and_follows_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        LocalFolder(tmp_path).put("run.json", b"new")
    finally:
        os.umask(old)
    assert (tmp_path / "run.json").read_bytes() == b"new"
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_second_name_is_given_only_where_it_is_free(tmp_path):
    files = LocalFolder(tmp_path)
    (tmp_path / "mine").write_bytes(b"mine")
    files.put_new("run.json", like="mine")
    (tmp_path / "other").write_bytes(b"other")
    files.put_new("run.json", like="other")
    assert (tmp_path / "run.json").read_bytes() == b"mine"
    files.put("mine", b"changed")
    assert (tmp_path / "run.json").read_bytes() == b"mine"


def test_a_second_name_is_a_copy_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    (tmp_path / "mine").write_bytes(b"mine")
    LocalFolder(tmp_path).put_new("run.json", like="mine")
    LocalFolder(tmp_path).put_new("run.json", like="mine")
    assert (tmp_path / "run.json").read_bytes() == b"mine"


def test_remote_files_have_the_same_verbs(tmp_path):
    files = folder("memory://address-test/run/")
    assert isinstance(files, RemoteFolder)
    assert files.address == "memory://address-test/run"
    assert files.names() == []
    files.put("rank-00000/a", b"0123456789")
    (tmp_path / "b").write_bytes(b"xyz")
    assert files.put_file_new("rank-00000/b", tmp_path / "b")
    assert not files.put_file_new("rank-00000/b", tmp_path / "b")
    assert not files.put_new("rank-00000/a", b"another")
    assert files.names() == ["rank-00000"]
    assert files.names("rank-00000") == ["a", "b"]
    assert files.size("rank-00000/a") == 10
    assert files.read("rank-00000/a", offset=2, length=3) == b"234"
    assert files.read("rank-00000/a", offset=20, length=3) == b""
    assert files.read("rank-00000/b") == b"xyz"
    files.remove(["rank-00000/a", "rank-00000/gone"])
    assert files.names("rank-00000") == ["b"]
    with pytest.raises(FileNotFoundError):
        files.read("rank-00000/a")
    with pytest.raises(FileNotFoundError):
        files.size("rank-00000/a")


def test_a_run_elsewhere_is_listed_once_until_something_is_put(monkeypatch):
    files, other = folder("memory://listed/run"), folder("memory://listed/run")
    for name in ("run.json", "rank-00000/claim-00000", "rank-00001/run.json"):
        files.put(name, b"1")
    assert (files.names(), files.names("rank-00001")) == (["rank-00000", "rank-00001", "run.json"], ["run.json"])
    other.put("rank-00001/later", b"22")
    assert files.names("rank-00001") == ["run.json"]
    with pytest.raises(FileNotFoundError):
        files.size("rank-00001/later")
    files.forget()
    assert files.names("rank-00001") == ["later", "run.json"]
    assert files.size("rank-00001/later") == 2


def test_an_unknown_protocol_is_one_sentence():
    with pytest.raises(NotARun, match="fsspec cannot reach 'nowhere://x'"):
        folder("nowhere://x")


@pytest.mark.parametrize(
    "address", ["reference://x", "jupyter://x", "blockcache::reference://x", "http://[::1", "simplecache::http://[::1"]
)
def test_an_address_that_makes_no_sense_is_one_sentence(address):
    with pytest.raises((NotARun, OSError), match="reach") as raised:
        folder(address).names()
    assert "\n" not in str(raised.value)


def test_a_missing_fsspec_names_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match="pip install fsspec"):
        folder("s3://bucket/x")


def test_local_runs_need_neither_fsspec_nor_torch(tmp_path):
    script = """
import sys
import numpy as np
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run
writer = Writer(sys.argv[1], Manifest())
writer.write(Point("a"), Moment(), blob=Blob("float32", (2,), 8, lambda: np.ones(2, np.float32)))
writer.close()
assert [str(e.point) for e in open_run(sys.argv[1]).records()] == ["a:output"]
print(sorted({"torch", "fsspec"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_what_was_found_is_said_in_a_few_words(tmp_path):
    assert LocalFolder(tmp_path / "absent").found() == "there is nothing there"
    assert LocalFolder(tmp_path).found() == "that is an empty folder"
    for n in range(7):
        (tmp_path / f"f{n}").touch()
    assert LocalFolder(tmp_path).found() == "found 'f0', 'f1', 'f2', 'f3', 'f4' and 2 more"
    assert LocalFolder(tmp_path / "f0").found() == "that is a file"


def test_a_file_that_another_user_or_another_machine_may_cut_is_told(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    file.chmod(0o644)
    assert not others_may_cut(file.stat())
    file.chmod(0o646)
    assert others_may_cut(file.stat())
    file.chmod(0o644)
    mine = file.stat()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: mine.st_uid + 1)
        assert others_may_cut(os.stat_result((*mine[:4], mine.st_uid + 2, *mine[5:])))
        assert others_may_cut(mine) == (mine.st_uid != 0)
    mounts = f"40 20 {os.major(mine.st_dev)}:{os.minor(mine.st_dev)} / /data rw - nfs4 host:/data rw\n"
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: io.StringIO(mounts))
    _is_shared.cache_clear()
    assert others_may_cut(mine)
    _is_shared.cache_clear()
