"""segment.py: safetensors files written as a stream. The oracle is the stock safetensors reader."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from layerscope.points import Moment
from layerscope.store.checksum import bytes_of
from layerscope.store.segment import ROOM, Segment, entry, gap, header

ONE = np.arange(6, dtype=np.float32).reshape(2, 3)
TWO = np.arange(5, dtype=np.int16)


def write(segment: Segment, record: int, array: np.ndarray) -> None:
    data = bytes_of(array)
    placed = segment.write(data)
    segment.keep(record, "a:output", Moment(), dtype=str(array.dtype), shape=array.shape, placed=placed)


def test_the_stock_reader_reads_a_sealed_segment(tmp_path):
    segment = Segment.create(tmp_path, number=3, rank=1)
    write(segment, 12, ONE)
    write(segment, 13, np.zeros((0, 4), np.float32))
    write(segment, 14, TWO)
    write(segment, 15, np.array(2.5))
    path = segment.seal()
    assert path == tmp_path / "segment-00003.safetensors"
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "layerscope", "version": "1", "rank": "1"}
        assert sorted(file.keys()) == ["00000012", "00000013", "00000014", "00000015"]
        np.testing.assert_array_equal(file.get_tensor("00000012"), ONE)
        np.testing.assert_array_equal(file.get_tensor("00000014"), TWO)
        assert file.get_tensor("00000013").shape == (0, 4)
        assert file.get_tensor("00000015") == 2.5


def test_the_bytes_begin_behind_the_room_and_have_no_gaps(tmp_path):
    segment = Segment.create(tmp_path, number=0, rank=0)
    write(segment, 0, TWO)
    write(segment, 1, ONE)
    raw = segment.seal().read_bytes()
    assert raw[:8] == (65528).to_bytes(8, "little")
    assert raw[ROOM:] == TWO.tobytes() + ONE.tobytes()
    assert json.loads(raw[8:ROOM])["00000001"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [10, 34]}


def test_an_unsealed_segment_is_refused_by_the_stock_reader(tmp_path):
    segment = Segment.create(tmp_path, number=0, rank=0)
    write(segment, 0, ONE)
    with pytest.raises(SafetensorError), safe_open(segment.path, "np"):
        pass
    segment.close()
    assert segment.path.stat().st_size == ROOM + 24


def test_the_headers_room_is_written_and_not_just_seeked_over(tmp_path):
    segment = Segment.create(tmp_path, number=0, rank=0)
    os.fsync(segment.fd)
    assert os.fstat(segment.fd).st_blocks * 512 >= ROOM
    segment.close()


def test_what_was_not_kept_is_cut_off(tmp_path):
    segment = Segment.create(tmp_path, number=0, rank=0)
    write(segment, 0, TWO)
    segment.write(bytes_of(ONE))
    segment.forget()
    assert segment.path.stat().st_size == ROOM + 10
    segment.write(bytes_of(ONE))
    with safe_open(segment.seal(), "np") as file:  # sealing cuts too, or the reader would find uncovered bytes
        assert list(file.keys()) == ["00000000"]


def test_an_empty_segment_is_removed_and_not_sealed(tmp_path):
    assert Segment.create(tmp_path, number=0, rank=0).seal() is None
    assert list(tmp_path.iterdir()) == []


def test_files_follow_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        segment = Segment.create(tmp_path, number=0, rank=0)
    finally:
        os.umask(old)
    write(segment, 0, ONE)
    assert segment.seal().stat().st_mode & 0o777 == 0o644


def test_an_existing_file_is_never_overwritten(tmp_path):
    (tmp_path / "segment-00000.partial").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path, number=0, rank=0)
    assert (tmp_path / "segment-00000.partial").read_bytes() == b"precious"


def test_the_room_fills_up_before_the_header_overflows_it(tmp_path):
    segment = Segment.create(tmp_path, number=0, rank=0)
    shape = (1,) * 60
    array = np.zeros(shape, np.float32)
    count = 0
    while segment.has_room("float32", shape, 4):
        write(segment, count, array)
        count += 1
    assert 250 < count < 400
    with safe_open(segment.seal(), "np") as file:
        assert len(file.keys()) == count


def test_512_ordinary_tensors_fit(tmp_path):
    entries = [
        entry(10**7 + n, "bfloat16", (16, 2048, 12288), offset=ROOM + n * 10**12, length=10**12) for n in range(512)
    ]
    assert len(header(entries, rank=99999)) == ROOM


def test_a_header_too_large_for_its_room_is_refused():
    with pytest.raises(ValueError, match="does not fit the 65528 reserved"):
        header([entry(n, "float32", (1,) * 60, offset=ROOM, length=4) for n in range(500)], rank=0)


def test_a_gap_is_told_as_plain_bytes():
    assert json.loads("{" + gap(ROOM + 10, 5) + "}") == {
        "gap-65546": {"dtype": "U8", "shape": [5], "data_offsets": [10, 15]}
    }
