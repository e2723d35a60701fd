"""An I/O error at the N-th system call, for N = 1, 2, ... until there is no N-th: nothing raises, nothing is wrong."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile

import numpy as np
import pytest
from safetensors import safe_open

from faults.calls import CHANGING, READING, Calls, fail_at, nothing, short_at
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run, recover

RECORDS = 7


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
    assert run.damaged == []
    assert run.replaced == 0
    for segment in path.rglob("*.safetensors"):
        with safe_open(segment, "np") as file:
            assert {int(k) for k in file.keys() if k.isdecimal()} <= set(range(RECORDS))  # noqa: SIM118


def check(path, act, *, lasting: bool = False) -> Calls:
    """Record with something at one call, check what is left, and return the calls that were made."""
    with Calls(act) as calls:
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
        assert not [p for p in path.rglob("segment*") if p.suffix in (".partial", ".journal")]
    shutil.rmtree(path, ignore_errors=True)
    return calls


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(("error", "half"), [(errno.EIO, False), (errno.ENOSPC, True), (errno.EINTR, False)])
def test_an_error_at_any_call_loses_no_more_than_it_says(tmp_path, error, half, lasting):
    calls = check(tmp_path / "whole", nothing).count
    assert calls > 40
    for at in range(1, calls + 1):
        check(tmp_path / f"run{at}", fail_at(at, error, lasting=lasting, half=half), lasting=lasting)


def test_a_short_write_at_any_call_loses_nothing(tmp_path):
    writes = [n for n, name in enumerate(check(tmp_path / "whole", nothing).made, 1) if "write" in name]
    assert len(writes) > 20
    for at in writes:
        path = tmp_path / f"run{at}"
        with Calls(short_at(at)):
            done = record(path).close(forwards=RECORDS)
        assert (done.records, done.dropped) == (RECORDS, [])
        assert_nothing_wrong(path, done)


def test_without_an_error_nothing_is_lost(tmp_path):
    done = record(tmp_path / "run").close()
    assert (done.records, done.dropped) == (RECORDS, [])


@pytest.mark.parametrize(
    ("error", "half"), [(errno.EIO, True), (errno.EIO, False), (errno.ENOSPC, True), (errno.EINTR, False)]
)
def test_an_error_while_recovering_leaves_it_to_be_done_again(tmp_path, error, half):
    killed, done = killed_run(tmp_path)
    calls = recovered(killed, done, nothing).count
    assert calls > 20
    for at in range(1, calls + 1):
        recovered(killed, done, fail_at(at, error, half=half))


def test_a_short_write_while_recovering_loses_nothing(tmp_path):
    killed, done = killed_run(tmp_path)
    writes = [n for n, name in enumerate(recovered(killed, done, nothing).made, 1) if "write" in name]
    assert len(writes) > 2
    for at in writes:
        recovered(killed, done, short_at(at))


FAULTS = {
    "EIO": lambda at: fail_at(at, errno.EIO),
    "EINTR": lambda at: fail_at(at, errno.EINTR),
    "ENOSPC": lambda at: fail_at(at, errno.ENOSPC, half=True),
    "short": short_at,
}


@pytest.mark.parametrize("each", [len(FAULTS) * 2, pytest.param(1, marks=pytest.mark.stress)])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_at_any_call_of_a_merge_elsewhere_loses_nothing(tmp_path, monkeypatch, fault, each):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calls = merged(tmp_path, f"memory://merged/{fault}/{each}/whole", nothing)
    assert len(calls) > 10
    for at in range(1 + [*FAULTS].index(fault) * 2 % each, len(calls) + 1, each):
        merged(tmp_path, f"memory://merged/{fault}/{each}/{at}", FAULTS[fault](at))


def merged(spools, address, act) -> list[str]:
    """Record three small segments, which the end merges, with something at one of its calls; check what is there."""
    writer = Writer(address, Manifest())
    for n in range(3):
        writer.write(Point("a"), Moment(step=n), blob=Blob("int64", (50,), 400, lambda n=n: data(n)))
        writer.flush()
    with Calls(act) as calls:
        done = writer.close(forwards=3)
    assert (done.records, done.dropped) == (3, [])
    for again in (False, True):
        if again:
            for spool in spools.iterdir():
                if any(spool.rglob("claim")):  # else it was being removed
                    assert recover(spool, to=address).lost == []
                else:
                    shutil.rmtree(spool)
        run = open_run(address)
        assert {e.moment.step: e.tensor().tolist() for e in run.records()} == {n: data(n).tolist() for n in range(3)}
        assert run.damaged == []
    assert run.state in ("complete", "recovered", "interrupted")
    assert list(spools.iterdir()) == []
    return calls.made


def killed_run(tmp_path):
    """Return a run as a kill leaves it, and what its writer says of it at its end."""
    writer = record(tmp_path / "live")
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    return tmp_path / "killed", writer.close()


def recovered(killed, done, act) -> Calls:
    """Recover a copy with something at one call, check that nothing is wrong and that a second try ends it."""
    path = killed.with_name("run")
    shutil.copytree(killed, path)
    with Calls(act, (*CHANGING, *READING)) as calls, contextlib.suppress(OSError):
        recover(path)
    assert_nothing_wrong(path, done)
    recover(path)
    assert_nothing_wrong(path, done)
    assert open_run(path).state == "recovered"
    assert not [p for p in path.rglob("*") if p.suffix in (".partial", ".journal", ".damaged")]
    shutil.rmtree(path)
    return calls
