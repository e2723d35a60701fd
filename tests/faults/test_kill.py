"""kill -9 at random moments: every acknowledged record is readable and right, and nothing wrong is returned.

The oracle is `writing.expected`: what each record must hold follows from its number, and the killed process said over
a pipe which numbers were acknowledged.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from faults.writing import expected
from layerscope.store import open_run, recover

SCRIPT = Path(__file__).with_name("writing.py")


def killed_after(seconds: float, *arguments: object) -> list[str]:
    """Run the script, kill it some time after its first word, and return its words."""
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first = child.stdout.readline()
    time.sleep(seconds)
    child.kill()
    out, err = child.communicate()
    assert first, err
    return (first + out).split("\n")[:-1]  # what has no newline was cut off by the kill


def assert_exact_prefix(path: Path, seed: int, acknowledged: int) -> int:
    """Check everything that can be read, and that what was acknowledged is among it; return how many there are."""
    run = open_run(path)
    assert run.damaged == []
    numbers = []
    for entry in run.records():
        n = entry.moment.step
        point, moment, dtype, shape, data = expected(seed, n)
        assert (entry.point, entry.moment, entry.dtype, entry.shape) == (point, moment, dtype, shape)
        assert entry.note == {"n": n}
        tensor = run.tensor(point, step=n)
        assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data
        numbers.append(n)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= acknowledged
    return len(numbers)


def assert_stock_reader_agrees(path: Path, seed: int) -> None:
    for segment in path.rglob("*.safetensors"):
        with safe_open(segment, "pt") as file:
            for key in filter(str.isdecimal, file.keys()):
                stock = file.get_tensor(key).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                assert stock == expected(seed, int(key))[4]


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def check_killed_while_writing(path: Path, seed: int, *, slow: bool) -> None:
    rng = random.Random(seed)
    words = killed_after(rng.uniform(0, 0.25), "write", path, seed, *(["slow"] if slow else []))
    acknowledged = int(words[-1])
    before = assert_exact_prefix(path, seed, acknowledged)
    assert_stock_reader_agrees(path, seed)
    done = recover(path)
    assert all("never finished" in damage.reason for damage in done.lost)
    assert not list(path.rglob("*.partial"))
    assert assert_exact_prefix(path, seed, acknowledged) == before
    assert_stock_reader_agrees(path, seed)
    settled = contents(path)
    assert recover(path)[:3] == (0, 0, [])
    assert contents(path) == settled
    assert open_run(path).state == "recovered"


def check_killed_while_recovering(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged = int(killed_after(rng.uniform(0, 0.1), "write", path, seed, "slow")[-1])
    # More to do than one kill leaves: the same records again as another rank's, twice, each with a torn last frame.
    for rank in (1, 2):
        shutil.copytree(path / "rank-00000", path / f"rank-0000{rank}")
    for journal in path.rglob("*.journal"):
        frames = journal.read_bytes().rstrip(b"\0")
        journal.write_bytes(frames + frames[:13] + b"torn")
    for _ in range(3):
        killed_after(rng.uniform(0, 0.12), "recover", path, "slow")
        assert_ranks_hold(path, seed, acknowledged)
    recover(path)
    assert_ranks_hold(path, seed, acknowledged)
    assert not list(path.rglob("*.partial"))
    settled = contents(path)
    assert recover(path)[:3] == (0, 0, [])
    assert contents(path) == settled
    assert_stock_reader_agrees(path, seed)


def assert_ranks_hold(path: Path, seed: int, acknowledged: int) -> None:
    """Check each rank's folder as a run of its own: its lines say rank 0, as the copied records do."""
    for rank in range(3):
        alone = path.with_name(f"{path.name}-alone-{rank}")
        alone.mkdir()
        shutil.copytree(path / f"rank-0000{rank}", alone / "rank-00000")
        assert_exact_prefix(alone, seed, acknowledged)
        shutil.rmtree(alone)


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_while_writing_loses_nothing_acknowledged(tmp_path, seed):
    check_killed_while_writing(tmp_path / "run", seed, slow=False)


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_while_sealing_loses_nothing_acknowledged(tmp_path, seed):
    check_killed_while_writing(tmp_path / "run", 1000 + seed, slow=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_while_recovering_loses_nothing_acknowledged(tmp_path, seed):
    check_killed_while_recovering(tmp_path / "run", 2000 + seed)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_kills_while_writing(tmp_path, seed):
    check_killed_while_writing(tmp_path / "run", 10_000 + seed, slow=False)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_kills_while_sealing(tmp_path, seed):
    check_killed_while_writing(tmp_path / "run", 20_000 + seed, slow=True)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_kills_while_recovering(tmp_path, seed):
    check_killed_while_recovering(tmp_path / "run", 30_000 + seed)


def test_the_check_itself_notices_a_wrong_record(tmp_path):
    acknowledged = int(killed_after(0.05, "write", tmp_path / "run", 7)[-1])
    with pytest.raises(AssertionError):
        assert_exact_prefix(tmp_path / "run", 8, acknowledged)
    with pytest.raises(AssertionError):
        assert_exact_prefix(tmp_path / "run", 7, 10**6)
