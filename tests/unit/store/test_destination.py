"""destination.py: the place a rank writes to on this machine. What a writer makes of it is in test_writer.py."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from layerscope.errors import Damaged, NotARun, RunBusy, RunExists
from layerscope.store import Manifest, open_run
from layerscope.store.address import LocalFolder
from layerscope.store.appender import Coming, Limits
from layerscope.store.columns import TableRow
from layerscope.store.destination import Destination


def ignore(*_: object) -> None:
    """Hear of nothing."""


@pytest.fixture
def address(tmp_path):
    return tmp_path / "deep" / "run"


def begun(address, *, append=False, rank=0):
    to = Destination(LocalFolder(address), rank=rank)
    return to, to.begin(append=append, limits=Limits(), failed=ignore)


def coming(step=0):
    return [Coming(TableRow(0, "a:output", None, step, 0, 0, 0))]


def test_what_was_begun_and_undone_leaves_nothing(address, tmp_path):
    to, appender = begun(address)
    to.undo(appender)
    assert list(tmp_path.iterdir()) == []
    to, appender = begun(address)
    assert to.next_step == 0
    to.undo(appender)


def test_one_recording_after_another(address):
    to, appender = begun(address)
    appender.append(coming(4))
    appender.close()
    to.put(Manifest(mode="first", started="then"))
    to.finish()
    with pytest.raises(RunExists):
        begun(address)
    again, appender = begun(address, append=True)
    assert (again.next_step, again.before.mode, again.before.completeness.records) == (5, "first", 1)
    assert appender.record == 1
    appender.close()
    again.put(again.before.followed_by(Manifest(mode="second")))
    assert (open_run(address).manifest.mode, open_run(address).manifest.started) == ("second", "then")


def test_an_earlier_manifest_that_does_not_read_is_no_obstacle(tmp_path):
    to, appender = begun(tmp_path / "run")
    appender.append(coming())
    appender.close()
    to.finish()
    (tmp_path / "run" / "run.json").write_text("rubbish")
    again, appender = begun(tmp_path / "run", append=True)
    assert again.before.completeness.records == 1
    appender.close()
    assert to.before is None


def test_only_rank_0_replaces_the_runs_manifest(address):
    for rank in (2, 0, 1):
        to, appender = begun(address, rank=rank)
        appender.close()
        to.put(Manifest(mode=f"rank {rank}"))
        to.finish()
        assert open_run(address).manifest.mode == ("rank 2" if rank == 2 else "rank 0")


def test_who_comes_second_takes_nothing_from_who_came_first(tmp_path, monkeypatch):
    first, appender = begun(tmp_path / "run")
    folder = tmp_path / "run/rank-00000"
    with monkeypatch.context() as patch:  # the second looks just before the first has made anything
        patch.setattr(Path, "exists", lambda self: self != folder and self.parent != folder and _exists(self))
        with pytest.raises(RunBusy):
            begun(tmp_path / "run")
    appender.append(coming())
    appender.close()
    first.put(Manifest())
    assert len(open_run(tmp_path / "run")) == 1


_exists = Path.exists


def test_ranks_that_begin_at_once_leave_rank_0s_manifest_whatever_the_order(tmp_path):
    for turn in range(20):
        at, meet = tmp_path / f"run{turn}", threading.Barrier(4)

        def put(rank: int, at=at, meet=meet) -> None:
            to, appender = begun(at, rank=rank)
            meet.wait()
            to.put(Manifest(mode=f"rank {rank}"))
            appender.close()
            to.finish()

        threads = [threading.Thread(target=put, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert open_run(at).manifest.mode == "rank 0"
        assert [Manifest.loads((at / f"rank-0000{r}/run.json").read_bytes()).mode for r in (1, 2, 3)] == [
            f"rank {r}" for r in (1, 2, 3)
        ]


# Files that somebody else put there --------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", "segment-00000.journal", "segment-00000.partial"])
@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "fifo"])
def test_nothing_is_written_through_what_somebody_put_in_the_way(tmp_path, name, kind):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    folder = tmp_path / "run/rank-00000"
    folder.mkdir(parents=True)
    place = folder / name
    if kind == "link":
        place.symlink_to(precious)
    elif kind == "dangling":
        place.symlink_to(tmp_path / "new")
    elif kind == "hard link":
        os.link(precious, place)
    else:
        os.mkfifo(place)
    for append in (False, True):
        with contextlib.suppress(Damaged, RunExists, FileExistsError):
            to, appender = begun(tmp_path / "run", append=append)
            assert (kind, name) == ("hard link", "segment-00000.journal")  # which is read, and removed by its name
            appender.append(coming())
            appender.close()
            to.finish()
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def test_a_rank_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank-00000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="is a link"):
        begun(tmp_path / "run", append=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_manifest_that_is_a_link_is_replaced_and_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    to, appender = begun(tmp_path / "run")
    (tmp_path / "run/run.json.partial").symlink_to(precious)
    (tmp_path / "run/run.json").symlink_to(precious)
    to.put(Manifest(mode="m"))
    appender.close()
    assert precious.read_bytes() == b"precious"
    assert open_run(tmp_path / "run").manifest.mode == "m"


def test_a_file_and_a_folder_of_something_else_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotARun, match="is a file"):
        begun(tmp_path / "file")
    with pytest.raises(NotARun, match="is not empty and is not a run"):
        begun(tmp_path)
