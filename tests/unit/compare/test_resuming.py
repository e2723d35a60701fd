"""An interrupted comparison goes on where it stopped, and never with what belongs to other runs."""

from __future__ import annotations

import contextlib
import errno
import io
import os

import pytest
import torch

from layerscope.compare import comparing, jobs, resuming
from layerscope.compare.comparing import compare
from layerscope.compare.measure import measure
from layerscope.compare.resuming import Memory, place, stamp
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, MemoryRun, Writer, convert, open_run, strictjson
from layerscope.store.checksum import crc32c, text

PAIRS = 12
X = torch.randn(PAIRS, 4, 8, generator=torch.Generator().manual_seed(5))
METRICS = measure(X[0], X[0] * 1.5)


def write(folder, values, name="layers.{}"):
    writer = Writer(folder, Manifest())
    for number, value in enumerate(values):
        array = value.contiguous().numpy()
        blob = Blob("float32", array.shape, array.nbytes, lambda array=array: array)
        writer.write(Point(name.format(number)), Moment(), blob=blob)
    writer.close()
    return str(folder)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs on disk, and a cache folder of their own."""
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "cache"))
    changed = X.clone()
    changed[7] *= 1.5
    return write(tmp_path / "one", X), write(tmp_path / "other", changed)


@pytest.fixture
def counted(monkeypatch):
    """Count what is measured from here on."""
    counts = []

    def counting(*sides, **options):
        counts.append(sides)
        return measure(*sides, **options)

    monkeypatch.setattr(jobs, "measure", counting)
    return counts


def interrupted(runs, *, after=5, **options):
    def stop(what, done, total):
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*runs, resume=True, tell=stop, **options)


def kept(tmp_path):
    return sorted((tmp_path / "cache").glob("*.compare"))


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_comparison_goes_on_and_leaves_nothing_behind(runs, tmp_path, counted, threads):
    whole = compare(*runs)
    counted.clear()
    interrupted(runs, threads=threads)
    assert len(kept(tmp_path)) == 1
    counted.clear()
    seen = []
    resumed = compare(*runs, resume=True, threads=threads, tell=lambda *told: seen.append(told))
    assert len(counted) == PAIRS - 5
    assert [done for _, done, _ in seen] == list(range(6, PAIRS + 1))
    assert {total for *_, total in seen} == {PAIRS}
    assert resumed.rows == whole.rows
    assert resumed.verdict == whole.verdict
    assert "5 pairs were measured before the interruption" in resumed.candidates[0].notes
    assert kept(tmp_path) == []


def test_interrupted_twice_it_still_goes_on(runs, tmp_path, counted):
    interrupted(runs, after=3, threads=1)
    interrupted(runs, after=8, threads=1)
    counted.clear()
    assert compare(*runs, resume=True, threads=1).rows == compare(*runs).rows
    assert len(counted) == PAIRS - 8 + PAIRS  # the second is the whole one it is compared with
    assert kept(tmp_path) == []


def test_without_resume_nothing_is_kept_and_nothing_used(runs, tmp_path, counted):
    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(*runs, tell=stop, threads=1)
    assert kept(tmp_path) == []
    interrupted(runs, threads=1)
    counted.clear()
    found = compare(*runs)
    assert len(counted) == PAIRS
    assert not any("interruption" in note for note in found.candidates[0].notes)


def test_a_run_that_has_changed_since_is_measured_anew(runs, tmp_path, counted):
    interrupted(runs, threads=1)
    [file] = (tmp_path / "other").rglob("*.safetensors")
    os.utime(file, ns=(1, 1))
    counted.clear()
    compare(*runs, resume=True)
    assert len(counted) == PAIRS


def test_a_record_that_was_added_since_is_measured_anew(runs, tmp_path, counted):
    interrupted(runs, threads=1)
    writer = Writer(tmp_path / "other", Manifest(), append=True)
    array = X[0].contiguous().numpy()
    writer.write(Point("late"), Moment(step=1, batch=1), blob=Blob("float32", array.shape, array.nbytes, lambda: array))
    writer.close()
    counted.clear()
    compare(*runs, resume=True)
    assert len(counted) == PAIRS


def test_other_candidates_of_the_same_reference_are_another_comparison(runs, tmp_path, counted):
    interrupted(runs, threads=1)
    third = write(tmp_path / "third", X * 2)
    counted.clear()
    compare(runs[0], third, resume=True)
    assert len(counted) == PAIRS


def test_another_mode_of_one_folder_as_the_reference_is_another_comparison(tmp_path, monkeypatch, counted):
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "cache"))
    for mode, factor in (("fp32", 1.0), ("bf16", 3.0), ("2-1", 2.0)):
        source = write(tmp_path / mode, X * factor)
        convert(source, tmp_path / "dumps", layout="quamba", mode=mode)
    one, other, candidate = (f"{tmp_path / 'dumps'}:{mode}" for mode in ("fp32", "bf16", "2-1"))
    interrupted((one, candidate), threads=1)
    resumed = compare(other, candidate, resume=True)
    # 2 against 3: a third is gone; 2 against 1 would be an error of 1.
    assert resumed.rows[0].metrics.relative_l2 == pytest.approx(1 / 3, rel=1e-6)


def test_the_noise_runs_are_part_of_what_is_remembered(runs, tmp_path, counted):
    noise = write(tmp_path / "noise", X * (1 + 2.0**-20))
    interrupted(runs, after=PAIRS + 3, threads=1, noise=noise)
    counted.clear()
    found = compare(*runs, noise=noise, resume=True, threads=1)
    assert len(counted) == PAIRS - 3
    assert found.rows == compare(*runs, noise=noise).rows


def test_runs_in_memory_are_compared_and_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/file").write_text("a folder that happens to be called like a run in memory")
    made = []
    for factor in (1, 2, 3):
        run = MemoryRun()
        for number in range(PAIRS):
            run.add(Point(f"layers.{number}"), Moment(), tensor=X[number] * factor)
        made.append(run)
    assert stamp(made) is None
    interrupted(made[:2], threads=1)
    assert kept(tmp_path) == []
    found = compare(made[0], made[2], resume=True)
    assert found.rows[0].metrics.scale == pytest.approx(3.0)


# The file ---------------------------------------------------------------------------------------


def filled(path, pairs=("one", "two", "three")):
    with contextlib.suppress(KeyboardInterrupt), Memory(path) as memory:
        for pair in pairs:
            memory.keep(pair, METRICS)
        raise KeyboardInterrupt
    return path


def known(path, pairs=("one", "two", "three")):
    with contextlib.suppress(KeyboardInterrupt), Memory(path) as memory:
        found = [pair for pair in pairs if memory.known(pair) == METRICS]
        assert memory.resumed == len(found)
        raise KeyboardInterrupt
    return found


def test_what_was_kept_is_known_again(tmp_path):
    assert known(filled(tmp_path / "m")) == ["one", "two", "three"]
    assert known(tmp_path / "m", ["four"]) == []


def test_what_is_measured_is_written_before_the_end_so_that_a_kill_does_not_cost_it(tmp_path, monkeypatch):
    with Memory(tmp_path / "m") as memory:
        memory.keep("one", METRICS)
        assert not (tmp_path / "m").exists()
        monkeypatch.setattr(resuming, "_EVERY", -1.0)
        memory.keep("two", METRICS)
        assert known(tmp_path / "m") == ["one", "two"]


def test_a_file_of_the_user_s_is_nobody_else_s_to_read(tmp_path):
    assert filled(tmp_path / "m").stat().st_mode & 0o077 == 0


def test_the_end_of_the_work_removes_the_file(tmp_path):
    path = filled(tmp_path / "m")
    with Memory(path) as memory:
        assert memory.known("one") == METRICS
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_torn_last_line_costs_that_pair_alone(tmp_path, cut):
    path = filled(tmp_path / "m")
    raw = path.read_bytes().rstrip(b"\n")
    path.write_bytes(raw[:-cut])
    assert known(path) == ["one", "two"]
    filled(path, ["four"])  # behind the torn line
    assert known(path, ["one", "two", "three", "four"]) == ["one", "two", "four"]


def test_a_flipped_bit_costs_that_pair_alone(tmp_path):
    path = filled(tmp_path / "m")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"two") + 200] ^= 1
    path.write_bytes(bytes(raw))
    assert known(path) == ["one", "three"]


def line(value):
    data = strictjson.dumps(value).encode()
    return text(crc32c(data)).encode() + b" " + data


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe\x00",
        b"no checksum",
        b"00000000 {}",
        line({}),
        line([1, 2]),
        line(None),
        line({"pair": "two", "metrics": {"mse": 1.0}}),
        line({"pair": "two", "metrics": METRICS.to_json() | {"nonfinite": {"other": 1, "first": None}}}),
        text(crc32c(b"not json")).encode() + b" not json",
    ],
)
def test_lines_of_another_making_are_passed_over(tmp_path, garbage):
    path = filled(tmp_path / "m", ["one"])
    path.write_bytes(path.read_bytes() + garbage + b"\n")
    filled(path, ["three"])
    assert known(path) == ["one", "three"]


def test_a_folder_that_cannot_be_written_costs_the_resuming_and_not_the_comparison(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "place", lambda folder, stamped: tmp_path / "nowhere" / "file")
    interrupted(runs, threads=1)
    found = compare(*runs, resume=True)
    assert len(found.rows) == PAIRS
    assert not any("interruption" in note for note in found.candidates[0].notes)


def test_a_cache_that_is_no_folder_costs_the_resuming_and_not_the_comparison(runs, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "file"))
    interrupted(runs, threads=1)
    assert len(compare(*runs, resume=True).rows) == PAIRS


class Full(io.BytesIO):
    """A file on a disk that is full."""

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("every", [1e9, -1.0], ids=["at the end", "in the middle"])
def test_a_full_disk_costs_the_resuming_and_not_the_comparison(tmp_path, monkeypatch, every):
    monkeypatch.setattr(resuming, "_EVERY", every)
    file = Full()

    def opened(fd, mode):
        os.close(fd)
        return file

    monkeypatch.setattr(resuming.os, "fdopen", opened)
    filled(tmp_path / "m")
    assert file.closed
    assert known(tmp_path / "m") == []


def test_a_stamp_is_the_same_as_long_as_the_files_are(runs):
    one, other = map(open_run, runs)
    assert stamp([one, other]) == stamp([open_run(runs[0]), other])
    assert stamp([one, other]) != stamp([other, one])
    assert stamp([one]) != stamp([one, other])


def test_a_file_is_named_after_its_stamp(tmp_path):
    assert place(tmp_path, "ab" * 32) == tmp_path / f"{'ab' * 16}.compare"
