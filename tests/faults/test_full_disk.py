"""A disk that is full, on a real small tmpfs: the run goes on, what was there is readable, the loss is counted."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import numpy as np
import pytest
from safetensors import safe_open

from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run, recover

SIZE = 300_000


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def data(n: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8)


def write(writer: Writer, n: int, size: int = SIZE) -> bool:
    return writer.write(
        Point("a"), Moment(step=n), blob=Blob("uint8", (size,), size, lambda: data(n, size)), note={"n": n}
    )


def assert_all_right(path, *, size: int = SIZE) -> list[int]:
    """Check every record that can be read, and every sealed segment, and return which records there are."""
    run = open_run(path)
    steps = [e.moment.step for e in run.records()]
    for step in steps:
        assert run.tensor("a", step=step).numpy().tobytes() == data(step, size).tobytes()
    for segment in path.rglob("*.safetensors"):
        with safe_open(segment, "np") as file:
            assert len(file.keys()) > 0
            for key in file.keys():  # noqa: SIM118
                assert not key.isdecimal() or file.get_tensor(key).size == size
    return steps


def test_a_full_disk_stops_nothing_and_recording_goes_on_when_space_returns(small_disk, caplog):
    path = small_disk / "run"
    writer = Writer(path, Manifest())
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    for n in range(20):
        assert write(writer, n)
    writer.flush()
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    kept = assert_all_right(path)
    assert kept == list(range(len(kept)))
    assert 4 <= len(kept) <= 8
    # The pair stays as it is: its journal has room for the account of what was lost, its table would need more.
    assert [p.name for p in sorted(path.rglob("segment-00000*"))] == ["segment-00000.journal", "segment-00000.partial"]
    [lost] = writer.dropped
    assert (lost.count, lost.first) == (20 - len(kept), str(Moment(step=len(kept))))
    assert "No space left on device" in lost.reason
    killed = small_disk.parent / "killed"
    shutil.copytree(path, killed)  # as a kill would leave it now
    assert assert_all_right(killed) == kept
    assert recover(killed).lost == []
    assert assert_all_right(killed) == kept
    assert open_run(killed).dropped == [lost]

    ballast.unlink()
    for n in range(20, 23):
        assert write(writer, n)
    done = writer.close(forwards=23, points=1)
    assert (done.state, done.records, done.dropped) == ("complete", len(kept) + 3, [lost])
    assert assert_all_right(path) == [*kept, 20, 21, 22]
    assert len(list(path.rglob("*.safetensors"))) == 2
    run = open_run(path)
    assert (run.dropped, run.complete, run.damaged) == ([lost], False, [])
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1


def test_without_a_full_disk_nothing_is_lost_or_said(small_disk, caplog):
    writer = Writer(small_disk / "run", Manifest())
    for n in range(8):
        write(writer, n)
    assert writer.close().dropped == []
    assert assert_all_right(small_disk / "run") == list(range(8))
    assert caplog.records == []
    assert open_run(small_disk / "run").complete


def test_small_records_on_a_full_disk_leave_a_journal_without_torn_frames(small_disk):
    path = small_disk / "run"
    writer = Writer(path, Manifest(), segment_tensors=50)
    for n in range(3000):
        write(writer, n, size=1700)
        if n % 100 == 99:
            writer.flush()
    writer.flush()
    assert writer.dropped
    done = writer.close()
    run = open_run(path)
    assert run.damaged == []
    steps = assert_all_right(path, size=1700)
    assert len(steps) + sum(d.count for d in done.dropped) == 3000
    assert done.records == len(steps)


def test_the_account_of_losses_is_whole_after_a_kill_whatever_the_number_of_points(small_disk):
    path = small_disk / "run"
    writer = Writer(path, Manifest())
    assert write(writer, 0, size=1000)
    writer.flush()
    fill(small_disk)
    for n in range(1500):
        big = Blob("uint8", (9000,), 9000, lambda n=n: data(n, 9000))
        writer.write(Point(f"model.layers.{n}.attention.output"), Moment(step=n), blob=big)
        if n % 100 == 99:
            writer.flush()
    writer.flush()
    known = sum(d.count for d in writer.dropped)
    assert known > 1000
    killed = small_disk.parent / "killed"
    shutil.copytree(path, killed)
    (small_disk / "ballast").unlink()
    writer.close()
    kept = len(open_run(killed))
    recover(killed)
    run = open_run(killed)
    assert sum(d.count for d in run.dropped) == known
    assert len(run) == kept == 1501 - known
    assert run.damaged == []


def fill(place) -> None:
    """Leave not a page."""
    with (place / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_run_that_cannot_even_begin_raises_and_leaves_nothing(small_disk):
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        Writer(small_disk / "run", Manifest())
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]


def test_what_a_kill_left_stays_readable_on_a_full_disk_and_is_sealed_when_there_is_room(small_disk):
    writer = Writer(small_disk / "run", Manifest())
    for n in range(3):
        write(writer, n)
    writer.flush()
    killed = small_disk / "killed"
    shutil.copytree(small_disk / "run", killed)
    writer.close()
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):  # a table takes a page that is not there
        recover(killed)
    assert assert_all_right(killed) == [0, 1, 2]
    (small_disk / "ballast").unlink()
    assert recover(killed).lost == []
    assert [p.name for p in killed.rglob("segment*")] == ["segment-00000.safetensors"]
    assert assert_all_right(killed) == [0, 1, 2]
    assert open_run(killed).state == "recovered"
