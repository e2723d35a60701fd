"""recovery.py: sealing what a kill left behind. Kills themselves are in tests/faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from layerscope.errors import Damaged, NewerFormat, NotARun, RunBusy, Unsupported
from layerscope.points import Moment, Point
from layerscope.store import Manifest, Writer, open_run, recover
from layerscope.store.segment import ROOM

VALUES = [np.full(4, n, np.float32) for n in range(3)]


@pytest.fixture
def killed(tmp_path, write):
    """A run as a kill leaves it: three records in a partial segment, state `recording`."""
    writer = write(tmp_path / "live", [(f"p{n}", Moment(step=n), VALUES[n]) for n in range(3)])
    writer.flush()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.close()
    return tmp_path / "killed"


def contents(path) -> dict:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def journal_of(path):
    return path / "rank-00000/segment-00000.journal"


def frames(path) -> bytes:
    """Return a journal without the room that is kept behind it."""
    return journal_of(path).read_bytes().rstrip(b"\0")


def damage(path, text: bytes) -> None:
    raw = bytearray(journal_of(path).read_bytes())
    raw[raw.index(text)] ^= 1
    journal_of(path).write_bytes(raw)


def tensors(path) -> dict:
    with safe_open(sealed(path), "np") as file:
        return {k: file.get_tensor(k).tolist() for k in sorted(file.keys()) if k.isdecimal() or k.startswith("gap")}


def partial(path):
    return path / "rank-00000/segment-00000.partial"


def sealed(path):
    return path / "rank-00000/segment-00000.safetensors"


def test_a_partial_segment_is_sealed_from_the_journal(killed):
    assert recover(killed)[:3] == (1, 3, [])
    with safe_open(sealed(killed), "np") as file:
        assert [file.get_tensor(f"{n:08d}").tolist() for n in range(3)] == [v.tolist() for v in VALUES]
    run = open_run(killed)
    assert (run.state, run.manifest.completeness.records) == ("recovered", 3)


def test_doing_it_again_changes_nothing(killed):
    recover(killed)
    before = contents(killed)
    assert recover(killed)[:3] == (0, 0, [])
    assert contents(killed) == before


@pytest.mark.parametrize("state", ["complete", "interrupted"])
def test_a_run_that_was_closed_is_left_as_it_is(tmp_path, write, state):
    write(tmp_path / "run", [("a", Moment(), VALUES[1])]).close(forwards=1, state=state)
    before = contents(tmp_path / "run")
    assert recover(tmp_path / "run")[:3] == (0, 0, [])
    assert contents(tmp_path / "run") == before
    assert open_run(tmp_path / "run").state == state


def test_bytes_nobody_was_told_of_are_cut_off(killed):
    with partial(killed).open("ab") as file:
        file.write(b"x" * 100)
    assert recover(killed)[:3] == (1, 3, [])
    assert tensors(killed) == {f"{n:08d}": v.tolist() for n, v in enumerate(VALUES)}


def test_a_torn_last_frame_is_dropped_and_named(killed):
    whole = frames(killed)
    journal_of(killed).write_bytes(whole + whole[:13] + b"poi")
    assert any("16 bytes of a frame that is being written, or was torn" in note for note in open_run(killed).notes)
    done = recover(killed)
    assert (done.sealed, done.records) == (1, 3)
    [lost] = done.lost
    assert (lost.file, lost.acknowledged) == ("rank-00000/segment-00000.journal", False)
    assert "16 bytes of a last frame that was never finished" in lost.reason
    assert not journal_of(killed).exists()
    assert not journal_of(killed).with_name("segment-00000.journal.damaged").exists()


def test_a_damaged_frame_in_the_middle_costs_its_record_and_is_covered_by_a_gap(killed):
    damage(killed, b"p1:output")
    before = journal_of(killed).read_bytes()
    done = recover(killed)
    assert (done.sealed, done.records, len(done.lost)) == (1, 2, 1)
    assert journal_of(killed).with_name("segment-00000.journal.damaged").read_bytes() == before
    found = tensors(killed)
    assert sorted(found) == ["00000000", "00000002", f"gap-{ROOM + 16}"]
    assert bytes(found[f"gap-{ROOM + 16}"]) == VALUES[1].tobytes()
    run = open_run(killed)
    assert [run.tensor(f"p{n}").tolist() for n in (0, 2)] == [[0] * 4, [2] * 4]


def test_damaged_bytes_are_named_by_point_and_moment_and_no_key_leads_to_them(killed, wrong):
    wrong(partial(killed), ROOM + 16 + 3)
    done = recover(killed)
    [lost] = done.lost
    assert (lost.point, lost.moment) == ("p1:output", "step=1 batch=0")
    assert "checksum" in lost.reason
    assert sorted(tensors(killed)) == ["00000000", "00000002", f"gap-{ROOM + 16}"]
    assert tensors(killed)["00000002"] == [2] * 4
    with pytest.raises(Damaged):
        open_run(killed).tensor("p1")


def test_a_damaged_last_frame_keeps_the_bytes_it_spoke_of(killed):
    damage(killed, b"p2:output")
    done = recover(killed)
    assert (done.records, len(done.lost)) == (2, 1)
    assert bytes(tensors(killed)[f"gap-{ROOM + 32}"]) == VALUES[2].tobytes()


def test_a_damaged_marker_at_the_beginning_costs_nothing_but_itself(killed, wrong):
    wrong(journal_of(killed), 3)
    assert len(open_run(killed)) == 3
    assert recover(killed).records == 3


def test_a_segment_shorter_than_its_journal_says_so_for_each_record(killed):
    os.truncate(partial(killed), ROOM + 20)
    done = recover(killed)
    assert (done.sealed, done.records) == (1, 1)
    assert [d.point for d in done.lost] == ["p1:output", "p2:output"]
    assert all(f"not inside a file of {ROOM + 20}" in d.reason for d in done.lost)
    assert tensors(killed) == {"00000000": [0] * 4}
    assert [(d.point, d.count) for d in open_run(killed).dropped] == [("p1:output", 1), ("p2:output", 1)]


def test_a_segment_no_frame_speaks_of_is_removed_only_when_the_journal_is_whole(killed):
    whole = frames(killed)
    first = whole.index(whole[:8], 8)  # the run's name begins each frame
    journal_of(killed).write_bytes(whole[:first])
    copy, gone = killed.parent / "copy", killed.parent / "gone"
    for each in (copy, gone):
        shutil.copytree(killed, each)
    assert recover(killed)[:3] == (0, 0, [])
    assert not partial(killed).exists()
    assert not sealed(killed).exists()
    damage(copy, b"layerscope")
    journal_of(gone).unlink()
    for each, reads in ((copy, "nothing of it reads"), (gone, "it is not there")):
        done = recover(each)
        assert (done.sealed, done.records) == (1, 0)
        assert any(reads in lost.reason and lost.acknowledged for lost in done.lost)
        assert bytes(tensors(each)[f"gap-{ROOM}"]) == b"".join(v.tobytes() for v in VALUES)


@pytest.mark.parametrize("harm", ["nothing", "a column", "all of it"])
def test_of_a_sealed_segment_and_its_journal_the_sealed_one_counts_while_it_reads(killed, harm):
    journal = journal_of(killed).read_bytes()
    recover(killed)
    whole = sealed(killed).read_bytes()
    journal_of(killed).write_bytes(journal)
    if harm == "a column":
        raw = bytearray(whole)
        raw[whole.index(VALUES[2].tobytes()) + 16 + 64] ^= 1
        sealed(killed).write_bytes(raw)
    elif harm == "all of it":
        sealed(killed).write_bytes(whole[: ROOM + 48])
    assert recover(killed).lost == []
    assert not journal_of(killed).exists()
    assert open_run(killed).damaged == []
    assert tensors(killed) == {f"{n:08d}": v.tolist() for n, v in enumerate(VALUES)}
    run = open_run(killed)
    assert [run.tensor(f"p{n}").tolist() for n in range(3)] == [v.tolist() for v in VALUES]


def test_progress_is_told(killed):
    told = []
    recover(killed, progress=lambda name, done, total: told.append((name, done, total)))
    assert told == [("rank-00000/segment-00000", n, 3) for n in range(4)]


def test_a_run_that_is_being_written_is_busy(tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(), VALUES[0])])
    with pytest.raises(RunBusy):
        recover(tmp_path / "run")
    assert writer.close().records == 1


@pytest.mark.parametrize("garbage", [None, b"", b'{"format": "layerscope", "vers'])
def test_a_manifest_that_does_not_read_is_kept_aside_and_replaced(killed, garbage):
    (killed / "run.json").unlink()
    if garbage is not None:
        (killed / "run.json").write_bytes(garbage)
    assert recover(killed).records == 3
    assert open_run(killed).state == "recovered"
    kept = killed / "run.json.damaged"
    assert (kept.read_bytes() if kept.exists() else None) == garbage
    before = contents(killed)
    recover(killed)
    assert contents(killed) == before


@pytest.mark.parametrize(("version", "error"), [(3, NewerFormat), (1, NotARun)])
def test_another_format_is_refused_before_anything_is_touched(killed, version, error):
    (killed / "run.json").write_text(json.dumps({"format": "layerscope", "version": version}))
    before = contents(killed)
    with pytest.raises(error, match=f"written by format {version}"):
        recover(killed)
    assert contents(killed) == before


def test_every_rank_is_recovered(tmp_path, write):
    writers = [
        write(tmp_path / "live", [("a", Moment(rank=r), VALUES[r])], rank=r, manifest=Manifest(mode="m"))
        for r in range(3)
    ]
    for writer in writers:
        writer.flush()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    for writer in writers:
        writer.close()
    assert recover(tmp_path / "killed")[:3] == (3, 3, [])
    run = open_run(tmp_path / "killed")
    assert (run.state, run.manifest.mode, run.manifest.completeness.records) == ("recovered", "m", 3)
    assert [run.tensor("a", rank=r).tolist() for r in range(3)] == [v.tolist() for v in VALUES]


def test_what_is_not_a_run_is_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(NotARun, match="found 'x'"):
        recover(tmp_path)
    with pytest.raises(NotARun, match="there is nothing there"):
        recover(tmp_path / "absent")


def test_a_remote_run_has_nothing_to_recover():
    Writer("memory://recover-test", Manifest()).close()
    with pytest.raises(Unsupported, match="put there in sealed pieces"):
        recover("memory://recover-test")


def test_sealed_segments_are_verified_and_their_damage_named_each_time(killed, wrong):
    recover(killed)
    assert recover(killed) == (0, 0, [], 3)
    wrong(sealed(killed), ROOM + 16 + 2)
    before = contents(killed)
    for _ in range(2):
        done = recover(killed)
        [damage] = done.lost
        assert (damage.file, damage.point, done.verified) == (
            "rank-00000/segment-00000.safetensors",
            "p1:output",
            2,
        )
    assert contents(killed) == before
    sealed(killed).unlink()
    assert [(d.file, d.reason) for d in recover(killed).lost] == [
        ("rank-00000/segment-00000.safetensors", "it is not there, and held 3 records")
    ]


def test_what_was_lost_while_recording_is_told_after_a_kill(tmp_path, write):
    writer = write(tmp_path / "live", [("p0", Moment(), VALUES[0])])
    for n in range(5):
        writer.lose(Point(f"x{n % 2}"), Moment(step=n), "there was no room")
    writer.flush()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.close()
    recover(tmp_path / "killed")
    wanted = {("x0:output", 3, "step=0"), ("x1:output", 2, "step=1 batch=0")}
    run = open_run(tmp_path / "killed")
    assert {(d.point, d.count, d.first) for d in run.dropped} == wanted
    assert not run.complete
    again = Writer(tmp_path / "killed", Manifest(), append=True)
    again.lose(Point("x0"), Moment(step=9), "there was no room")
    again.flush()
    shutil.copytree(tmp_path / "killed", tmp_path / "twice")
    again.close()
    recover(tmp_path / "twice")
    assert {(d.point, d.count) for d in open_run(tmp_path / "twice").dropped} == {("x0:output", 4), ("x1:output", 2)}


# Files that somebody else put there --------------------------------------------------------------


@pytest.mark.parametrize("name", ["segment-00000.partial", "segment-00000.journal", "lock", "../run.json.partial"])
@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "hard link"])
def test_nothing_outside_is_written_through_a_file_of_the_run(tmp_path, killed, name, kind):
    place, precious = killed / "rank-00000" / name, tmp_path / "precious"
    precious.write_bytes(place.read_bytes() if place.exists() else b"precious")
    before = precious.read_bytes()
    place.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "hard link":
        os.link(precious, place)
    else:
        place.symlink_to(precious if kind == "link" else tmp_path / "new")
    with contextlib.suppress(Damaged, OSError):
        recover(killed)
    with contextlib.suppress(Damaged, OSError):
        Writer(killed, Manifest(), append=True).close()
    assert precious.read_bytes() == before
    assert not (tmp_path / "new").exists()
