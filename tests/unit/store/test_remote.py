"""remote.py: a run elsewhere is one on this machine with an uploader."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from layerscope.errors import NotARun, RunExists, Unsupported
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Manifest, Run, Writer, open_run, recover
from layerscope.store.address import RemoteFolder


@pytest.fixture(autouse=True)
def spools(tmp_path, monkeypatch) -> Path:
    """Return where spools are made, to see what is left there."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def address(tmp_path) -> str:
    return f"memory://{tmp_path.name}/run"


@pytest.fixture(params=["memory", "s3"])
def anywhere(request, tmp_path) -> str:
    """Return an address in memory, and one on a real server."""
    return f"memory://{tmp_path.name}/run" if request.param == "memory" else request.getfixturevalue("s3").address


def listing(address: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return sorted(path.removeprefix(f"{root}/") for path in files.find(root))


def steps(*which: int, value: int | None = None, point: str = "a"):
    return [(point, Moment(step=k), np.full(3, k if value is None else value, np.int32)) for k in which]


def add(writer: Writer, blob: Any, records: Any) -> None:
    for text, moment, array in records:
        writer.write(Point.parse(text), moment, blob=blob(array))


def values(run: Run, point: str = "a") -> dict[int, int]:
    return {entry.moment.step: int(entry.tensor()[0]) for entry in run.records(point)}


def content(run: Run) -> dict[tuple[str, str], Any]:
    """Return all that a run holds."""
    return {
        (str(each.point), str(each.moment)): (
            each.dtype,
            each.shape,
            None if each.dtype is None else each.tensor().numpy().tobytes(),
            each.summary,
            each.note,
        )
        for each in run.records()
    }


# What is put ------------------------------------------------------------------------------------


def test_a_sealed_segment_is_one_object(anywhere, write, spools):
    writer = write(anywhere, steps(*range(7)), segment_tensors=3)
    done = writer.close(forwards=7)
    assert (done.records, done.state) == (7, "complete")
    assert listing(anywhere) == ["rank-00000/claim-00000", "rank-00000/segment-00000-00002.safetensors", "run.json"]
    run = open_run(anywhere)
    assert run.complete
    assert run.notes == []
    assert values(run) == {k: k for k in range(7)}
    assert run.tensor("a", step=5, rows=slice(1, 2)).tolist() == [5]
    assert list(spools.iterdir()) == []


def test_a_flush_puts_what_there_is(anywhere, write, blob, spools):
    writer = write(anywhere, steps(0, 1))
    writer.flush()
    run = open_run(anywhere)
    assert (run.state, values(run)) == ("recording", {0: 0, 1: 1})
    add(writer, blob, steps(2))
    writer.flush()
    run.refresh()
    assert values(run) == {0: 0, 1: 1, 2: 2}
    assert [name for name in listing(anywhere) if "segment" in name] == [
        "rank-00000/segment-00000.safetensors",
        "rank-00000/segment-00001.safetensors",
    ]
    writer.close()
    run.refresh()
    assert (run.state, len(run)) == ("complete", 3)


def test_a_flush_with_nothing_new_does_nothing(s3, write):
    writer = write(s3.address, steps(0))
    writer.flush()
    with s3.counted() as asked:
        writer.flush()
        writer.flush()
    assert asked == []
    writer.close()


@pytest.mark.parametrize("flushes", [150, pytest.param(1000, marks=pytest.mark.stress)])
def test_many_flushes_leave_few_objects(anywhere, write, blob, flushes):
    writer = write(anywhere, [])
    for k in range(flushes):
        add(writer, blob, steps(k))
        writer.flush()
    assert (
        len(listing(anywhere)) == 2 + flushes // 64 + flushes % 64 < 100
    )  # run.json, the claim, merged and small ones
    assert values(open_run(anywhere)) == {k: k for k in range(flushes)}
    writer.close()
    assert len(listing(anywhere)) == 2 + -(-flushes // 64)
    run = open_run(anywhere)
    assert run.complete
    assert values(run) == {k: k for k in range(flushes)}


def test_a_large_segment_is_put_at_once_and_not_merged(address, write, spools):
    large = [("a", Moment(step=k), np.full(2 << 20, k, np.int32)) for k in range(2)]
    writer = write(address, large, segment_tensors=1)
    writer.flush()
    assert [path.name for path in spools.rglob("segment-*.safetensors")] == []
    writer.close()
    assert len([name for name in listing(address) if "segment" in name]) == 2
    assert values(open_run(address)) == {0: 0, 1: 1}


def test_records_of_statistics_alone_are_put_as_well(address, torch):
    writer = Writer(address, Manifest())
    for k in range(5):
        x = torch.randn(20, generator=torch.Generator().manual_seed(k))
        writer.write(Point("s"), Moment(step=k), summary=summarize(x), note={"k": k})
        writer.flush()
    writer.close()
    run = open_run(address)
    assert [entry.note for entry in run.records("s")] == [{"k": k} for k in range(5)]
    for k, row in enumerate(run.summaries().to_dicts()):
        x = torch.randn(20, generator=torch.Generator().manual_seed(k)).numpy().astype(np.float64)
        assert row["mean"] == pytest.approx(x.mean(), rel=1e-6)


def test_a_kill_between_putting_the_merged_one_and_deleting_the_others_is_harmless(address, write, blob, monkeypatch):
    def killed(self, names):
        raise OSError("killed")

    monkeypatch.setattr(RemoteFolder, "remove", killed)
    writer = write(address, steps(0))
    writer.flush()
    add(writer, blob, steps(1))
    writer.close()
    assert [name for name in listing(address) if "segment" in name] == [
        "rank-00000/segment-00000-00001.safetensors",
        "rank-00000/segment-00000.safetensors",
        "rank-00000/segment-00001.safetensors",
    ]
    run = open_run(address)
    assert (run.complete, len(run), run.replaced, values(run)) == (True, 2, 0, {0: 0, 1: 1})


def test_a_reader_meets_a_merge(address, write, blob):
    writer = write(address, steps(0))
    writer.flush()
    add(writer, blob, steps(1))
    writer.flush()
    run = open_run(address)
    writer.close()
    with pytest.raises(FileNotFoundError, match="merged since, or removed: refresh"):
        run.tensor("a", step=1)
    run.refresh()
    assert values(run) == {0: 0, 1: 1}


def test_a_writer_that_merges_between_listing_and_opening_is_no_damage(address, write, blob, monkeypatch):
    writer = write(address, steps(0))
    writer.flush()
    add(writer, blob, steps(1))
    writer.flush()
    read, closing = RemoteFolder.read, [writer]

    def read_late(self, name, **kwargs):
        if "segment" in name and closing:
            closing.pop().close()
        return read(self, name, **kwargs)

    monkeypatch.setattr(RemoteFolder, "read", read_late)
    run = open_run(address)
    assert not closing
    assert (values(run), run.damaged) == ({0: 0, 1: 1}, [])


# Claims -----------------------------------------------------------------------------------------


def test_a_run_that_is_there_is_not_recorded_over(anywhere, write, spools):
    write(anywhere, []).close()
    with pytest.raises(RunExists, match="already holds a run"):
        Writer(anywhere, Manifest())
    assert list(spools.iterdir()) == []


def test_of_two_that_begin_at_once_one_records(anywhere, monkeypatch, spools):
    names = RemoteFolder.names
    first: list[Writer] = []

    def names_before(self, under=""):
        """List what there was before another writer claimed it."""
        found = names(self, under)
        if under and not first:
            first.append(None)
            first[0] = Writer(anywhere, Manifest())
        return found

    monkeypatch.setattr(RemoteFolder, "names", names_before)
    with pytest.raises(RunExists):
        Writer(anywhere, Manifest())
    first[0].close()
    assert [name for name in listing(anywhere) if "claim" in name] == ["rank-00000/claim-00000"]
    assert list(spools.iterdir()) == []


def test_append_goes_on_behind_what_is_there(anywhere, write):
    write(anywhere, steps(0, 1, 2), segment_tensors=2).close(forwards=3)
    writer = Writer(anywhere, Manifest(), append=True)
    assert writer.next_step == 3
    writer.write(Point("b"), Moment(step=3))
    done = writer.close(forwards=1)
    assert (done.records, done.forwards) == (4, 4)
    run = open_run(anywhere)
    assert (run.complete, len(run), values(run)) == (True, 4, {0: 0, 1: 1, 2: 2})
    assert "rank-00000/segment-00002.claim-00001.safetensors" in listing(anywhere)


def test_a_writer_that_sees_a_higher_claim_stops(anywhere, write, blob, caplog, spools):
    first = write(anywhere, steps(0))
    first.flush()
    second = Writer(anywhere, Manifest(mode="second"), append=True)
    add(first, blob, steps(1, value=-1))
    first.flush()
    assert "claim-00001 over claim-00000" in caplog.text
    add(second, blob, steps(1, value=10))
    second.close()
    assert first.close().state == "interrupted"
    run = open_run(anywhere)
    assert (run.manifest.mode, run.complete, values(run)) == ("second", True, {0: 0, 1: 10})
    (spool,) = spools.iterdir()
    assert str(spool) in caplog.text


def test_records_of_a_recovered_spool_give_way_to_a_higher_claim(anywhere, write, blob, spools):
    first = write(anywhere, steps(0))
    first.flush()
    second = Writer(anywhere, Manifest(mode="second"), append=True)
    add(first, blob, [*steps(1, value=-1), *steps(2, value=-2)])
    first.close()
    add(second, blob, steps(1, value=10))
    second.close()
    (spool,) = spools.iterdir()
    recover(spool, to=anywhere)
    run = open_run(anywhere)
    assert (run.manifest.mode, run.complete, values(run)) == ("second", True, {0: 0, 1: 10, 2: -2})
    assert run.replaced == 1
    assert list(spools.iterdir()) == []


def test_ranks_meet_at_the_address(anywhere, write):
    one = write(anywhere, [("a", Moment(rank=1), np.ones(1))], rank=1)
    zero = write(anywhere, [("a", Moment(rank=0), np.zeros(1))], rank=0, manifest=Manifest(mode="zero"))
    one.close()
    zero.close()
    run = open_run(anywhere)
    assert (run.manifest.mode, run.complete, len(run)) == ("zero", True, 2)
    assert [run.tensor("a", rank=rank).tolist() for rank in (0, 1)] == [[0.0], [1.0]]


def test_something_else_at_the_address_is_refused(address, spools):
    fsspec.filesystem("memory").pipe_file(address.removeprefix("memory:/") + "/other.txt", b"x")
    with pytest.raises(NotARun, match=r"other\.txt"):
        Writer(address, Manifest())
    with pytest.raises(NotARun, match="is not a run"):
        open_run(address)
    assert list(spools.iterdir()) == []


# Outages ----------------------------------------------------------------------------------------


def local(tmp_path: Path, write: Any, records: Any) -> Run:
    write(tmp_path / "local", records).close(forwards=4)
    return open_run(tmp_path / "local")


@pytest.mark.parametrize("outage", ["down", "expired"])
def test_an_outage_that_ends_costs_nothing(s3, outage, write, blob, tmp_path, caplog, spools):
    writer = write(s3.address, steps(0))
    writer.flush()
    with getattr(s3, outage)():
        for k in (1, 2):
            add(writer, blob, steps(k))
            writer.flush()
        (said,) = (r.message for r in caplog.records)  # once, not at each flush
        assert "segment-00001 and what follows is not there" in said
        assert str(next(spools.iterdir())) in said
    assert values(open_run(s3.address)) == {0: 0}
    add(writer, blob, steps(3))
    writer.flush()
    assert values(open_run(s3.address)) == {k: k for k in range(4)}
    assert writer.close(forwards=4).state == "complete"
    run = open_run(s3.address)
    assert run.complete
    assert content(run) == content(local(tmp_path, write, steps(*range(4))))
    assert list(spools.iterdir()) == []


@pytest.mark.parametrize("outage", ["down", "expired"])
def test_an_outage_that_lasts_is_recovered_from_the_spool(s3, outage, write, blob, tmp_path, caplog, spools):
    writer = write(s3.address, steps(0))
    writer.flush()
    with getattr(s3, outage)():
        add(writer, blob, steps(1, 2))
        writer.flush()
        add(writer, blob, steps(3))
        assert writer.close(forwards=4).state == "interrupted"
        (spool,) = spools.iterdir()
        assert f"`layerscope recover {spool} --to {s3.address}` puts it" in caplog.records[-1].message
        with pytest.raises(OSError, match=r"cannot be reached|expired"):
            recover(spool, to=s3.address)
        assert spool.exists()
    assert values(open_run(s3.address)) == {0: 0}
    assert recover(spool, to=s3.address).lost == []
    run = open_run(s3.address)
    assert (run.complete, run.state, len(run)) == (True, "complete", 4)
    assert content(run) == content(local(tmp_path, write, steps(*range(4))))
    assert run.manifest.completeness.forwards == 4
    assert list(spools.iterdir()) == []


def test_a_place_that_cannot_be_reached_is_said_at_once(s3, spools):
    with s3.down(), pytest.raises(OSError, match="cannot be reached"):
        Writer(s3.address, Manifest())
    with s3.down(), pytest.raises(OSError, match="cannot be reached"):
        open_run(s3.address)
    assert list(spools.iterdir()) == []


def test_a_manifest_that_cannot_be_put_takes_the_claim_back(address, monkeypatch, spools):
    def refused(self, name, data):
        raise OSError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", refused)
        with pytest.raises(OSError, match="read-only"):
            Writer(address, Manifest())
    assert listing(address) == []
    assert list(spools.iterdir()) == []
    Writer(address, Manifest()).close()


def test_an_answer_that_was_lost_is_not_taken_for_another_writer(anywhere, write, blob, monkeypatch, spools):
    put = RemoteFolder.put_file_new
    lost = []

    def put_and_lose(self, name, source):
        answer = put(self, name, source)
        if len(lost) < 2:
            lost.append(name)
            raise OSError("connection reset")
        return answer

    monkeypatch.setattr(RemoteFolder, "put_file_new", put_and_lose)
    writer = write(anywhere, steps(0))
    writer.flush()
    add(writer, blob, steps(1))
    writer.flush()
    assert writer.close().state == "complete"
    run = open_run(anywhere)
    assert len(lost) == 2
    assert (run.complete, values(run)) == (True, {0: 0, 1: 1})
    assert list(spools.iterdir()) == []


def test_what_somebody_else_put_under_the_name_is_not_taken_for_ours(address, write, caplog, spools):
    fsspec.filesystem("memory").pipe_file(
        address.removeprefix("memory:/") + "/rank-00001/segment-00000.safetensors", b"x" * 100
    )
    writer = write(address, [])
    fsspec.filesystem("memory").pipe_file(
        address.removeprefix("memory:/") + "/rank-00000/segment-00000.safetensors", b"x" * 100
    )
    writer.write(Point("a"), Moment())
    assert writer.close().state == "interrupted"
    assert "is there already, and is not what" in caplog.text
    assert len(list(spools.iterdir())) == 1


def test_a_full_disk_under_the_spool_is_said_at_the_flush(address, write, monkeypatch, caplog):
    from layerscope.store import segment

    writer = write(address, steps(0))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segment, "write_columns", full)
        writer.flush()
    assert "segment-00000 and what follows is not there (it could not be sealed)" in caplog.text
    writer.write(Point("b"), Moment())
    writer.flush()
    assert len(open_run(address)) == 2
    assert writer.close().state == "complete"


def test_a_forked_child_leaves_everything_alone(address, write, spools):
    writer = write(address, steps(0))
    writer.flush()
    pid = os.fork()
    if pid == 0:
        assert not writer.write(Point("a"), Moment(step=1))
        writer.flush()
        writer.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(spools.iterdir())) == 1
    assert writer.close().state == "complete"
    assert values(open_run(address)) == {0: 0}


