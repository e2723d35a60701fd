"""Files that were cut or changed: one clear error for what is gone, everything else as it was."""

from __future__ import annotations

import contextlib
import random
import shutil

import numpy as np
import pytest

from layerscope.errors import LayerscopeError
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run, recover

RECORDS = 6


def data(n: int) -> np.ndarray:
    return np.arange(n * 1000, n * 1000 + 40, dtype=np.int32)


@pytest.fixture(params=["sealed", "partial"])
def run_folder(request, tmp_path):
    """Six records, closed in order or as a kill leaves them."""
    writer = Writer(tmp_path / "live", Manifest(), segment_tensors=4)
    for n in range(RECORDS):
        writer.write(Point(f"p{n}"), Moment(), blob=Blob("int32", (40,), 160, lambda n=n: data(n)))
    writer.flush()
    if request.param == "partial":
        shutil.copytree(tmp_path / "live", tmp_path / "run")
    writer.close()
    if request.param == "sealed":
        shutil.copytree(tmp_path / "live", tmp_path / "run")
    return tmp_path / "run"


def survivors(path) -> set[int]:
    """Return which records read right; anything but right or a LayerscopeError is a failure."""
    right = set()
    try:
        run = open_run(path)
    except LayerscopeError:
        return right
    names = {entry.point.name for entry in run.records()}
    assert names <= {f"p{n}" for n in range(RECORDS)}
    for n in range(RECORDS):
        with contextlib.suppress(LayerscopeError):
            assert run.tensor(f"p{n}").tolist() == data(n).tolist()
            right.add(n)
    return right


def changed(path, name: str, raw: bytes, tmp_path) -> set[int]:
    """Return what survives a change of one file, before and after `recover`; recovering must not lose any of it."""
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    (copy / name).write_bytes(raw)
    before = survivors(copy)
    with contextlib.suppress(LayerscopeError):
        recover(copy)
    after = survivors(copy)
    assert before <= after
    shutil.rmtree(copy)
    return before


def files(path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def positions(size: int, rng: random.Random) -> list[int]:
    """Choose byte positions: the ends of the file, and some between."""
    return sorted({0, 1, 7, 8, 9, size - 1, size - 2, size // 2, *(rng.randrange(size) for _ in range(12))})


def test_untouched_everything_survives(run_folder):
    assert survivors(run_folder) == set(range(RECORDS))


def test_a_file_cut_anywhere_costs_only_what_was_behind_the_cut(run_folder, tmp_path):
    rng = random.Random(1)
    for name in files(run_folder):
        raw = (run_folder / name).read_bytes()
        for end in positions(len(raw), rng):
            alive = changed(run_folder, name, raw[:end], tmp_path)
            if "journal" in name:
                whole = raw[:end].count(b"\n") - 1  # the opening line is no record
                assert alive == set(range(max(whole, 0))), (name, end)
            elif "segment" in name:
                first = 0 if "00000" in name.split("/")[1] else 4
                count = 4 if first == 0 else 2
                kept = max(0, (end - 65536) // 160)
                gone = set(range(first + kept, first + count))
                assert alive == set(range(RECORDS)) - gone, (name, end)
            else:
                assert alive == set(range(RECORDS)), (name, end)


def test_a_flipped_bit_anywhere_costs_one_record_at_most(run_folder, tmp_path):
    rng = random.Random(2)
    for name in files(run_folder):
        raw = (run_folder / name).read_bytes()
        for at in positions(len(raw), rng):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << rng.randrange(8)
            alive = changed(run_folder, name, bytes(flipped), tmp_path)
            if name == "run.json":
                # A flipped version may be a newer one, and is then refused as a whole.
                assert alive in (set(range(RECORDS)), set())
            elif "journal" in name and flipped[at] == 10:
                assert len(alive) >= RECORDS - 1
            elif "segment" in name and at < 65536:
                assert alive == set(range(RECORDS))
            else:
                # A newline that is no longer one joins two lines.
                assert len(alive) >= RECORDS - (2 if raw[at] == 10 else 1), (name, at)


def test_a_file_that_is_gone_costs_only_its_own(run_folder, tmp_path):
    for name in files(run_folder):
        copy = tmp_path / "copy"
        shutil.copytree(run_folder, copy)
        (copy / name).unlink()
        alive = survivors(copy)
        if "segment-00000" in name:
            assert alive == {4, 5}
        elif "segment-00001" in name:
            assert alive == {0, 1, 2, 3}
        elif "journal" in name:
            assert alive == set()
        else:
            assert alive == set(range(RECORDS))
        shutil.rmtree(copy)


def test_random_rubbish_in_place_of_any_file_is_one_sentence(run_folder, tmp_path):
    rng = random.Random(3)
    for name in files(run_folder):
        for size in (0, 1, 100, 70_000):
            rubbish = rng.randbytes(size)
            assert changed(run_folder, name, rubbish, tmp_path) <= set(range(RECORDS))
