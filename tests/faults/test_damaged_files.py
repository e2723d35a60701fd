"""Files that were cut or changed: one clear error for what is gone, everything else as it was."""

from __future__ import annotations

import contextlib
import os
import random
import shutil

import numpy as np
import pytest

from layerscope.errors import LayerscopeError
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Writer, open_run, recover
from layerscope.store.checksum import crc32c

RECORDS, IN_FIRST = 6, 4


def data(n: int) -> np.ndarray:
    return np.arange(n * 1000, n * 1000 + 40, dtype=np.int32)


SUMMARIES = [summarize(data(n)) for n in range(RECORDS)]


def make(path, *, sealed: bool) -> None:
    """Write six records in two segments; closed in order, or as a kill leaves them."""
    writer = Writer(path / "live", Manifest(settings={"é": "\ud800"}), segment_tensors=IN_FIRST)
    for n in range(RECORDS):
        blob = Blob("int32", (40,), 160, lambda n=n: data(n))
        writer.write(Point(f"p{n}"), Moment(step=n), blob=blob, summary=SUMMARIES[n], note={"n": n})
    writer.lose(Point("lost"), Moment(), "on purpose")
    writer.flush()
    if not sealed:
        shutil.copytree(path / "live", path / "run")
    writer.close()
    if sealed:
        shutil.copytree(path / "live", path / "run")


@pytest.fixture(params=["sealed", "partial"])
def run_folder(request, tmp_path):
    """Six records, closed in order or as a kill leaves them."""
    make(tmp_path, sealed=request.param == "sealed")
    return tmp_path / "run"


def survivors(path) -> tuple[set[int], bool]:
    """Return which records read right, and whether all seems well; anything but right or a LayerscopeError fails."""
    right = set()
    try:
        run = open_run(path)
    except LayerscopeError:
        return right, False
    names = {entry.point.name for entry in run.records()}
    assert names <= {f"p{n}" for n in range(RECORDS)}
    for n in range(RECORDS):
        with contextlib.suppress(LayerscopeError):
            assert run.tensor(f"p{n}", step=n).tolist() == data(n).tolist()
            [entry] = run.records(f"p{n}")
            assert entry.moment == Moment(step=n)
            assert entry.summary == SUMMARIES[n]
            assert entry.note == {"n": n}
            right.add(n)
    for row in run.summaries():
        assert row["mean"] in (None, SUMMARIES[row["step"]].mean)
        assert row["p50"] in (None, SUMMARIES[row["step"]].percentile(50))
    assert {loss.point for loss in run.dropped} <= {"lost:output", *(f"p{n}:output" for n in range(RECORDS))}
    return right, run.damaged == [] and run.notes == [] and run.state in ("complete", "recording")


def recovered(path, tmp_path) -> set[int]:
    """Return what survives in a copy that was recovered."""
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    with contextlib.suppress(LayerscopeError):
        recover(copy)
    after, _ = survivors(copy)
    shutil.rmtree(copy)
    return after


@contextlib.contextmanager
def changed(path, raw: bytes):
    """Put other bytes in place of a file's while the block runs."""
    before = path.read_bytes()
    path.write_bytes(raw)
    yield
    path.write_bytes(before)


def files(path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.name != "lock")


def check_flips(path, tmp_path, rng: random.Random, count: int, *, recovering: int) -> None:
    """Check single flipped bits: one record lost at most, nothing wrong, never unnoticed; `recover` loses no more."""
    names = files(path)
    content = {name: (path / name).read_bytes() for name in names}
    for turn in range(count):
        name = names[turn % len(names)]
        raw = bytearray(content[name])
        # Most of a segment is tensors' bytes and room: half of the flips go elsewhere.
        end = len(raw.rstrip(b"\0")) if name.endswith("journal") else len(raw)
        at = rng.randrange(end) if rng.random() < 0.5 else end - 1 - rng.randrange(min(end, 4000))
        raw[at] ^= 1 << rng.randrange(8)
        with changed(path / name, bytes(raw)):
            alive, well = survivors(path)
            assert len(alive) >= RECORDS - 1, (name, at)
            if "partial" not in name or at >= 65536:
                assert not well, (name, at)
            if turn % recovering == 0:
                assert alive <= recovered(path, tmp_path), (name, at)
    assert survivors(path) == (set(range(RECORDS)), True)