# Recovering -------------------------------------------------------------------------------------


def test_a_damaged_spool_is_put_and_kept(address, write, blob, wrong, monkeypatch, spools):
    writer = write(address, [])
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put_file_new", lambda self, name, source: 1 / 0)
        add(writer, blob, steps(0, 1))
        writer.close()
    (spool,) = spools.iterdir()
    (path,) = spool.rglob("segment-*.safetensors")
    wrong(path, (64 << 10) + 2)  # of the first tensor
    assert [damage.acknowledged for damage in recover(spool, to=address).lost] == [True]
    assert spool.exists()
    run = open_run(address)
    assert run.tensor("a", step=1).tolist() == [1, 1, 1]
    with pytest.raises(OSError, match="not what was written"):
        run.tensor("a", step=0)


def test_recovering_again_after_a_kill_puts_nothing_twice(address, write, blob, monkeypatch, spools):
    writer = write(address, [])
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put_file_new", lambda self, name, source: 1 / 0)
        for k in range(3):
            add(writer, blob, steps(k))
            writer.flush()
        writer.close()
    (spool,) = spools.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("layerscope.store.uploader.shutil.rmtree", lambda path: None)
        recover(spool, to=address)
    before = listing(address)
    recover(spool, to=address)
    assert listing(address) == before
    assert values(open_run(address)) == {0: 0, 1: 1, 2: 2}
    assert not spool.exists()


