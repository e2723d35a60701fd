"""home.py: the place a rank writes to. What a writer makes of it is in test_writer.py and test_spool.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from layerscope.errors import RunBusy, RunExists
from layerscope.points import Moment
from layerscope.store import Manifest, open_run
from layerscope.store.appender import Limits
from layerscope.store.home import LocalHome, RemoteHome, at


def ignore(*_: object) -> None:
    """Hear of nothing."""


@pytest.fixture(params=["local", "remote"])
def address(request, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return str(tmp_path / "deep" / "run") if request.param == "local" else f"memory://{tmp_path.name}/home"


def begun(address, *, append=False, rank=0):
    home = at(address, rank=rank)
    return home, home.begin(append=append, limits=Limits(), failed=ignore)


def test_the_address_decides_the_kind(address):
    assert isinstance(at(address, rank=0), RemoteHome if "://" in address else LocalHome)


def test_what_was_begun_and_undone_leaves_nothing(address, tmp_path):
    home, appender = begun(address)
    home.undo(appender)
    assert [p for p in tmp_path.rglob("*") if p.name != "tmp"] == []
    home, appender = begun(address)
    assert home.next_step == 0
    home.undo(appender)


def test_one_recording_after_another(address):
    home, appender = begun(address)
    appender.append("a:output", Moment(step=4))
    appender.close()
    home.put(Manifest(mode="first", started="then"))
    home.finish()
    with pytest.raises(RunExists):
        begun(address)
    again, appender = begun(address, append=True)
    assert (again.next_step, again.before.mode, again.before.completeness.records) == (5, "first", 1)
    assert appender.record == 1
    appender.close()
    again.put(again.before.followed_by(Manifest(mode="second")))
    assert (open_run(address).manifest.mode, open_run(address).manifest.started) == ("second", "then")


def test_an_earlier_manifest_that_does_not_read_is_no_obstacle(tmp_path):
    home, appender = begun(tmp_path / "run")
    appender.append("a:output", Moment())
    appender.close()
    (tmp_path / "run" / "run.json").write_text("rubbish")
    again, appender = begun(tmp_path / "run", append=True)
    assert again.before.completeness.records == 1
    appender.close()
    assert home.before is None


def test_only_rank_0_replaces_the_runs_manifest(address):
    for rank in (2, 0, 1):
        home, appender = begun(address, rank=rank)
        appender.close()
        home.put(Manifest(mode=f"rank {rank}"))
        home.finish()
        assert open_run(address).manifest.mode == ("rank 2" if rank == 2 else "rank 0")


def test_who_comes_second_takes_nothing_from_who_came_first(tmp_path, monkeypatch):
    first, appender = begun(tmp_path / "run")
    journal = tmp_path / "run/rank-00000/journal"
    with monkeypatch.context() as patch:  # the second looks just before the first has made anything
        patch.setattr(Path, "exists", lambda self: self != journal and self.parent != journal.parent and _exists(self))
        with pytest.raises(RunBusy):
            begun(tmp_path / "run")
    appender.append("a:output", Moment())
    appender.close()
    first.put(Manifest())
    assert len(open_run(tmp_path / "run")) == 1


_exists = Path.exists
