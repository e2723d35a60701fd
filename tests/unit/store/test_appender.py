"""appender.py: records added one by one, in the caller's thread."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer
from layerscope.store.address import LocalFolder
from layerscope.store.appender import Appender, Coming, Limits
from layerscope.store.checksum import bytes_of
from layerscope.store.columns import TableRow
from layerscope.store.journal import read
from layerscope.store.manifest import Dropped
from layerscope.store.segment import Sealed


def appender(path, **limits) -> Appender:
    return Appender(path, rank=0, limits=Limits(**limits))


def coming(step: int, array: np.ndarray | None, point: str = "a:output") -> Coming:
    row = TableRow(0, point, None, step, step, 0, 0)
    if array is None:
        return Coming(row)
    return Coming(row._replace(has_tensor=True, dtype=str(array.dtype), shape=array.shape), bytes_of(array))


def add(to: Appender, value: float, size: int = 4, point: str = "a:output") -> None:
    to.append([coming(to.record, np.full(size, value, np.float32), point)])


def segments(path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.suffix != ".journal")


def rows(path) -> list[TableRow]:
    found = []
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            table = Sealed(LocalFolder(path), file.name)
            found += [table.columns().row(at) for at in range(table.rows)]
        elif file.suffix == ".journal":
            found += read(file.read_bytes()).rows
    return found


def tensors(path) -> dict[str, list]:
    with safe_open(path, "np") as file:
        return {k: file.get_tensor(k).tolist() for k in sorted(file.keys()) if k.isdecimal()}


def test_segments_are_sealed_by_number_of_tensors(tmp_path):
    to = appender(tmp_path, tensors=2)
    for n in range(5):
        add(to, n)
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors", "segment-00002.partial"]
    assert [p.name for p in tmp_path.glob("*.journal")] == ["segment-00002.journal"]
    to.close()
    assert segments(tmp_path)[-1] == "segment-00002.safetensors"
    assert list(tmp_path.glob("*.journal")) == []
    assert tensors(tmp_path / "segment-00001.safetensors") == {"00000002": [2] * 4, "00000003": [3] * 4}


def test_a_segment_is_sealed_at_512_tensors(tmp_path):
    assert Limits() == (256 << 20, 512, 16_384, 16 << 20)  # as the README says
    writer = Writer(tmp_path / "run", Manifest())
    for n in range(1025):
        writer.write(Point("a"), Moment(step=n), blob=Blob("int32", (), 4, lambda n=n: np.array([n], np.int32)))
    writer.close()
    assert [len(tensors(path)) for path in sorted(tmp_path.rglob("*.safetensors"))] == [512, 512, 1]


def test_segments_are_sealed_by_size(tmp_path):
    to = appender(tmp_path, nbytes=65536 + 100)
    for n in range(3):
        add(to, n, size=20)
    to.close()
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors"]


def test_segments_are_sealed_when_the_headers_room_is_full(tmp_path):
    to = appender(tmp_path, tensors=10_000)
    for n in range(400):
        to.append([coming(n, np.full((1,) * 60, n, np.float32))])
    to.close()
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors"]
    assert [row.step for row in rows(tmp_path)] == list(range(400))


def test_segments_are_sealed_by_number_of_records_of_any_kind(tmp_path):
    heard = []
    to = Appender(
        tmp_path, rank=0, limits=Limits(records=3), sealed=lambda number, records, size: heard.append((number, records))
    )
    to.append([coming(n, np.ones(2) * n if n < 3 else None) for n in range(8)])
    assert heard == [(0, 3), (1, 3)]
    to.close()
    assert heard == [(0, 3), (1, 3), (2, 2)]
    assert [row.step for row in rows(tmp_path)] == list(range(8))


def test_segments_are_sealed_by_bytes_of_rows(tmp_path):
    to = appender(tmp_path, rows=1000)
    for n in range(30):
        to.append([coming(n, None)])
    assert len(segments(tmp_path)) >= 2
    to.close()


def test_a_record_without_a_tensor_makes_no_partial(tmp_path):
    to = appender(tmp_path)
    to.append([coming(0, None)])
    assert [p.name for p in tmp_path.iterdir()] == ["segment-00000.journal"]
    to.close()
    assert [r.point for r in rows(tmp_path)] == ["a:output"]


def test_nothing_leaves_nothing(tmp_path):
    to = appender(tmp_path)
    to.append([])
    to.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_is_seen_twice_is_stored_once_and_read_twice(tmp_path):
    to = appender(tmp_path)
    one, two = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32) + 1
    to.append([coming(0, one, "a:output"), coming(0, one, "b:input"), coming(0, two, "b:output")])
    to.append([coming(1, one, "c:input"), coming(1, one.reshape(2, 3)), coming(1, one.view(np.int32), "d:output")])
    empty = np.zeros((0, 3), np.float32)
    to.append([coming(2, empty), coming(2, empty, "b:output"), coming(2, np.zeros(0, np.float32), "c:output")])
    assert (tmp_path / "segment-00000.partial").stat().st_size == 65536 + 4 * 24
    to.close()
    assert [row.bytes_of for row in rows(tmp_path)] == [0, 0, 2, 0, 4, 5, 6, 6, 8]
    assert [row.record for row in rows(tmp_path)] == list(range(9))
    assert len(tensors(tmp_path / "segment-00000.safetensors")) == 6


def test_bytes_with_the_same_checksum_are_compared_and_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr("layerscope.store.appender.crc32c", lambda data: 7)
    to = appender(tmp_path)
    to.append([coming(0, np.zeros(3)), coming(1, np.ones(3))])
    to.append([coming(2, np.ones(3) * 2), coming(3, np.zeros(3))])
    to.close()
    assert [row.bytes_of for row in rows(tmp_path)][:3] == [0, 1, 2]
    assert {v[0] for v in tensors(tmp_path / "segment-00000.safetensors").values()} == {0, 1, 2}


def test_a_record_that_cannot_be_written_down_leaves_no_bytes_behind(tmp_path):
    to = appender(tmp_path)
    add(to, 1)
    with pytest.raises(ValueError, match="64 bits"):
        to.append([coming(2**80, np.zeros(4, np.float32))])
    with pytest.raises(ValueError, match="30000 axes does not fit"):
        to.append([coming(1, np.zeros(1))._replace(row=TableRow(
            0, "a:output", None, 1, 1, 0, 0, True, "float64", (1,) * 30_000))])  # fmt: skip
    add(to, 2)
    to.close()
    assert [r.record for r in rows(tmp_path)] == [0, 1]
    found = {k: v for path in tmp_path.glob("*.safetensors") for k, v in tensors(path).items()}
    assert found == {"00000000": [1] * 4, "00000001": [2] * 4}


def test_a_shape_that_fits_no_header_is_refused_in_an_empty_segment_too(tmp_path):
    to = appender(tmp_path)
    huge = coming(1, np.zeros(1))
    huge = huge._replace(row=huge.row._replace(shape=(1,) * 30_000))
    for _ in range(2):
        with pytest.raises(ValueError, match="does not fit the header"):
            to.append([huge])
    add(to, 1)
    to.close()
    assert len(rows(tmp_path)) == 1


def full(fd, data, offset):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_when_the_disk_refuses_the_next_record_begins_a_new_segment(tmp_path, monkeypatch):
    to = appender(tmp_path)
    add(to, 1)
    real = os.pwrite

    def some(fd, data, offset):
        if len(data) == 16:
            real(fd, bytes(data)[:7], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", some)
        with pytest.raises(OSError, match="No space"):
            add(to, 2)
    # The first one stays as a pair, cut back to its last record.
    assert (tmp_path / "segment-00000.partial").stat().st_size == 65536 + 16
    add(to, 3)
    to.close()
    assert [(row.record, row.step) for row in rows(tmp_path)] == [(0, 0), (1, 1)]
    assert segments(tmp_path) == ["segment-00000.safetensors", "segment-00001.safetensors"]


def test_a_large_tensor_that_was_refused_is_refused_again_and_does_not_hang(tmp_path, monkeypatch):
    to = appender(tmp_path, nbytes=1000)
    with monkeypatch.context() as patch:
        real = os.pwrite
        patch.setattr(os, "pwrite", lambda fd, data, at: full(fd, data, at) if at >= 65536 else real(fd, data, at))
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                add(to, 1, size=5000)
    to.close()
    assert list(tmp_path.iterdir()) == []  # a partial without records would be damage


def test_a_disk_that_takes_nothing_at_all_is_said_and_does_not_hang(tmp_path, monkeypatch):
    to = appender(tmp_path, records=2)
    with monkeypatch.context() as patch:
        real_open, real = os.open, os.pwrite

        def refuse(path, flags, *mode):
            if flags & os.O_CREAT and "00000" not in str(path).rpartition("/")[2]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real_open(path, flags, *mode)

        patch.setattr(os, "open", refuse)
        add(to, 0)
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        add(to, 1)  # cannot be sealed, and there is no other segment to go on with
        with pytest.raises(OSError, match="No space"):
            add(to, 2)
        patch.setattr(os, "pwrite", real)
    to.close()
    assert [row.step for row in rows(tmp_path)] == [0, 1]


def test_several_pairs_may_stand_and_are_sealed_when_there_is_room(tmp_path, monkeypatch):
    failed = []
    to = Appender(tmp_path, rank=0, limits=Limits(tensors=1), failed=lambda number, error, gone: failed.append(number))
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left")))
        for n in range(3):
            add(to, n)
    assert set(failed) == {0, 1, 2}
    assert len(list(tmp_path.glob("*.partial"))) == 3
    assert [row.step for row in rows(tmp_path)] == [0, 1, 2]
    to.close()  # with nothing new to seal
    assert segments(tmp_path) == [f"segment-0000{n}.safetensors" for n in range(3)]
    assert [row.step for row in rows(tmp_path)] == [0, 1, 2]


def test_a_file_that_could_not_be_synced_is_never_synced_again(tmp_path, monkeypatch):
    to = appender(tmp_path, tensors=1)
    synced = []

    def refuse(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        if synced[-1].endswith("00000.partial"):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    for n in range(3):
        add(to, n)
    to.close()
    assert sum(path.endswith("00000.partial") for path in synced) == 1
    assert segments(tmp_path) == ["segment-00000.partial", *(f"segment-0000{n}.safetensors" for n in (1, 2))]
    assert [row.step for row in read((tmp_path / "segment-00000.journal").read_bytes()).rows] == [0]


def test_losses_go_to_the_journal_and_then_to_the_table(tmp_path):
    to = appender(tmp_path)
    to.lose(Dropped("x:output", 1, "why", "step=1"))
    to.lose(Dropped("x:output", 2, "why", "step=1"))
    assert read((tmp_path / "segment-00000.journal").read_bytes()).losses == [Dropped("x:output", 2, "why", "step=1")]
    to.close()
    assert Sealed(LocalFolder(tmp_path), "segment-00000.safetensors").losses == [
        Dropped("x:output", 2, "why", "step=1")
    ]


@pytest.mark.parametrize(("error", "stays"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_journal_goes_only_once_the_name_of_the_sealed_file_is_safe(tmp_path, monkeypatch, error, stays):
    real = os.fsync

    def refuse(fd):
        if Path(f"/proc/self/fd/{fd}").readlink() == tmp_path:
            raise OSError(error, os.strerror(error))
        real(fd)

    to = appender(tmp_path)
    add(to, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        to.close()
    assert (tmp_path / "segment-00000.journal").exists() is stays
    assert (tmp_path / "segment-00000.safetensors").exists()
