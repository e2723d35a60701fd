"""rank_lock.py: one writer for each rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from layerscope.errors import RunBusy
from layerscope.store.rank_lock import RankLock, being_written


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    with RankLock(tmp_path), pytest.raises(RunBusy, match="another process is writing"):
        RankLock(tmp_path)
    RankLock(tmp_path).release()
    assert (tmp_path / "lock").exists()


def test_a_writer_is_seen_while_it_holds_the_lock(tmp_path):
    rank = tmp_path / "rank-00000"
    rank.mkdir()
    assert not being_written(tmp_path)
    with RankLock(rank):
        assert being_written(tmp_path)
    assert not being_written(tmp_path)
    assert not being_written(tmp_path / "nowhere")


def test_who_asks_for_the_writer_is_not_taken_for_one(tmp_path, monkeypatch):
    import fcntl

    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        waited: list[float] = []
        monkeypatch.setattr("time.sleep", lambda seconds: waited.append(seconds) or fcntl.flock(asking, fcntl.LOCK_UN))
        RankLock(tmp_path).release()
    assert len(waited) == 1


def test_it_holds_between_processes_and_ends_with_them(tmp_path):
    script = (
        "import sys; from pathlib import Path; from layerscope.store.rank_lock import RankLock;"
        "held = RankLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=pipe, stdout=pipe, text=True)
    try:
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(RunBusy):
            RankLock(tmp_path)
    finally:
        child.kill()
        child.communicate()
    RankLock(tmp_path).release()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    import fcntl

    def refuse(fd, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RankLock(tmp_path).release()
    assert (tmp_path / "lock").exists()
