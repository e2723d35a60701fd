"""recovery.py: sealing what a kill left behind. Kills themselves are in tests/faults."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from layerscope.errors import NewerFormat, NotARun, RunBusy, Unsupported
from layerscope.points import Moment
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
    assert sealed(killed).stat().st_size == ROOM + 48


def test_a_torn_last_line_is_dropped_and_named(killed):
    journal = killed / "rank-00000/journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"record":3,"poi')
    assert any("16 bytes" in note for note in open_run(killed).notes)
    done = recover(killed)
    assert (done.sealed, done.records) == (1, 3)
    [damage] = done.lost
    assert damage.file == "rank-00000/journal"
    assert "16 bytes of a last line that was never finished" in damage.reason
    assert journal.read_bytes() == whole


def test_a_last_line_that_lacks_only_its_newline_is_kept(killed):
    journal = killed / "rank-00000/journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-1])
    assert recover(killed)[:3] == (1, 3, [])
    assert journal.read_bytes() == whole


def test_a_damaged_line_in_the_middle_costs_its_record_and_is_covered_by_a_gap(killed, wrong):
    journal = killed / "rank-00000/journal"
    wrong(journal, journal.read_bytes().index(b'"record":1') + 5)
    before = journal.read_bytes()
    done = recover(killed)
    assert (done.sealed, done.records, len(done.lost)) == (1, 2, 1)
    assert journal.read_bytes() == before
    with safe_open(sealed(killed), "np") as file:
        assert sorted(file.keys()) == ["00000000", "00000002", f"gap-{ROOM + 16}"]
        assert file.get_tensor(f"gap-{ROOM + 16}").tobytes() == VALUES[1].tobytes()
    run = open_run(killed)
    assert [run.tensor(f"p{n}").tolist() for n in (0, 2)] == [[0] * 4, [2] * 4]
    assert len(run.damaged) == 1


def test_damaged_bytes_are_named_by_point_and_moment_and_no_key_leads_to_them(killed, wrong):
    wrong(partial(killed), ROOM + 16 + 3)
    done = recover(killed)
    [damage] = done.lost
    assert (damage.point, damage.moment) == ("p1:output", "step=1 batch=0")
    assert "checksum" in damage.reason
    with safe_open(sealed(killed), "np") as file:
        assert "00000001" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("00000002").tolist() == [2] * 4


def test_a_damaged_last_line_keeps_the_bytes_it_spoke_of(killed, wrong):
    journal = killed / "rank-00000/journal"
    wrong(journal, len(journal.read_bytes()) - 30)
    done = recover(killed)
    assert (done.records, len(done.lost)) == (2, 1)
    with safe_open(sealed(killed), "np") as file:
        assert file.get_tensor(f"gap-{ROOM + 32}").tobytes() == VALUES[2].tobytes()


def test_a_segment_shorter_than_its_journal_says_so_for_each_record(killed):
    os.truncate(partial(killed), ROOM + 20)
    done = recover(killed)
    assert (done.sealed, done.records) == (1, 1)
    assert [d.point for d in done.lost] == ["p1:output", "p2:output"]
    assert all("the file ends at byte" in d.reason for d in done.lost)
    with safe_open(sealed(killed), "np") as file:
        assert file.get_tensor("00000000").tolist() == [0] * 4


def test_a_segment_no_line_speaks_of_is_removed_only_when_the_journal_is_whole(killed, wrong):
    journal = killed / "rank-00000/journal"
    whole = journal.read_bytes()
    first = whole.index(b"\n") + 1
    journal.write_bytes(whole[:first])
    copy = killed.parent / "copy"
    shutil.copytree(killed, copy)
    assert recover(killed)[:3] == (0, 0, [])
    assert not partial(killed).exists()
    assert not sealed(killed).exists()
    wrong(copy / "rank-00000/journal", 5)
    done = recover(copy)
    assert (done.sealed, done.records, len(done.lost)) == (1, 0, 1)
    assert sealed(copy).stat().st_size == ROOM + 48


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


def test_a_newer_format_is_refused_before_anything_is_touched(killed):
    value = json.loads((killed / "run.json").read_text()) | {"version": 2}
    (killed / "run.json").write_text(json.dumps(value))
    before = contents(killed)
    with pytest.raises(NewerFormat):
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
    assert [d.point for d in recover(killed).lost] == ["p0:output", "p1:output", "p2:output"]


def test_a_journal_that_was_cut_between_two_lines_or_is_gone_is_named(killed):
    recover(killed)
    journal = killed / "rank-00000/journal"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    assert ["speaks of 3 records" in d.reason for d in recover(killed).lost] == [True]
    journal.unlink()
    assert [d.file for d in recover(killed).lost] == ["rank-00000/journal"]
