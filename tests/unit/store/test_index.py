"""index.py: the cache that answers which records there are."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time

import numpy as np
import pytest

from layerscope.points import Moment
from layerscope.store import open_run
from layerscope.store.address import LocalFolder
from layerscope.store.index import Index, Row, cached, journals
from layerscope.store.journal import Record
from layerscope.store.segment import Placed

PLACED = Placed(0, 65536, 4, 7)


def row(n: int, point: str = "a:output", *, folder: int = 0, **when) -> Row:
    moment = {"epoch": None, "step": 0, "batch": 0, "call": 0, "rank": 0} | when
    return Row(Record(n, point, *moment.values(), "float32", (1,), PLACED), folder, "rank-00000/journal", n * 10, 10)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder in which every index, however small, is kept."""
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("layerscope.store.index._WORTH_KEEPING", 0)
    return tmp_path / "cache"


@pytest.fixture
def run_folder(tmp_path, write):
    write(tmp_path / "run", [(f"p{n}", Moment(step=n), np.full(2, n, np.int32)) for n in range(4)]).close()
    return tmp_path / "run"


def test_rows_come_back_as_they_went_in():
    index = Index()
    rows = [
        row(0, epoch=3),
        row(1, "b:input[x]", step=2),
        Row(Record(2, "c:output", None, 0, 0, 0, 0, None, None, None), 0),
    ]
    index.add(rows)
    assert index.find() == rows
    assert index.find(["b:input[x]"]) == [rows[1]]
    assert index.find(None, {"epoch": 3}) == [rows[0]]
    assert index.find(["a:output", "c:output"], {"step": 0}) == [rows[0], rows[2]]
    assert index.find(["absent:output"]) == []
    assert index.find(None, {"step": 2**70}) == []


def test_zero_dimensional_shapes_stay_shapes():
    index = Index()
    index.add([Row(Record(0, "a:output", None, 0, 0, 0, 0, "float32", (), PLACED), 0)])
    assert index.find()[0].facts.shape == ()


def test_the_later_of_two_equal_moments_counts_also_without_an_epoch():
    index = Index()
    index.add([row(0), row(1), row(2, epoch=0), row(3, epoch=0)])
    assert [r.facts.record for r in index.find()] == [1, 3]
    assert len(index) == 2


def test_points_come_in_the_order_they_were_first_recorded_whatever_was_read_first():
    index = Index()
    index.add([row(0, "z:output", folder=1, rank=1), row(1, "y:output", folder=1, rank=1)])
    index.add([row(0, "y:output"), row(5, "z:output"), row(6, "a:output")])
    assert index.points == ["y:output", "z:output", "a:output"]


def test_moments_come_in_order():
    index = Index()
    index.add([row(0, step=10), row(1, step=9), row(2, step=9, call=1), row(3, "b:output", step=9), row(4, epoch=0)])
    assert [str(m) for m in index.moments] == [
        "step=9 batch=0",
        "step=9 batch=0 call=1",
        "step=10 batch=0",
        "epoch=0 step=0",
    ]


def test_a_place_has_its_leaves():
    index = Index()
    index.add([row(0, "a:output[0]"), row(1, "a:output[k]"), row(2, "a:input[0]"), row(3, "ab:output")])
    assert index.at_place("a", "output") == ["a:output[0]", "a:output[k]"]


def test_it_catches_up_with_a_growing_journal(cache, tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(step=n), np.zeros(1)) for n in range(3)])
    writer.flush()
    files = LocalFolder(tmp_path / "run")
    index = Index(cached(files))
    index.catch_up(files)
    assert len(index) == 3
    read = []
    real = files.read
    files.read = lambda name, **kw: read.append((name, kw.get("offset", 0))) or real(name, **kw)
    [consumed] = index.consumed.values()
    for n in range(3, 5):
        writer.write(open_run(tmp_path / "run").points[0], Moment(step=n))
    writer.close()
    index.catch_up(files)
    assert len(index) == 5
    assert min(offset for _, offset in read if offset) >= consumed - 4096  # from where it was, and not anew


def test_a_half_written_line_is_left_for_later(tmp_path, run_folder):
    journal = run_folder / "rank-00000/journal"
    whole = journal.read_bytes()
    cut = whole.rindex(b'{"record":3')
    journal.write_bytes(whole[: cut + 20])
    files, index = LocalFolder(run_folder), Index()
    index.catch_up(files)
    assert (len(index), index.damage) == (3, [])
    journal.write_bytes(whole)
    index.catch_up(files)
    assert (len(index), index.damage) == (4, [])


