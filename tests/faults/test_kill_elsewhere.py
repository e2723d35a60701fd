"""A writer to an S3 server, killed at each request and each call of a merge: what was flushed is there, or kept."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from faults.calls import Calls, in_child, kill_at, nothing
from layerscope.errors import NotARun
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run, recover

STEPS = 7

RECORDING = """
import sys, tempfile
import numpy as np
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, remote
address, tempfile.tempdir = sys.argv[1:]
remote.TOGETHER = 3  # so that it merges on its way
writer = Writer(address, Manifest())
for k in range(7):
    x = np.full(3, k, np.int32)
    writer.write(Point("a"), Moment(step=k), blob=Blob("int32", (3,), 12, lambda x=x: x))
    writer.flush()
    print(k, flush=True)
writer.close()
"""

RECOVERING = """
import sys
from layerscope.store import recover
recover(sys.argv[2], to=sys.argv[1])
"""


def run_until(s3, script: str, *args: object, at: int | None, when: str = "before") -> tuple[list[str], int]:
    """Run a script, killed at its n-th request; return the lines that it printed, and how many requests it made."""
    arguments = [sys.executable, "-c", script, *map(str, args)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    seen = 0

    def hears(now: str, request: str) -> None:
        nonlocal seen
        seen += now == "before"
        if seen - 1 == at and now == when:
            child.kill()
            child.wait()
            if when == "before":
                raise ConnectionError("the client is gone")

    s3.hears = hears
    try:
        out, _ = child.communicate(timeout=120)
    finally:
        s3.hears = lambda when, request: None
        child.kill()
    return out.split(), seen


def values(address: str) -> dict[int, int]:
    run = open_run(address)
    assert run.damaged == []
    return {entry.moment.step: int(entry.tensor()[0]) for entry in run.records()}


def check_recording(s3, spools: Path, at: int, when: str) -> None:
    said, _ = run_until(s3, RECORDING, s3.address, spools, at=at, when=when)
    acknowledged = {int(k): int(k) for k in said}
    try:
        found = values(s3.address)
    except NotARun:
        found = {}
    assert found.items() >= acknowledged.items()
    for spool in spools.iterdir():
        if any(spool.rglob("claim")):  # else it was killed before it claimed anything, and recorded nothing
            assert recover(spool, to=s3.address).lost == []
            after = values(s3.address)
            assert after.items() >= found.items()
            assert after == {k: k for k in range(len(after))}
            assert len(after) - len(acknowledged) in (0, 1)
            assert not spool.exists()


QUICK = [(0, "after"), (2, "after"), (5, "after"), (10, "before"), (12, "after"), (18, "before")]
LONG = [(at, when) for at in range(40) for when in ("before", "after") if (at, when) not in QUICK]
long_form = [pytest.param(*each, marks=pytest.mark.stress) for each in LONG]


@pytest.fixture
def spools(tmp_path):
    (tmp_path / "spools").mkdir()
    return tmp_path / "spools"


def test_a_recording_that_nobody_kills(s3, spools):
    said, requests = run_until(s3, RECORDING, s3.address, spools, at=None)
    assert said == [str(k) for k in range(STEPS)]
    assert 20 < requests < 40  # what `LONG` goes through
    assert values(s3.address) == {k: k for k in range(STEPS)}
    assert open_run(s3.address).complete
    assert list(spools.iterdir()) == []


@pytest.mark.parametrize(("at", "when"), [*QUICK, *long_form])
def test_what_was_flushed_is_there_and_the_rest_is_kept(s3, spools, at, when):
    check_recording(s3, spools, at, when)
    assert s3.asked


@pytest.mark.parametrize(
    ("at", "when"),
    [
        (5, "after"),
        *(pytest.param(at, when, marks=pytest.mark.stress) for at in range(12) for when in ("before", "after")),
    ],
)
def test_a_recovery_that_is_killed_is_done_again(s3, spools, at, when):
    run_until(s3, RECORDING, s3.address, spools, at=16, when="before")
    (spool,) = spools.iterdir()
    run_until(s3, RECOVERING, s3.address, spool, at=at, when=when)
    if spool.exists():
        recover(spool, to=s3.address)
    found = values(s3.address)
    assert found == {k: k for k in range(len(found))}
    assert len(found) >= 3
    assert open_run(s3.address).state == "recovered"
    assert not spool.exists()


def close_in_child(address: str, spools: Path, act) -> tuple[int, list[int]]:
    """Flush three small segments, then close, which merges them; `act` does each system call of that."""

    def closed(say) -> None:
        tempfile.tempdir = str(spools)
        writer = Writer(address, Manifest())
        for k in range(3):
            x = np.full(3, k, np.int32)
            writer.write(Point("a"), Moment(step=k), blob=Blob("int32", (3,), 12, lambda x=x: x))
            writer.flush()
        with Calls(act) as calls:
            writer.close()
        say(calls.count)
        say("pwrite" in calls.made)

    return in_child(closed)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("each", [9, pytest.param(1, marks=pytest.mark.stress)])
def test_a_kill_at_any_call_of_a_merge_loses_nothing(s3, tmp_path, each):
    (tmp_path / "whole").mkdir()
    ended, (calls, merged) = close_in_child(f"{s3.address}-whole", tmp_path / "whole", nothing)
    assert (ended, merged) == (0, True)
    assert calls > 10
    for at in range(1, calls + 1, each):
        spools, address = tmp_path / f"spools{at}", f"{s3.address}-{at}"
        spools.mkdir()
        assert close_in_child(address, spools, kill_at(at))[0] == -9
        assert values(address) == {0: 0, 1: 1, 2: 2}
        for spool in spools.iterdir():
            if any(spool.rglob("claim")):  # else it was being removed
                recover(spool, to=address)
        assert values(address) == {0: 0, 1: 1, 2: 2}


def test_a_process_that_ends_without_closing_has_put_everything(s3, spools):
    script = RECORDING.replace("writer.flush()\n    print(k, flush=True)\nwriter.close()", "")
    assert "close" not in script
    run_until(s3, script, s3.address, spools, at=None)
    assert values(s3.address) == {k: k for k in range(STEPS)}
    assert open_run(s3.address).state == "interrupted"
    assert list(spools.iterdir()) == []