def test_what_is_no_spool_or_no_place_for_one_is_refused(address, write, tmp_path, spools):
    write(tmp_path / "run", steps(0)).close()
    with pytest.raises(NotARun, match="is a run of its own and no spool"):
        recover(tmp_path / "run", to=address)
    with pytest.raises(Unsupported, match="is a folder of this machine"):
        recover(tmp_path / "run", to=tmp_path / "other")
    write(address, steps(0)).close()
    with pytest.raises(Unsupported, match=f"`layerscope recover SPOOL --to {address}` puts it"):
        recover(address)
    assert values(open_run(tmp_path / "run")) == {0: 0}


def test_a_copy_on_this_machine_is_a_run(address, write, tmp_path):
    write(address, steps(*range(3)), segment_tensors=1).close()
    write(address, steps(1, value=10), append=True).close()
    files, root = fsspec.core.url_to_fs(address)
    files.get(root, str(tmp_path / "copy"), recursive=True)
    run = open_run(tmp_path / "copy")
    assert (run.complete, values(run)) == (True, {0: 0, 1: 10, 2: 2})
    assert recover(tmp_path / "copy").lost == []
    with pytest.raises(Unsupported, match="append to it there"):
        Writer(tmp_path / "copy", Manifest(), append=True)


# Reading ----------------------------------------------------------------------------------------


