"""spool.py: runs that are put elsewhere piece by piece."""

from __future__ import annotations

import json
import tempfile

import fsspec
import numpy as np
import pytest

from layerscope.errors import NotARun, RunExists
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run
from layerscope.store.address import RemoteFolder


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """An address of its own in memory, and a temporary folder to see what is left there."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return f"memory://{tmp_path.name}/run"


def listing(address: str) -> list[str]:
    files = fsspec.filesystem("memory")
    root = address.removeprefix("memory:/")
    return sorted(p.removeprefix(root + "/") for p in files.find(root))


def steps(n: int, first: int = 0):
    return [("a", Moment(step=k), np.full(3, k, np.int32)) for k in range(first, first + n)]


def test_sealed_segments_are_put_and_then_their_lines(remote, write, tmp_path):
    writer = write(remote, steps(7), segment_tensors=3)
    done = writer.close(forwards=7)
    assert (done.records, done.state) == (7, "complete")
    assert listing(remote) == [
        *(f"rank-00000/journal-0000{n}" for n in range(4)),
        *(f"rank-00000/segment-0000{n}.safetensors" for n in range(3)),
        "run.json",
    ]
    run = open_run(remote)
    assert run.complete
    assert [run.tensor("a", step=k).tolist() for k in range(7)] == [[k] * 3 for k in range(7)]
    assert run.tensor("a", step=5, rows=slice(1, 2)).tolist() == [5]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_reader_sees_what_was_put_while_the_writer_goes_on(remote, write):
    writer = write(remote, steps(4), segment_tensors=3)
    writer.flush()
    run = open_run(remote)
    assert (run.state, [e.moment.step for e in run.records()]) == ("recording", [0, 1, 2])
    writer.close()
    run.refresh()
    assert (run.state, len(run)) == ("complete", 4)


def test_only_the_stretch_that_is_asked_for_is_fetched(remote, write, monkeypatch):
    write(remote, [("a", Moment(), np.arange(1000, dtype=np.int32).reshape(100, 10))]).close()
    run = open_run(remote)
    run.tensor("a", rows=slice(0, 1))
    fetched = []
    real = RemoteFolder.read
    monkeypatch.setattr(RemoteFolder, "read", lambda *a, **k: fetched.append(k.get("length")) or real(*a, **k))
    assert run.tensor("a", rows=slice(10, 12)).tolist() == np.arange(100, 120).reshape(2, 10).tolist()
    assert fetched == [80]


def test_records_without_tensors_are_put_as_well(remote, write):
    write(remote, [("s", Moment(step=k), None) for k in range(100)], segment_tensors=2).close()
    assert len(open_run(remote)) == 100
    assert len(listing(remote)) > 5  # in parts as they came, not all at the end


def test_append_goes_on_behind_what_is_there(remote, write):
    write(remote, steps(3), segment_tensors=2).close()
    with pytest.raises(RunExists):
        Writer(remote, Manifest())
    writer = Writer(remote, Manifest(), append=True)
    assert writer.next_step == 3
    writer.write(Point("a"), Moment(step=3), blob=Blob("int32", (3,), 12, lambda: np.full(3, 3, np.int32)))
    assert writer.close().records == 4
    run = open_run(remote)
    assert [run.tensor("a", step=k).tolist() for k in range(4)] == [[k] * 3 for k in range(4)]
    assert len({e for e in listing(remote) if "segment" in e}) == 3


def test_something_else_at_the_address_is_refused(remote):
    fsspec.filesystem("memory").pipe_file(remote.removeprefix("memory:/") + "/other.txt", b"x")
    with pytest.raises(NotARun, match=r"other\.txt"):
        Writer(remote, Manifest())
    with pytest.raises(NotARun, match=r"other\.txt"):
        open_run(remote)


def test_ranks_meet_at_the_address(remote, write):
    one = write(remote, [("a", Moment(rank=1), np.ones(1))], rank=1)
    zero = write(remote, [("a", Moment(rank=0), np.zeros(1))], rank=0, manifest=Manifest(mode="zero"))
    one.close()
    zero.close()
    run = open_run(remote)
    assert (run.state, run.manifest.mode, run.manifest.completeness.records) == ("complete", "zero", 2)
    assert [run.tensor("a", rank=r).item() for r in range(2)] == [0, 1]


def test_what_cannot_be_put_now_is_put_later(remote, write, monkeypatch):
    writer = write(remote, steps(3), segment_tensors=3)
    writer.flush()
    real = RemoteFolder.put_file
    monkeypatch.setattr(RemoteFolder, "put_file", lambda *a: (_ for _ in ()).throw(ConnectionError("no route")))
    for point, moment, array in steps(3, first=3):
        writer.write(Point(point), moment, blob=Blob("int32", (3,), 12, lambda array=array: array))
    writer.flush()
    assert len(open_run(remote)) == 3
    monkeypatch.setattr(RemoteFolder, "put_file", real)
    assert writer.close().state == "complete"
    assert [open_run(remote).tensor("a", step=k).tolist() for k in range(6)] == [[k] * 3 for k in range(6)]


def test_what_can_never_be_put_is_kept_and_the_log_says_where(remote, write, monkeypatch, caplog, tmp_path):
    writer = write(remote, steps(2))
    writer.flush()
    monkeypatch.setattr(RemoteFolder, "put_file", lambda *a: (_ for _ in ()).throw(ConnectionError("no route")))
    assert writer.close().state == "interrupted"
    [spool] = (tmp_path / "tmp").iterdir()
    assert "no route" in caplog.text
    assert str(spool) in caplog.text
    kept = open_run(spool)
    assert [kept.tensor("a", step=k).tolist() for k in range(2)] == [[0] * 3, [1] * 3]
    assert json.loads((spool / "run.json").read_text())["completeness"]["records"] == 2
