"""journal.py: lines with a checksum each."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import google_crc32c
import pytest

from layerscope.errors import Damaged, NewerFormat, RunBusy
from layerscope.points import Moment
from layerscope.store.address import LocalFolder
from layerscope.store.journal import Journal, lines, opening_line, record_line, rest_of, rest_text, walk
from layerscope.store.segment import Placed

PLACED = Placed(2, 65536, 24, 0xAB)


def line(n: int = 0, **kwargs) -> bytes:
    return record_line(n, "a.b:output[0]", Moment(step=n, batch=n), **kwargs)


def checked(text: str) -> bytes:
    """Write a line by hand, with a right checksum."""
    return text.encode() + f',"check":"{google_crc32c.value(text.encode()):08x}"}}\n'.encode()


def test_a_line_is_json_whose_last_key_is_the_checksum_of_what_stands_before_it():
    raw = line(7, dtype="float32", shape=(2, 3), placed=PLACED, rest=rest_text({"mean": "NaN"}, {"why": math.inf}))
    value = json.loads(raw)
    assert value == {
        "record": 7,
        "point": "a.b:output[0]",
        "epoch": None,
        "step": 7,
        "batch": 7,
        "call": 0,
        "rank": 0,
        "dtype": "float32",
        "shape": [2, 3],
        "segment": 2,
        "offset": 65536,
        "length": 24,
        "crc32c": "000000ab",
        "summary": {"mean": "NaN"},
        "note": {"why": "Infinity"},
        "check": value["check"],
    }
    assert list(value)[-1] == "check"
    assert raw.isascii()
    assert raw.count(b"\n") == 1
    body = raw[: raw.rindex(b',"check"')]
    assert int(value["check"], 16) == google_crc32c.value(body)


def test_a_line_reads_back():
    rest = rest_text({"mean": 1.5, "note": {"summary": 1}}, {"summary": "x", "why": math.inf})
    raw = line(7, dtype="float32", shape=(2, 3), placed=PLACED, rest=rest)
    [read] = lines(raw, at=100)
    assert (read.at, read.size, read.damage) == (100, len(raw), None)
    assert read.record.moment == Moment(step=7, batch=7)
    assert (read.record.record, read.record.dtype, read.record.shape) == (7, "float32", (2, 3))
    assert read.record.placed == PLACED
    assert rest_of(raw) == ({"mean": 1.5, "note": {"summary": 1}}, {"summary": "x", "why": math.inf})


def test_a_point_that_looks_like_the_end_of_the_facts_does_not_end_them():
    raw = record_line(0, 'x,"summary"\\:,"note"\\::output', Moment(), rest=rest_text(None, {"a": 1}))
    [read] = lines(raw)
    assert read.damage is None
    assert read.record.point == 'x,"summary"\\:,"note"\\::output'


def test_a_record_without_a_tensor_has_no_dtype():
    [read] = lines(line(1, rest=rest_text({"mean": 1})))
    assert (read.record.dtype, read.record.shape, read.record.placed) == (None, None, None)


@pytest.mark.parametrize("at", [0, 5, 40, -25, -15, -3, -2])
def test_a_changed_byte_is_noticed_and_costs_one_line(at):
    broken = bytearray(line(1))
    broken[at] ^= 1
    read = list(lines(line(0) + broken + line(2)))
    assert [r.record.record if r.record else None for r in read] == [0, None, 2]
    assert read[1].damage


def test_every_truncation_of_a_line_is_noticed():
    whole = line(1)
    for end in range(1, len(whole) - 1):
        [read] = lines(whole[:end])
        assert read.record is None
        assert read.damage


def test_empty_lines_are_nothing():
    assert [r.record.record for r in lines(b"\n" + line(0) + b"\n\n" + line(1))] == [0, 1]


FACTS = '{"record":0,"point":"a","epoch":null,"step":0,"batch":0,"call":0,"rank":0'
TENSOR = FACTS + ',"dtype":"float32","shape":[1],"segment":0,"offset":65536,"length":4,"crc32c":"00000000"'


def test_the_lines_below_would_be_right():
    assert [r.damage for r in lines(checked(FACTS) + checked(TENSOR))] == [None, None]


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (FACTS, '"step":0', '"step":1e3'),
        (FACTS, '"step":0', '"step":true'),
        (FACTS, '"step":0', '"step":99999999999999999999'),
        (FACTS, '"step":0', '"steps":0'),
        (FACTS, '"record":0', '"record":-1'),
        (FACTS, '"point":"a"', '"point":3'),
        (FACTS, '"point":"a"', '"point":"a[[["'),
        (TENSOR, '"shape":[1]', '"shape":[-1]'),
        (TENSOR, '"shape":[1]', '"shape":5'),
        (TENSOR, '"shape":[1]', '"shape":"1"'),
        (TENSOR, '"offset":65536', '"offset":9223372036854775808'),
        (TENSOR, '"crc32c":"00000000"', '"crc32c":"xyz"'),
        (TENSOR, '"crc32c":"00000000"', '"crc32c":5'),
        (TENSOR, '"crc32c":"00000000"', '"crc32c":"ffffffffffffffff"'),
        (TENSOR, '"crc32c":"00000000"', '"crc32c":"-0000001"'),
        (TENSOR, '"dtype":"float32"', '"dtype":"float\\ud800"'),
        (TENSOR, '"dtype":"float32"', '"dtype":7'),
        (FACTS, FACTS, '{"format":"layerscope","version":"x"'),
        (FACTS, FACTS, "[1"),
        (FACTS, FACTS, "[" * 100_000),
    ],
)
def test_a_line_with_a_right_checksum_and_wrong_contents_is_damaged(text, old, new):
    [read] = lines(checked(text.replace(old, new)))
    assert read.record is None
    assert read.damage


def test_a_point_is_taken_in_its_own_text_form_whoever_wrote_the_line():
    texts = [r.record.point for r in lines(checked(FACTS) + checked(FACTS.replace('"a"', '"a\\ud800:input"')))]
    assert texts == ["a:output", "a\\ud800:input"]


def test_an_opening_line_is_no_record_and_a_newer_one_is_refused():
    [read] = lines(opening_line(rank=3, run="abcd"))
    assert (read.record, read.damage) == (None, None)
    assert json.loads(opening_line(rank=3, run="abcd"))["rank"] == 3
    with pytest.raises(NewerFormat, match="format 9"):
        list(lines(checked('{"format":"layerscope","version":9,"rank":0,"run":""')))


def test_rest_of_a_line_that_is_not_what_was_written_is_damaged():
    broken = bytearray(line(0, rest=rest_text({"mean": 1})))
    broken[20] ^= 1
    with pytest.raises(Damaged, match="checksum"):
        rest_of(broken)
    with pytest.raises(Damaged, match="not an object"):
        rest_of(checked(FACTS + ',"summary":5'))


def test_a_moment_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match="64 bits"):
        record_line(0, "a", Moment(step=2**63))


def test_walking_a_journal_piece_by_piece_sees_each_line_once(tmp_path, monkeypatch):
    monkeypatch.setattr("layerscope.store.journal._PIECE", 100)
    raw = b"".join(line(n) for n in range(20))
    (tmp_path / "journal").write_bytes(raw + b'{"torn')
    files = LocalFolder(tmp_path)
    read = list(walk(files, "journal"))
    assert [r.record.record for r in read] == list(range(20))
    assert [raw[r.at : r.at + r.size] for r in read] == [line(n) for n in range(20)]
    assert [r.record.record for r in walk(files, "journal", at=read[9].at)] == list(range(9, 20))
    [*_, last] = walk(files, "journal", whole=True)
    assert (last.at, last.size, last.record) == (len(raw), 6, None)


def test_a_journal_without_newlines_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("layerscope.store.journal._PIECE", 100)
    monkeypatch.setattr("layerscope.store.journal._LONGEST", 1000)
    (tmp_path / "journal").write_bytes(b"x" * 5000 + b"\n" + line(0))
    read = list(walk(LocalFolder(tmp_path), "journal"))
    assert [r.record is not None for r in read][-1]
    assert max(r.size for r in read) <= 1100
    assert sum(r.size for r in read) == 5001 + len(line(0))


def test_lines_are_appended(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.append(line(0))
    journal.append(line(1))
    journal.close()
    journal = Journal(tmp_path / "journal")
    journal.append(line(2))
    journal.close()
    assert (tmp_path / "journal").read_bytes() == line(0) + line(1) + line(2)


def test_a_line_after_a_torn_one_is_not_glued_to_it(tmp_path):
    for torn in (line(1)[:-30], line(1)[:-1]):  # the second lacks only its newline
        path = tmp_path / f"journal{len(torn)}"
        path.write_bytes(line(0) + torn)
        journal = Journal(path)
        assert journal.torn
        journal.append(line(2))
        journal.close()
        assert [r.record.record if r.record else None for r in lines(path.read_bytes())] == [0, None, 2]


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_line_the_disk_refuses_halfway_is_taken_back_or_spoilt(tmp_path, monkeypatch, can_cut):
    import os

    journal = Journal(tmp_path / "journal")
    journal.append(line(0))
    real_write, real_cut = os.write, os.ftruncate

    def full(fd, data):
        if len(data) > 20:
            return real_write(fd, bytes(data)[:20])
        raise OSError(28, "No space left on device")

    def refuse(fd, size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", full)
    if not can_cut:
        monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="No space"):
        journal.append(line(1)[:30] + b"\n")
    monkeypatch.setattr(os, "write", real_write)
    monkeypatch.setattr(os, "ftruncate", real_cut)
    journal.append(line(2))
    journal.append(line(3))
    journal.close()
    read = list(lines((tmp_path / "journal").read_bytes()))
    assert [r.record.record for r in read if r.record] == [0, 2, 3]
    assert sum(r.damage is not None for r in read) == (0 if can_cut else 1)


def test_a_second_writer_is_refused_and_reading_is_not(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.append(line(0))
    with pytest.raises(RunBusy, match="another process is writing"):
        Journal(tmp_path / "journal")
    assert len(list(walk(LocalFolder(tmp_path), "journal"))) == 1
    journal.close()
    Journal(tmp_path / "journal").close()


def test_the_lock_holds_between_processes_and_ends_with_them(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from layerscope.store.journal import Journal;"
        "j = Journal(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "journal")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(RunBusy):
            Journal(tmp_path / "journal")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    Journal(tmp_path / "journal").close()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    import fcntl

    def refuse(fd, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Journal(tmp_path / "journal").close()
    assert (tmp_path / "journal").exists()


def test_a_removed_journal_is_noticed_at_the_next_line(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.append(line(0))
    (tmp_path / "journal").unlink()
    with pytest.raises(FileNotFoundError, match="removed"):
        journal.append(line(1))
    journal.close()