def test_many_ranks_open_in_few_requests(s3, write):
    for rank in range(48):
        records = [(f"p{k}", Moment(step=k, rank=rank), np.full(2, k)) for k in range(50)]
        write("memory://many/run", records, rank=rank).close()
    memory = fsspec.filesystem("memory")
    bucket, _ = fsspec.core.url_to_fs(s3.address)
    root = s3.address.removeprefix("s3:/")
    bucket.pipe({path.replace("/many/run", root): memory.cat_file(path) for path in memory.find("/many/run")})
    with s3.counted() as asked:
        run = open_run(s3.address)
        assert len(run) == 48 * 50
    assert len(asked) < 160
    assert len([request for request in asked if "list-type" in request]) == 2  # the folder, then all that is in it
    assert len([request for request in asked if "segment" in request]) == 48
    assert run.complete
    assert run.tensor("p7", rank=40).tolist() == [7, 7]


def test_only_the_stretch_that_is_asked_for_is_fetched(s3, write):
    write(s3.address, [("a", Moment(), np.arange(1 << 20, dtype=np.int32).reshape(1024, 1024))]).close()
    run = open_run(s3.address)
    sent = []
    s3.hears = lambda when, request: sent.append(request)
    try:
        (entry,) = run.records("a")
        assert sum(piece.double().sum().item() for piece in entry.pieces(1 << 18)) == sum(range(1 << 20))
    finally:
        s3.hears = lambda when, request: None
    assert len([request for request in sent if request.startswith("GET")]) == 2 * 4  # before and after each of four


