"""kill -9 before every system call, and in the middle of every write, of a recording, its seals and a `recover`.

Deterministic: the N-th call of a forked child is its last. The oracle is `expected`: what a record must hold follows
from its number, and the child said which numbers were acknowledged.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from faults.calls import Calls, in_child, kill_at, nothing
from layerscope.errors import NotARun
from layerscope.points import Moment, Point
from layerscope.stats import Summary, summarize
from layerscope.store import Blob, Manifest, Writer, open_run, recover

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

RECORDS, CLOSED = 8, 100
SUMMARY = summarize(np.arange(7, dtype=np.float32))


def expected(n: int) -> tuple[np.ndarray | None, Summary | None]:
    """Return what record `n` holds: tensors, one of them twice, one of them empty, a summary alone, and both."""
    tensor = {2: None, 4: np.zeros((0, 3), np.float32), 5: 3}.get(n, n)
    if isinstance(tensor, int):
        tensor = np.arange(tensor * 100, tensor * 100 + 40, dtype=np.float32).reshape(4, 10)
    return tensor, SUMMARY if n in (2, 6) else None


def record(path: Path, say=lambda n: None, *, rank: int = 0, after: int = 0) -> None:
    """Record so many steps, after those that are there already."""
    writer = Writer(path, Manifest(mode="m"), segment_tensors=3, rank=rank, append=after > 0)
    for n in range(after, after + RECORDS):
        tensor, summary = expected(n)
        blob = None if tensor is None else Blob("float32", tensor.shape, tensor.nbytes, lambda t=tensor: t)
        writer.write(Point(f"p{n % 3}"), Moment(step=n, rank=rank), blob=blob, summary=summary, note={"n": n})
        writer.flush()
        if not writer.dropped:
            say(n + 1)
        if n == 3:
            writer.lose(Point("lost"), Moment(step=n), "on purpose")
            writer.flush()
    writer.close(forwards=RECORDS, points=3)
    say(CLOSED)


def assert_right(path: Path, acknowledged: int, *, ranks: int = 1) -> int:
    """Check that what can be read is right and holds what was acknowledged; return how many records there are."""
    try:
        run = open_run(path)
    except NotARun:
        assert acknowledged == 0
        return 0
    steps: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for entry in run.records():
        n = entry.moment.step
        tensor, summary = expected(n)
        assert (str(entry.point), entry.note) == (f"p{n % 3}:output", {"n": n})
        assert entry.summary == summary
        if tensor is None:
            assert entry.dtype is None
        else:
            assert torch.equal(entry.tensor(), torch.from_numpy(tensor))
        steps[entry.moment.rank].append(n)
    for found in steps.values():
        assert found == list(range(len(found)))
        assert len(found) >= acknowledged
    assert run.damaged == []
    return len(run)


def assert_stock_reader_agrees(path: Path) -> None:
    for segment in path.rglob("*.safetensors"):
        with safe_open(segment, "np") as file:
            for key in file.keys():  # noqa: SIM118
                if key.isdecimal():
                    np.testing.assert_array_equal(file.get_tensor(key), expected(int(key))[0])


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def check_recovers(path: Path, said: list[int]) -> None:
    """Check that `recover` keeps what there is, leaves nothing half done, and does nothing the second time."""
    acknowledged = min(max(said, default=0), RECORDS)
    before = assert_right(path, acknowledged)
    if said:
        assert open_run(path).state in (("complete",) if CLOSED in said else ("recording", "complete"))
    assert_stock_reader_agrees(path)
    if not list(path.glob("rank-*")):
        return
    lost = recover(path).lost
    assert [damage for damage in lost if damage.acknowledged] == []
    assert before <= assert_right(path, acknowledged) <= before + 1
    assert_stock_reader_agrees(path)
    assert not [p for p in path.rglob("*") if p.suffix in (".partial", ".journal", ".damaged")]
    settled = contents(path)
    assert recover(path)[:3] == (0, 0, [])
    assert contents(path) == settled


def calls_of(work, *, half: bool) -> list[int]:
    """Return the numbers of the calls that `work` makes; with `half` of those that write."""
    with Calls(nothing) as calls:
        work()
    assert calls.count > 40
    return [n for n, name in enumerate(calls.made, 1) if not half or "write" in name]


@pytest.mark.parametrize("half", [False, True])
def test_a_kill_at_any_call_of_a_recording_loses_nothing_acknowledged(tmp_path, half):
    calls = calls_of(lambda: record(tmp_path / "whole"), half=half)
    assert assert_right(tmp_path / "whole", RECORDS) == RECORDS
    for at in calls:
        path = tmp_path / f"run{at}"

        def killed(say, at=at, path=path) -> None:
            with Calls(kill_at(at, half=half)):
                record(path, say)

        ended, said = in_child(killed)
        assert ended == -9
        check_recovers(path, said)
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Two ranks, one with segments that nobody sealed, and one whose journals stayed beside sealed ones."""
    path = tmp_path_factory.mktemp("pairs")

    def rename_refused(number, name, work, args, kwargs):
        if name == "replace" and str(args[1]).endswith(".safetensors"):
            raise OSError(95, "Operation not supported")
        return work(*args, **kwargs)

    def journals_stay(number, name, work, args, kwargs):
        return None if name == "unlink" and str(args[0]).endswith(".journal") else work(*args, **kwargs)

    for rank, act in enumerate((rename_refused, journals_stay)):
        with Calls(act):
            record(path / "run", rank=rank)
    return path / "run"