def test_the_index_lives_in_the_cache_and_nothing_is_written_into_the_run(cache, run_folder):
    before = sorted(p.name for p in run_folder.rglob("*"))
    assert open_run(run_folder).tensor("p2").tolist() == [2, 2]
    assert [p.suffix for p in cache.iterdir()] == [".sqlite"]
    assert sorted(p.name for p in run_folder.rglob("*")) == before


def test_a_small_run_gets_no_file(tmp_path, monkeypatch, run_folder):
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "cache"))
    assert len(open_run(run_folder)) == 4
    assert not (tmp_path / "cache").exists()


def test_another_run_at_the_same_place_is_not_answered_from_the_old_index(cache, run_folder, write):
    assert len(open_run(run_folder)) == 4
    shutil.rmtree(run_folder)
    write(run_folder, [(f"p{n}", Moment(step=n), np.full(2, 9 - n, np.int32)) for n in range(4)]).close()
    run = open_run(run_folder)
    assert [run.tensor(f"p{n}").tolist() for n in range(4)] == [[9 - n] * 2 for n in range(4)]


@pytest.mark.parametrize("harm", ["garbage", "empty", "truncated", "schema", "middle"])
def test_a_cache_that_is_no_index_is_made_anew(cache, run_folder, harm):
    open_run(run_folder).close()
    [file] = cache.iterdir()
    raw = file.read_bytes()
    if harm == "garbage":
        file.write_bytes(b"not sqlite" * 1000)
    elif harm == "empty":
        file.write_bytes(b"")
    elif harm == "truncated":
        file.write_bytes(raw[: len(raw) // 2])
    elif harm == "middle":
        file.write_bytes(raw[:4096] + bytes(len(raw) - 4096))
    else:
        with sqlite3.connect(file) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    run = open_run(run_folder)
    assert [run.tensor(f"p{n}").tolist() for n in range(4)] == [[n] * 2 for n in range(4)]
    run.close()
    assert len(open_run(run_folder)) == 4


def test_a_row_that_rotted_in_the_cache_is_noticed_and_never_believed(cache, run_folder):
    open_run(run_folder).close()
    [file] = cache.iterdir()
    with sqlite3.connect(file) as db:
        [(offset, checksum)] = db.execute("SELECT offset, crc32c FROM records WHERE record = 1").fetchall()
        db.execute("UPDATE records SET offset = ?, crc32c = ? WHERE record = 2", (offset, checksum))
    db.close()
    assert open_run(run_folder).tensor("p2").tolist() == [2, 2]


def test_a_locked_cache_is_no_obstacle(cache, run_folder, monkeypatch):
    open_run(run_folder).close()
    [file] = cache.iterdir()
    monkeypatch.setattr(sqlite3, "connect", _impatient(sqlite3.connect))
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert len(open_run(run_folder)) == 4
    finally:
        holder.close()


def _impatient(connect):
    return lambda *args, **kwargs: connect(*args, **(kwargs | {"timeout": 0.05}))


def test_without_a_writable_folder_the_index_is_in_memory(run_folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("layerscope.store.index._WORTH_KEEPING", 0)
    assert cached(LocalFolder(run_folder)) is None
    assert len(open_run(run_folder)) == 4


def test_the_cache_follows_xdg_then_home_then_the_temporary_folder(monkeypatch, tmp_path, run_folder):
    monkeypatch.setattr("layerscope.store.index._WORTH_KEEPING", 0)
    monkeypatch.delenv("LAYERSCOPE_CACHE")
    files = LocalFolder(run_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cached(files).parent == tmp_path / "xdg" / "layerscope"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cached(files).parent == tmp_path / "home" / ".cache" / "layerscope"
    (tmp_path / "blocked").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "blocked"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    there = cached(files).parent
    assert there == tmp_path / "tmp" / f"layerscope-{os.getuid()}"
    assert there.stat().st_mode & 0o777 == 0o700


def test_what_nobody_used_for_a_month_is_forgotten(cache, run_folder):
    cache.mkdir()
    old, new = cache / "old.sqlite", cache / "new.sqlite"
    for file in (old, new):
        file.touch()
    os.utime(old, (time.time() - 40 * 86400,) * 2)
    cached(LocalFolder(run_folder))
    assert (old.exists(), new.exists()) == (False, True)


def test_journals_of_every_rank_are_found_in_order(tmp_path):
    for name in ("rank-00001/journal", "rank-00000/journal-00001", "rank-00000/journal-00000", "other/journal"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert journals(LocalFolder(tmp_path)) == [
        "rank-00000/journal-00000",
        "rank-00000/journal-00001",
        "rank-00001/journal",
    ]