def test_a_server_without_range_is_noticed_and_not_called_damage(address, write, monkeypatch):
    write(address, [("a", Moment(), np.arange(1 << 19, dtype=np.int32).reshape(512, 1024))]).close()
    kind = type(fsspec.filesystem("memory"))
    cat = kind.cat_file
    monkeypatch.setattr(kind, "cat_file", lambda self, path, start=None, end=None: cat(self, path))
    run = open_run(address)
    assert run.tensor("a").sum().item() == sum(range(1 << 19))
    assert run.tensor("a", rows=slice(3, 4))[0, 0].item() == 3 * 1024
    assert run.damaged == []
    run.refresh()
    assert any("sends whole files" in note for note in run.notes)


def test_a_server_with_range_is_not_accused(anywhere, write):
    write(anywhere, steps(0)).close()
    run = open_run(anywhere)
    run.tensor("a", rows=slice(1, 2))
    run.refresh()
    assert run.notes == []


def test_a_forked_child_reads_too(anywhere, write):
    write(anywhere, steps(0, 1)).close()
    run = open_run(anywhere)
    assert values(run) == {0: 0, 1: 1}
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if values(run) == {0: 0, 1: 1} else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def test_damage_elsewhere_is_damage(address, write):
    write(address, steps(0, 1)).close()
    files = fsspec.filesystem("memory")
    (path,) = files.glob(address.removeprefix("memory:/") + "/rank-00000/segment-*")
    data = bytearray(files.cat_file(path))
    data[(64 << 10) + 1] ^= 1
    files.pipe_file(path, bytes(data))
    run = open_run(address)
    with pytest.raises(OSError, match="not what was written"):
        run.tensor("a", step=0)
    assert run.tensor("a", step=1).tolist() == [1, 1, 1]
    files.rm(path)
    assert [damage.file for damage in open_run(address).damaged] == ["rank-00000/segment-00000.safetensors"]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")