def check_cuts(path, tmp_path, rng: random.Random, count: int) -> None:
    """Check files that end too early: what was behind the cut is lost, nothing wrong, and never unnoticed."""
    names = files(path)
    for turn in range(count):
        name = names[turn % len(names)]
        raw = (path / name).read_bytes()
        end = rng.choice([0, 1, 7, 8, 9, len(raw) - 1, len(raw) - 2, rng.randrange(len(raw)), rng.randrange(len(raw))])
        with changed(path / name, raw[:end]):
            alive, well = survivors(path)
            mine = set(range(IN_FIRST)) if "00000." in name else set(range(IN_FIRST, RECORDS))
            if name == "run.json":
                assert alive == set(range(RECORDS))
            else:
                assert set(range(RECORDS)) - mine <= alive
                assert alive & mine == set(range(min(mine), min(mine) + len(alive & mine)))
            if name.endswith(".partial"):
                kept = max(0, (end - 65536) // 160)
                assert alive & mine == set(range(min(mine), min(mine) + min(kept, len(mine))))
            if not name.endswith(".journal"):  # a journal cut between two frames is one of an earlier moment
                assert not well, (name, end)
            if turn % 5 == 0:
                assert alive <= recovered(path, tmp_path), (name, end)


def test_untouched_everything_survives(run_folder):
    assert survivors(run_folder) == (set(range(RECORDS)), True)


def test_a_flipped_bit_costs_one_record_at_most_and_is_noticed(run_folder, tmp_path):
    check_flips(run_folder, tmp_path, random.Random(2), 150, recovering=5)


def test_a_file_cut_anywhere_costs_only_what_was_behind_the_cut(run_folder, tmp_path):
    check_cuts(run_folder, tmp_path, random.Random(1), 80)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_flips_and_cuts(run_folder, tmp_path, seed):
    check_flips(run_folder, tmp_path, random.Random(f"flips {seed}"), 500, recovering=20)
    check_cuts(run_folder, tmp_path, random.Random(f"cuts {seed}"), 100)


def test_every_byte_of_a_table_may_be_damaged(tmp_path):
    """Each byte behind the tensors of one segment, which is where one byte could cost more than a record."""
    make(tmp_path, sealed=True)
    segment = tmp_path / "run/rank-00000/segment-00001.safetensors"
    raw = segment.read_bytes()
    for at in range(65536 + 2 * 160, len(raw), 7):
        flipped = bytearray(raw)
        flipped[at] ^= 0xFF
        with changed(segment, bytes(flipped)):
            alive, well = survivors(tmp_path / "run")
            assert len(alive) >= RECORDS - 1, at
            assert not well, at


def test_without_a_footer_and_with_a_column_that_nobody_finds_rows_are_damaged(tmp_path):
    make(tmp_path, sealed=True)
    segment = tmp_path / "run/rank-00000/segment-00001.safetensors"
    raw = segment.read_bytes()
    for column in ("note", "note_start", "has", "point", "sketch_keys", "mean", "check"):
        named = f'"table.{column}"'.encode()
        assert raw.count(named) == 1
        with changed(segment, raw.replace(named, named.replace(b"table.", b"tabel."))[:-1] + b"?"):
            alive, well = survivors(tmp_path / "run")
            assert alive >= set(range(IN_FIRST))
            assert not well


def test_a_file_that_is_gone_costs_only_its_own(run_folder, tmp_path):
    for name in files(run_folder):
        copy = tmp_path / "copy"
        shutil.copytree(run_folder, copy)
        (copy / name).unlink()
        alive, well = survivors(copy)
        if "segment-00000" in name:
            assert alive == {4, 5}
        elif "segment-00001" in name:
            assert alive == {0, 1, 2, 3}
        else:
            assert alive == set(range(RECORDS))
        # A run that a kill ended has no list of what was sealed: one of these that is taken away is not missed.
        assert not well or (name.endswith("00000.safetensors") and open_run(run_folder).state == "recording")
        shutil.rmtree(copy)


def test_a_sealed_segment_cut_from_outside_is_damage_in_a_run_that_is_open(tmp_path):
    make(tmp_path, sealed=True)
    run = open_run(tmp_path / "run")
    entries = list(run.records())
    os.truncate(tmp_path / "run/rank-00000/segment-00001.safetensors", 65536 + 100)
    right = set()
    for n, entry in enumerate(entries):
        with contextlib.suppress(LayerscopeError):
            assert entry.tensor().tolist() == data(n).tolist()
            right.add(n)
    assert right == {0, 1, 2, 3}
    assert run.damaged


def test_random_rubbish_in_place_of_any_file_is_one_sentence(run_folder, tmp_path):
    rng = random.Random(3)
    for name in files(run_folder):
        for size in (0, 1, 100, 70_000):
            with changed(run_folder / name, rng.randbytes(size)):
                alive, well = survivors(run_folder)
                assert not well
                assert alive <= recovered(run_folder, tmp_path)


def test_a_sealed_file_and_a_journal_that_are_both_damaged_make_one_that_has_the_rows_of_both(tmp_path):
    """A kill between the rename and the end of the journal leaves both; each is damaged in another record."""
    make(tmp_path, sealed=False)
    make(tmp_path / "sealed", sealed=True)
    folder = tmp_path / "run/rank-00000"
    journal, sealed = folder / "segment-00001.journal", folder / "segment-00001.safetensors"
    shutil.copy(tmp_path / "sealed/run/rank-00000" / sealed.name, sealed)
    (folder / "segment-00001.partial").unlink()
    flip(journal, b"p4:output")
    crc = np.uint32(crc32c(data(5))).tobytes()
    assert sealed.read_bytes().count(crc) == 1  # in the column of what the bytes' checksums are
    flip(sealed, crc)
    recover(tmp_path / "run")
    assert survivors(tmp_path / "run")[0] == set(range(RECORDS))
    assert recover(tmp_path / "run").lost == []
    assert sorted(p.name for p in folder.glob("segment-00001*")) == ["segment-00001.journal.damaged", sealed.name]


def flip(path, what: bytes) -> None:
    """Flip a bit in the first byte of something in a file."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(what)] ^= 1
    path.write_bytes(raw)


def test_a_damaged_journal_is_kept_beside_and_what_it_says_is_sealed(tmp_path):
    make(tmp_path, sealed=False)
    journal = tmp_path / "run/rank-00000/segment-00001.journal"
    raw = bytearray(journal.read_bytes())
    raw[raw.index(b"p4:output")] ^= 1
    journal.write_bytes(raw)
    done = recover(tmp_path / "run")
    assert [(d.file, d.acknowledged) for d in done.lost] == [("rank-00000/segment-00001.journal", True)]
    assert journal.with_name("segment-00001.journal.damaged").read_bytes() == raw
    assert not journal.exists()
    alive, _ = survivors(tmp_path / "run")
    assert alive == {0, 1, 2, 3, 5}
