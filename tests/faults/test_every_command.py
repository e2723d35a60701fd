"""An I/O error at the N-th system call of every command that writes: one sentence, nothing lost, nothing half done.

Files that Python opens itself go through the same calls here: `_pyio` reads and writes with `os`.
"""

from __future__ import annotations

import _pyio
import builtins
import contextlib
import errno
import gc
import io
import os
import shutil

import pytest
import torch
from torch import nn

import layerscope as ls
from asserts import left_open
from cli import conftest
from faults.calls import CHANGING, READING, Calls, fail_at, nothing

NAMES = (*CHANGING, *READING, "read", "pread", "stat", "scandir")
STEPS = 3
cli = conftest.cli


@pytest.fixture(autouse=True)
def _streams(monkeypatch):
    """The first calls of the command line are for its standard streams, which are the test's here."""
    monkeypatch.setattr("layerscope.cli._keep_standard_streams", lambda: None)


@contextlib.contextmanager
def calls(act):
    """Count calls of `os`, those that Python's own files make included."""
    real = io.open
    io.open = builtins.open = _pyio.open
    try:
        with Calls(act, NAMES) as counted:
            yield counted
    finally:
        io.open = builtins.open = real


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def batches():
    return [torch.full((2, 4), float(step + 1)) for step in range(STEPS)]


def recorded(path):
    """Record on disk; return the outputs of the model, and the recording where it could begin."""
    watched, recording = model(), None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            recording = stack.enter_context(ls.record(watched, "**", to=path))
        return [watched(x) for x in batches()], recording


@pytest.fixture(scope="module")
def plain():
    """Everything that a recording of the model may hold."""
    watched, found = model(), {}
    with ls.record(watched, "**") as rec:
        outputs = [watched(x) for x in batches()]
    for entry in rec.run.records():
        found[str(entry.point), entry.moment.step] = entry.tensor().clone()
    return outputs, found


@pytest.fixture(scope="module")
def things(tmp_path_factory, plain):
    """A whole run, one as a kill leaves it, and what the commands made of them before."""
    place = tmp_path_factory.mktemp("things")
    recorded(place / "run")
    watched = model()
    with ls.record(watched, "**", to=place / "live") as rec:
        for x in batches():
            watched(x)
        rec.flush()
        shutil.copytree(place / "live", place / "killed")
    shutil.rmtree(place / "live")
    return place


def assert_right(path, found):
    """Check that what can be read is right; return how many records there are."""
    run = ls.open_run(path)
    for entry in run.records():
        assert torch.equal(entry.tensor(), found[str(entry.point), entry.moment.step])
    assert run.damaged == []
    return len(run)


def every(count, long):
    """Every call in `make stress`; else so many of them, spread out."""
    return range(1, count + 1) if long else sorted({1 + n * count // 12 for n in range(12)})


SHORT_AND_LONG = pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.stress)])
ERRORS = [(errno.EIO, False), (errno.ENOSPC, True)]


@SHORT_AND_LONG
@pytest.mark.parametrize("lasting", [False, True])
def test_record(long, lasting, tmp_path, plain, caplog):
    outputs, found = plain
    with calls(nothing) as counted:
        recorded(tmp_path / "whole")
    assert assert_right(tmp_path / "whole", found) == len(found)
    for error, half in ERRORS:
        for at in every(counted.count, long):
            path = tmp_path / f"{error}-{at}"
            caplog.clear()
            with calls(fail_at(at, error, lasting=lasting, half=half)):
                seen, rec = recorded(path)
            assert all(map(torch.equal, seen, outputs))
            if rec is None:
                continue
            done = rec.completeness
            assert done.records + sum(each.count for each in done.dropped) == len(found)
            with contextlib.suppress(ls.errors.NotARun):
                assert assert_right(path, found) == done.records
            if done.dropped:
                assert caplog.records
            shutil.rmtree(path)


