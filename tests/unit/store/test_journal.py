"""journal.py: frames with a checksum each."""

from __future__ import annotations

import errno
import os
import struct

import google_crc32c
import pytest

from layerscope.errors import NewerFormat, NotARun
from layerscope.store import Dropped
from layerscope.store.columns import TableRow
from layerscope.store.journal import Journal, frame, read, row_frame

RUN = b"\x01run-\xff\x00z"
SCHEMA = frame(RUN, 1, b'{"format":"layerscope","version":2,"rank":0,"run":"' + RUN.hex().encode() + b'"}')


def row(n: int = 0, point: str = "a.b:output[0]") -> TableRow:
    return TableRow(n, point, None, n, n, 0, 0, note=b'{"n":%d}' % n)


def line(n: int = 0) -> bytes:
    return row_frame(RUN, row(n))[0]


def records(data: bytes) -> list[int]:
    return [r.record for r in read(data).rows]


def test_a_frame_is_marker_length_kind_payload_and_a_masked_checksum():
    raw = frame(RUN, 2, b"payload")
    assert raw[:13] == RUN + struct.pack("<IB", 7, 2)
    assert raw[13:20] == b"payload"
    # The check goes over the payload and then over the head, and zeros do not have it.
    check = google_crc32c.extend(google_crc32c.value(b"payload"), raw[:13])
    assert struct.unpack("<I", raw[20:])[0] == ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_frames_read_back_with_the_checksums_of_their_rows():
    found = read(SCHEMA + line(0) + line(1))
    assert (found.rows, found.damage, found.torn, found.run) == ([row(0), row(1)], [], 0, RUN)
    assert found.checks == [row_frame(RUN, row(n))[1] for n in range(2)]
    assert found.end == len(SCHEMA + line(0) + line(1))


def test_zeros_behind_the_last_frame_are_nothing():
    for zeros in (1, 12, 17, 5000):
        found = read(SCHEMA + line(0) + bytes(zeros))
        assert (found.rows, found.damage, found.torn) == ([row(0)], [], 0)
    for data in (b"", bytes(3), bytes(8), bytes(300_000)):
        assert read(data)[:6] == ([], [], [], [], 0, 0)


def test_every_changed_byte_is_noticed_and_costs_one_frame():
    whole = SCHEMA + line(0) + line(1) + line(2)
    ends = [len(SCHEMA), len(SCHEMA + line(0)), len(SCHEMA + line(0) + line(1)), len(whole)]
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0x40
        found = read(broken)
        hit = next(n for n, end in enumerate(ends) if at < end)
        assert [r.record for r in found.rows] == [n for n in range(3) if n != hit - 1], at
        assert found.damage or found.torn, at


def test_every_truncation_is_noticed():
    whole = SCHEMA + line(0) + line(1)
    for end in range(len(SCHEMA) + len(line(0)) + 1, len(whole)):
        found = read(whole[:end])
        assert (found.rows, found.damage) == ([row(0)], [])
        assert found.torn == len(whole[:end].rstrip(b"\0")) - found.end > 0


def test_bytes_that_were_put_between_are_passed_over():
    found = read(SCHEMA + line(0) + b"rubbish" + line(1) + RUN + line(2))
    assert [r.record for r in found.rows] == [0, 1, 2]
    assert [why for _, why in found.damage] == [f"{n} bytes that are not what was written" for n in (7, 8)]


def test_frames_of_another_run_on_the_same_blocks_are_not_read():
    other = row_frame(b"another!", row(7))[0]
    assert records(SCHEMA + line(0) + other) == [0]


@pytest.mark.parametrize(("version", "error"), [(3, NewerFormat), (1, NotARun)])
def test_another_version_is_refused(version, error):
    with pytest.raises(error, match=f"format {version}"):
        read(frame(RUN, 1, b'{"format":"layerscope","version":%d,"rank":0,"run":""}' % version))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0" * 100, b"\xff" * 100, row_frame(RUN, row(1))[0][13:-5], row_frame(RUN, row(1))[0][13:-4] + b"x"],
)
def test_a_right_checksum_over_wrong_contents_is_damage(payload):
    for kind in (2, 3, 9):
        found = read(SCHEMA + frame(RUN, kind, payload) + line(1))
        assert [r.record for r in found.rows] == [1]
        assert len(found.damage) == 1


@pytest.mark.parametrize("text", [b"[1]", b"{", b"[" * 100_000, b"\xff"])
def test_a_first_frame_that_says_nothing_is_damage(text):
    found = read(frame(RUN, 1, text) + line(1))
    assert ([r.record for r in found.rows], len(found.damage)) == ([1], 1)


@pytest.mark.parametrize("point", ["a[[[", "op:", ""])
def test_a_row_that_names_no_point_is_damage(point):
    found = read(SCHEMA + row_frame(RUN, row(0, point))[0] + line(1))
    assert ([r.record for r in found.rows], len(found.damage)) == ([1], 1)


