"""An I/O error at the N-th system call, for N = 1, 2, ... until there is no N-th: nothing raises, nothing is wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run, recover

CALLS = ("open", "write", "pwrite", "fsync", "ftruncate", "replace", "fstat", "mkdir", "unlink")
RECORDS = 7


class Failing:
    """Count the system calls, and let one of them fail (or it and all after it)."""

    def __init__(self, monkeypatch, *, at: int, error: int, lasting: bool) -> None:
        self.count = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name), at, error, lasting))

    def _wrapped(self, name, work, at, error, lasting):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == at or (lasting and self.count > at):
                raise OSError(error, os.strerror(error))
            return work(*args, **kwargs)

        return call


def data(n: int) -> np.ndarray:
    return np.arange(n * 100, n * 100 + 50, dtype=np.int64)


def record(path) -> Writer:
    writer = Writer(path, Manifest(), segment_tensors=3)
    for n in range(RECORDS):
        blob = Blob("int64", (50,), 400, lambda n=n: data(n))
        assert writer.write(Point("a"), Moment(step=n), blob=blob)
        writer.flush()
    return writer


def assert_nothing_wrong(path, done) -> None:
    """Check that what the run says of itself adds up, and that every record it has is right."""
    run = open_run(path)
    steps = {e.moment.step for e in run.records()}
    for step in steps:
        assert run.tensor("a", step=step).tolist() == data(step).tolist()
    assert len(steps) == done.records
    assert len(steps) + sum(d.count for d in done.dropped) == RECORDS
    assert all(d.point == "a:output" and d.reason for d in done.dropped)
    for segment in path.rglob("*.safetensors"):
        with safe_open(segment, "np") as file:
            assert {int(k) for k in file.keys()} <= set(range(RECORDS))  # noqa: SIM118


def check_error_at(tmp_path, monkeypatch, *, at: int, error: int, lasting: bool) -> int:
    """Record with an error at call `at`, check what is left, and return how many calls there were."""
    path = tmp_path / f"run{at}"
    with monkeypatch.context() as patch:
        failing = Failing(patch, at=at, error=error, lasting=lasting)
        try:
            writer = record(path)
        except OSError:
            writer = None  # it could not begin, and said so
        else:
            done = writer.close(forwards=RECORDS)
    if writer is None:
        if not lasting:
            assert_nothing_wrong(path, record(path).close())  # and nothing is in the way of another try
    else:
        assert_nothing_wrong(path, done)
        recover(path)
        assert_nothing_wrong(path, done)
        assert not list(path.rglob("segment*.partial"))
    return failing.count


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_loses_no_more_than_it_says(tmp_path, monkeypatch, error, lasting):
    calls = check_error_at(tmp_path, monkeypatch, at=10**9, error=error, lasting=lasting)
    assert calls > 60
    for at in range(1, calls + 1):
        check_error_at(tmp_path, monkeypatch, at=at, error=error, lasting=lasting)


def test_without_an_error_nothing_is_lost(tmp_path):
    done = record(tmp_path / "run").close()
    assert (done.records, done.dropped) == (RECORDS, [])


def test_an_error_while_recovering_leaves_it_to_be_done_again(tmp_path, monkeypatch):
    writer = record(tmp_path / "live")
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "live", killed)
    done = writer.close()
    with (killed / "rank-00000/journal").open("ab") as journal:
        journal.write(b'{"torn')

    def recovered(at: int) -> int:
        path = tmp_path / f"run{at}"
        shutil.copytree(killed, path)
        with monkeypatch.context() as patch:
            failing = Failing(patch, at=at, error=errno.EIO, lasting=False)
            with contextlib.suppress(OSError):
                recover(path)
        assert_nothing_wrong(path, done)
        recover(path)
        assert_nothing_wrong(path, done)
        assert open_run(path).state == "recovered"
        assert not list(path.rglob("*.partial"))
        return failing.count

    calls = recovered(10**9)
    assert calls > 10
    for at in range(1, calls + 1):
        recovered(at)