MORE = {
    "layerscope": [],
    "quamba": ["--mode", "0", "--step", "0"],
    "first-layer": ["--mode", "0", "--step", "0"],
    "neuron": ["--step", "0"],
    "monitor": [],
}


@SHORT_AND_LONG
@pytest.mark.parametrize("layout", MORE)
def test_convert(long, layout, tmp_path, things, cli):
    words = ["convert", things / "run", "out", "--to", layout, "--overwrite", *MORE[layout]]
    check_command(words, "out", tmp_path, cli, long)


@SHORT_AND_LONG
def test_report(long, tmp_path, things, cli):
    check_command(["report", things / "run", "-o", "out.html"], "out.html", tmp_path, cli, long)


def check_command(words, name, tmp_path, cli, long):
    """Run it with an error at one call: what was there before is there, or what was asked for, and it is said which."""
    target = tmp_path / name
    assert cli(*words).code == 0
    whole = held(target)
    with calls(nothing) as counted:
        assert cli(*words).code == 0
    failed, since = 0, left_open()
    for error, half in ERRORS:
        for at in every(counted.count, long):
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            with calls(fail_at(at, error, half=half)):
                answer = cli(*words)
            failed += answer.code != 0
            if answer.code == 0:
                assert held(target) == whole
            else:
                assert answer.err.count("\n") == 1, answer.err
                assert "unexpected" not in answer.err
            assert cli(*words).code == 0
            assert held(target) == whole
            assert {each.name for each in tmp_path.iterdir()} == {name}
            before = contents(target)
            with calls(fail_at(at, error, half=half)):
                answer = cli(*words)
            if answer.code:
                assert contents(target) == before
            assert {each.name for each in tmp_path.iterdir()} <= {name, f"{name}.replaced"}  # until the next time
    assert failed > 0
    gc.collect()
    assert since()[0] == []  # no writer's thread


def held(path):
    """What a target comes to: every tensor of a run or dump, and nothing half done."""
    if path.is_file():
        return path.read_bytes()
    assert not list(path.rglob("*.partial"))  # a journal may stay beside what is sealed
    run = ls.open_run(path)
    assert run.damaged == []
    return {(str(entry.point), entry.moment): entry.tensor().tolist() for entry in run.records()}


def contents(path):
    """Every file, by name."""
    if not path.is_dir():
        return {path.name: path.read_bytes()}
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@SHORT_AND_LONG
def test_recover(long, tmp_path, plain, things, cli):
    _, found = plain
    shutil.copytree(things / "killed", tmp_path / "whole")
    with calls(nothing) as counted:
        assert cli("recover", "whole").code == 0
    for error, half in ERRORS:
        for at in every(counted.count, long):
            path = tmp_path / "run"
            shutil.copytree(things / "killed", path)
            with calls(fail_at(at, error, half=half)):
                answer = cli("recover", "run")
            assert answer.code in (0, 2)
            assert "unexpected" not in answer.err
            assert assert_right(path, found) == len(found)
            assert cli("recover", "run").code == 0
            assert assert_right(path, found) == len(found)
            assert ls.open_run(path).state == "recovered"
            shutil.rmtree(path)


@pytest.mark.parametrize("lacking", [["replace", "rename"], ["ftruncate"], ["posix_fallocate"], ["link"], ["preadv"]])
def test_a_file_system_that_lacks_a_call_costs_no_record(lacking, tmp_path, plain):
    """Mounts of buckets and of other systems know no rename, no truncation, no blocks kept back."""
    outputs, found = plain

    def refused(number, name, work, args, kwargs):
        if name in lacking:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return work(*args, **kwargs)

    with calls(refused):
        seen, rec = recorded(tmp_path / "run")
    assert all(map(torch.equal, seen, outputs))
    if rec is None:
        assert lacking[0] in ("replace",)
        return
    assert rec.completeness.dropped == []
    assert assert_right(tmp_path / "run", found) == len(found)
    ls.recover(tmp_path / "run")
    assert assert_right(tmp_path / "run", found) == len(found)
