"""appender.py: records added one by one, in the caller's thread."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from safetensors import safe_open

from layerscope.points import Moment
from layerscope.store.appender import Appender, Limits
from layerscope.store.checksum import bytes_of
from layerscope.store.journal import Journal, lines


def appender(path, **limits) -> Appender:
    return Appender(Journal(path / "journal"), rank=0, limits=Limits(**limits))


def add(to: Appender, value: float, size: int = 4, point: str = "a:output") -> bytes:
    data = bytes_of(np.full(size, value, np.float32))
    return to.append(point, Moment(step=to.record), dtype="float32", shape=(size,), data=data)


def segments(path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != "journal")


def records(path):
    return [line.record for line in lines((path / "journal").read_bytes()) if line.record]


def test_segments_are_sealed_by_number_of_tensors(tmp_path):
    to = appender(tmp_path, tensors=2)
    for n in range(5):
        add(to, n)
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors", "segment-00002.partial"]
    to.close()
    assert segments(tmp_path)[-1] == "segment-00002.safetensors"
    with safe_open(tmp_path / "segment-00001.safetensors", "np") as file:
        assert {k: file.get_tensor(k)[0] for k in file.keys()} == {"00000002": 2, "00000003": 3}  # noqa: SIM118


def test_segments_are_sealed_by_size(tmp_path):
    to = appender(tmp_path, nbytes=100)
    for n in range(3):
        add(to, n, size=20)
    to.close()
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors"]


def test_segments_are_sealed_when_the_headers_room_is_full(tmp_path):
    to = appender(tmp_path, tensors=10_000)
    data = bytes_of(np.zeros(1, np.float32))
    for _ in range(400):
        to.append("a:output", Moment(), dtype="float32", shape=(1,) * 60, data=data)
    to.close()
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors"]
    assert len(records(tmp_path)) == 400


def test_segments_are_sealed_by_number_of_records_of_any_kind(tmp_path):
    heard = []
    to = Appender(
        Journal(tmp_path / "journal"), rank=0, limits=Limits(records=3), lined=heard.append, sealed=heard.append
    )
    for n in range(3):
        add(to, n)
    for _ in range(3):
        to.append("b:output", Moment())
    to.close()
    told = [h.name if hasattr(h, "name") else h and h[:11].decode() for h in heard]
    assert told == [
        '{"format":"',
        *[f'{{"record":{n}' for n in range(3)],
        "segment-00000.safetensors",
        *[f'{{"record":{n}' for n in range(3, 6)],
        None,
        None,
    ]


def test_a_record_without_a_tensor_makes_no_segment(tmp_path):
    to = appender(tmp_path)
    to.append("a:output", Moment(), rest=',"summary":{}')
    to.close()
    assert segments(tmp_path) == []
    assert [r.point for r in records(tmp_path)] == ["a:output"]


def test_a_line_that_cannot_be_made_leaves_no_bytes_behind(tmp_path):
    to = appender(tmp_path)
    add(to, 1)
    data = bytes_of(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="64 bits"):
        to.append("b:output", Moment(step=2**80), dtype="float32", shape=(4,), data=data)
    add(to, 2)
    to.close()
    assert [r.record for r in records(tmp_path)] == [0, 1]
    with safe_open(tmp_path / "segment-00000.safetensors", "np") as file:
        assert [file.get_tensor(k)[0] for k in sorted(file.keys())] == [1, 2]


def test_when_the_disk_refuses_the_segment_is_sealed_and_the_next_record_begins_a_new_one(tmp_path, monkeypatch):
    to = appender(tmp_path)
    add(to, 1)
    real = os.pwrite

    def full(fd, data, offset):
        real(fd, bytes(data)[:7], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        add(to, 2)
    # With no room for a header either, the first one stays partial, but cut back to its last record.
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir() if p.name != "journal"] == [
        ("segment-00000.partial", 65536 + 16)
    ]
    monkeypatch.setattr(os, "pwrite", real)
    add(to, 3)
    to.close()
    assert [(r.record, r.placed.segment) for r in records(tmp_path)] == [(0, 0), (1, 1)]


def test_the_lock_is_gone_after_close(tmp_path):
    appender(tmp_path).close()
    appender(tmp_path).close()
    assert (tmp_path / "journal").read_bytes().count(b"\n") == 2