def test_a_hostile_file_of_markers_stays_linear(monkeypatch):
    """What is looked at for checksums is counted: nothing but markers, each with a length as far as the end."""
    looked = []
    real = google_crc32c.extend
    monkeypatch.setattr(google_crc32c, "extend", lambda value, data: looked.append(len(data)) or real(value, data))
    for size in (1 << 16, 1 << 18):
        looked.clear()
        head = RUN + struct.pack("<IB", size // 2, 2)
        assert read(SCHEMA + head * (size // len(head))).rows == []
        assert sum(looked) < 20 * size + (2 << 20)
        assert len(looked) < size


def test_numbers_beyond_64_bits_are_refused():
    with pytest.raises(ValueError, match="64 bits"):
        row_frame(RUN, row(0)._replace(step=2**63))


# Writing ----------------------------------------------------------------------------------------


def test_frames_are_appended_and_room_is_kept_behind_them(tmp_path):
    journal = Journal(tmp_path / "j", run=RUN, rank=3)
    journal.append(line(0))
    journal.append(line(1) + line(2))
    journal.close()
    raw = (tmp_path / "j").read_bytes()
    assert read(raw)[:5] == ([row(n) for n in range(3)], [row_frame(RUN, row(n))[1] for n in range(3)], [], [], 0)
    assert len(raw) - read(raw).end >= 64 << 10
    assert not any(raw[read(raw).end :])


def test_an_existing_journal_is_never_overwritten(tmp_path):
    (tmp_path / "j").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "j", run=RUN, rank=0)
    assert (tmp_path / "j").read_bytes() == b"precious"


@pytest.mark.parametrize("can_cut", [True, False])
def test_frames_the_disk_refuses_halfway_are_taken_back(tmp_path, monkeypatch, can_cut):
    journal = Journal(tmp_path / "j", run=RUN, rank=0)
    journal.append(line(0))
    real = os.pwrite

    def full(fd, data, offset):
        if len(data) > 150:
            return real(fd, bytes(data)[:150], offset)
        if any(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        if not can_cut:
            patch.setattr(os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="No space"):
            journal.append(line(1) + line(2) + line(3))
    assert records((tmp_path / "j").read_bytes()) == [0]
    journal.append(line(4))
    journal.close()
    found = read((tmp_path / "j").read_bytes())
    assert ([r.record for r in found.rows], found.damage, found.torn) == ([0, 4], [], 0)


def test_losses_are_written_once_for_each_point_and_reason_and_grow_in_place(tmp_path):
    journal = Journal(tmp_path / "j", run=RUN, rank=0)
    for count in range(1, 4):
        journal.lose("a\ud800:output", "the disk", count, "step=1")
        journal.lose("b:output", "the disk", count * 2, "step=2")
    end = journal.end
    journal.lose("b:output", "the disk", 9, "step=2")
    assert journal.end == end
    journal.close()
    assert read((tmp_path / "j").read_bytes()).losses == [
        Dropped("a\ud800:output", 3, "the disk", "step=1"),
        Dropped("b:output", 9, "the disk", "step=2"),
    ]


def test_on_a_full_disk_losses_go_to_the_room_that_was_kept_and_the_last_are_counted_together(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j", run=RUN, rank=0)
    journal.append(line(0))
    journal.append(b"".join(line(n) for n in range(1, 2000)))

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    size = os.fstat(journal.fd).st_size
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        journal.append(b"".join(line(n) for n in range(2000, 4000)))
    for n in range(5000):
        journal.lose(f"layers.{n}:output", "the disk refused it", 1, "step=1")
    journal.lose("layers.4999:output", "the disk refused it", 2, "step=1")
    journal.close()
    found = read((tmp_path / "j").read_bytes())
    assert len(found.rows) == 2000
    assert sum(loss.count for loss in found.losses) == 5001
    assert len(found.losses) > 400
    assert found.losses[-1].reason == "the disk had no room to say what it was"
    assert (tmp_path / "j").stat().st_size <= size


def test_a_file_system_that_promises_no_blocks_is_written_to_all_the_same(tmp_path, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    journal = Journal(tmp_path / "j", run=RUN, rank=0)
    journal.append(line(0))
    journal.lose("a:output", "why", 1, "step=0")
    journal.close()
    assert records((tmp_path / "j").read_bytes()) == [0]
    assert len(read((tmp_path / "j").read_bytes()).losses) == 1


def test_a_removed_journal_is_noticed_at_the_next_frame(tmp_path):
    journal = Journal(tmp_path / "j", run=RUN, rank=0)
    (tmp_path / "j").unlink()
    with pytest.raises(FileNotFoundError, match="removed"):
        journal.append(line(1))
    journal.close()


def test_a_file_system_that_counts_no_names_is_no_removed_folder(tmp_path, monkeypatch):
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*real(fd)[:3], 0, *real(fd)[4:]]))
    journal = Journal(tmp_path / "j", run=RUN, rank=0)
    journal.append(line(0))
    journal.close()
    assert records((tmp_path / "j").read_bytes()) == [0]