@pytest.mark.parametrize("half", [False, True])
def test_a_kill_at_any_call_of_recover_loses_nothing(tmp_path, pairs, half):
    assert len(list(pairs.rglob("*.partial"))) == len(list(pairs.rglob("*.safetensors"))) == 3
    assert len(list(pairs.rglob("*.journal"))) >= 6
    shutil.copytree(pairs, tmp_path / "whole")
    assert assert_right(pairs, RECORDS, ranks=2) == 2 * RECORDS
    for at in calls_of(lambda: recover(tmp_path / "whole"), half=half):
        path = tmp_path / f"run{at}"
        shutil.copytree(pairs, path)

        def killed(say, at=at, path=path) -> None:
            with Calls(kill_at(at, half=half)):
                recover(path)

        assert in_child(killed)[0] == -9
        assert_right(path, RECORDS, ranks=2)
        assert recover(path).lost == []
        assert assert_right(path, RECORDS, ranks=2) == 2 * RECORDS
        assert not [p for p in path.rglob("*") if p.suffix in (".partial", ".journal", ".damaged")]
        shutil.rmtree(path)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.stress)])
def test_a_kill_at_any_call_of_an_append_to_what_a_kill_left_loses_nothing(tmp_path, pairs, every):
    shutil.copytree(pairs, tmp_path / "whole")
    calls = calls_of(lambda: record(tmp_path / "whole", after=RECORDS), half=False)
    assert assert_right(tmp_path / "whole", RECORDS, ranks=2) == 3 * RECORDS
    for at in calls[::every]:
        path = tmp_path / f"run{at}"
        shutil.copytree(pairs, path)

        def killed(say, at=at, path=path) -> None:
            with Calls(kill_at(at)):
                record(path, say, after=RECORDS)

        ended, said = in_child(killed)
        assert ended == -9
        acknowledged = min(max(said, default=RECORDS), 2 * RECORDS)
        assert assert_right(path, RECORDS, ranks=2) >= RECORDS + acknowledged
        assert recover(path).lost == []
        assert assert_right(path, RECORDS, ranks=2) >= RECORDS + acknowledged
        shutil.rmtree(path)


def test_the_check_itself_notices_a_wrong_record(tmp_path):
    record(tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_right(tmp_path / "run", RECORDS + 1)
    segment = tmp_path / "run/rank-00000/segment-00000.safetensors"
    raw = bytearray(segment.read_bytes())
    raw[65536 + 200] ^= 1
    segment.write_bytes(raw)
    with pytest.raises(OSError, match="not what was written"):
        assert_right(tmp_path / "run", RECORDS)
