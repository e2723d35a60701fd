"""Where a dump's files lie on this machine, fetched where they are elsewhere."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple

import pytest

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import folder
from layerscope.store.layouts import copies
from layerscope.store.layouts.copies import path_of


@pytest.fixture
def remote(tmp_path):
    files = folder(f"memory://copies/{tmp_path.name}")
    files.put("a", b"a" * 10)
    return files


def test_a_file_of_this_machine_is_itself_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    files = folder(tmp_path)
    assert path_of(files, "a") == tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        path_of(files, "b")
    for name in ("pipe", "."):
        with pytest.raises(Damaged, match="is no regular file"):
            path_of(files, name)


def test_a_file_elsewhere_is_fetched_once(remote):
    first = path_of(remote, "a")
    remote.put("a", b"changed in the meantime")
    assert path_of(remote, "a") == first
    assert first.read_bytes() == b"a" * 10
    with pytest.raises(FileNotFoundError):
        path_of(remote, "none")


def test_the_oldest_copies_give_way_and_are_fetched_again(remote):
    copies._fetched.cache_clear()
    first = path_of(remote, "a")
    for number in range(8):
        remote.put(str(number), b"")
        path_of(remote, str(number))
    gc.collect()
    assert not first.exists()
    assert path_of(remote, "a").read_bytes() == b"a" * 10
    copies._fetched.cache_clear()
    gc.collect()
    assert path_of(remote, "a") != first


def test_what_is_too_large_or_cut_is_refused_and_leaves_nothing(remote, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Unsupported, match="a has over 9 bytes, and is not fetched to be looked into"):
        path_of(remote, "a", most=9)
    free = namedtuple("usage", "total used free")(10, 5, 5)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(Unsupported, match=r"a is fetched whole: .* 5 free; set TMPDIR"):
            path_of(remote, "a")
    monkeypatch.setattr(type(remote), "read", lambda self, name, offset, length: bytearray(7))
    with pytest.raises(Damaged, match="a is truncated: it ends before its 10 bytes do"):
        path_of(remote, "a")
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_files_to_its_parent(remote):
    fetched = path_of(remote, "a")
    copies._remove(fetched, os.getpid() + 1)
    assert fetched.exists()
    copies._remove(fetched, os.getpid())
    assert not fetched.exists()
    copies._fetched.cache_clear()


def test_copies_go_when_the_process_ends(tmp_path):
    code = (
        "from layerscope.store.address import folder; from layerscope.store.layouts.copies import path_of;"
        "files = folder('memory://x'); files.put('a', b'1'); print(path_of(files, 'a').read_bytes())"
    )
    env = dict(os.environ, TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "b'1'\n"
    assert list(tmp_path.iterdir()) == []
