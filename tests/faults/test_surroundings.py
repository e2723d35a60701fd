"""A recording in surroundings that are not kind: Python's switches, no home, no cache, odd names, a C locale."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import layerscope as ls
from asserts import assert_no_hooks_left, left_open

SRC = Path(__file__).parents[2] / "src"
SCRIPT = """
import sys
import torch
import layerscope as ls

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
plain = model(torch.ones(2, 4))
with ls.record(model, ["**", "0:grad_output"], to=sys.argv[1], on_error="raise") as rec:
    out = model(torch.ones(2, 4))
    out.sum().backward()
assert torch.equal(plain, out) or sys.exit("changed")
run = ls.open_run(sys.argv[1])
print(len(list(run.records())), run.state, torch.equal(run.tensor("1"), out.detach()))
print(ls.compare(sys.argv[1], sys.argv[1]).verdict.word)
"""
NOT_ASCII = "läufe 一 \U0001f4c8"


def ran(folder, run, *python, **changed):
    """Record in a process of its own; variables that are None are not set."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), **changed}
    done = subprocess.run(
        [sys.executable, *python, "-c", SCRIPT, str(folder / run)],
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8", "replace").split(), done.stderr.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("python", "changed"),
    [
        (("-OO",), {}),
        (("-W", "error", "-W", "ignore:.torch:DeprecationWarning"), {}),
        ((), {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ((), {"HOME": None, "XDG_CACHE_HOME": None, "LAYERSCOPE_CACHE": None}),
        ((), {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": None, "LAYERSCOPE_CACHE": None}),
        ((), {"LAYERSCOPE_CACHE": "/proc/nowhere"}),
    ],
    ids=["-OO", "-W error", "C locale", "no HOME", "HOME that is not there", "cache that cannot be written"],
)
def test_a_recording_is_whole_in_these_surroundings(python, changed, tmp_path):
    out, err = ran(tmp_path, "run", *python, **changed)
    assert out == ["4", "complete", "True", "same"]
    assert err == ""


@pytest.mark.parametrize("name", ["a run with spaces", NOT_ASCII, "-o", "a'b\"c", "%s{}", "run;rm", "line\nbreak"])
def test_a_run_may_lie_where_its_user_likes(name, tmp_path):
    model = nn.Linear(2, 2)
    with ls.record(model, ".", to=tmp_path / name) as rec:
        expected = model(torch.ones(1, 2)).detach()
    assert torch.equal(rec["."], expected)
    assert torch.equal(ls.open_run(tmp_path / name).tensor("."), expected)
    assert str(ls.compare(tmp_path / name, tmp_path / name).verdict) == "same"


def test_a_name_beyond_ascii_is_found_in_a_c_locale(tmp_path):
    out, err = ran(tmp_path, NOT_ASCII, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert (out, err) == (["4", "complete", "True", "same"], "")
    assert ls.open_run(tmp_path / NOT_ASCII).state == "complete"


def test_no_file_of_a_run_has_a_name_that_some_file_system_lacks(tmp_path):
    """FAT has no colon, others no difference between a and A, and little room: nothing is named after a module."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "A": nn.Linear(2, 2), "con:aux?*" + "x" * 300: nn.Linear(2, 2)})
    model.forward = lambda x: [layer(x) for layer in model.values()]
    with ls.record(model, "**:*", to=tmp_path / "run"):
        model(torch.ones(1, 2))
    assert len(ls.open_run(tmp_path / "run")) == 3 * 2
    names = [part for path in (tmp_path / "run").rglob("*") for part in path.relative_to(tmp_path).parts]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,31}", name) for name in names), names


def test_a_clock_that_jumps_and_steps_that_come_again_leave_a_run_in_order(tmp_path, monkeypatch):
    model, clock = nn.Identity(), time.time
    for attempt in range(2):
        with ls.record(model, ".", to=tmp_path / "run", append=attempt > 0) as rec:
            for step in (0, 1, 2):
                ahead = (-1) ** step * 1e8
                monkeypatch.setattr(time, "time", lambda ahead=ahead: clock() + ahead)
                monkeypatch.setattr(time, "time_ns", lambda ahead=ahead: int((clock() + ahead) * 1e9))
                rec.moment(step=step + attempt, batch=0)
                model(torch.full((2,), 10.0 * attempt + step))
                rec.flush()
    run = ls.open_run(tmp_path / "run")
    assert run.complete
    assert run.damaged == []
    found = {entry.moment.step: entry.tensor()[0].item() for entry in run.records()}
    assert found == {0: 0, 1: 10, 2: 11, 3: 12}  # of a step that came again the later counts
    assert run.replaced == 2


@pytest.mark.parametrize("on_disk", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_thousand_recordings_leave_nothing_behind(on_disk, tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4, requires_grad=True)

    def cycle(number):
        with ls.record(model, ["**", "0:grad_input"], to=tmp_path / f"{number}" if on_disk else None):
            model(x).sum().backward()

    for number in range(100):
        cycle(number)
    gc.collect()
    since, before, objects = left_open(), resident(), len(gc.get_objects())
    for number in range(100, 1100):
        cycle(number)
    gc.collect()
    assert_no_hooks_left(model)
    assert since() == ([], [])
    assert len(gc.get_objects()) - objects < 1000
    assert resident() - before < (4 << 20)


def test_comparing_run_after_run_keeps_no_mapping_and_no_file(tmp_path):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for name in ("a", "b"):
        with ls.record(model, "**", to=tmp_path / name):
            model(torch.ones(600, 512))  # more than a MiB each, which is mapped where it is asked for

    def round_():
        ls.compare(tmp_path / "a", tmp_path / "b")
        for entry in ls.open_run(tmp_path / "a").records():
            entry.tensor().sum()

    def mappings():
        gc.collect()
        return Path("/proc/self/maps").read_text("utf-8", "replace").count(str(tmp_path))

    round_()
    since = left_open()
    for _ in range(4):
        round_()
    assert since()[1] == []
    assert mappings() == 0
    held = [ls.open_run(tmp_path / "a").tensor("0") for _ in range(3)]
    assert mappings() >= 3  # the count can fail
    del held


def served(model, x, count):
    """Call it from one coroutine after another, on a thread of their own: a browser's tests leave a loop on ours."""

    async def one():
        await asyncio.sleep(0)
        model(x)

    async def every():
        for _ in range(count):
            await asyncio.create_task(one())

    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: asyncio.run(every())).result()


@pytest.mark.parametrize("steps", [500, pytest.param(102_400, marks=pytest.mark.stress)])
def test_steps_without_end_from_threads_and_coroutines_leave_nothing_behind(steps, tmp_path):
    """In the long form each turn fills a segment, so that as much of the next is held after each."""
    model, x, held = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()), torch.ones(2, 4), []
    with ThreadPoolExecutor(8) as pool, ls.record(model, "**", to=tmp_path / "run", keep="summary") as rec:
        together = threading.Barrier(8)
        list(pool.map(lambda _: together.wait(), range(8)))  # so that every thread of the pool is there
        for turn in range(25):
            for each in [pool.submit(model, x) for _ in range(steps // 50)]:
                each.result()
            served(model, x, steps // 50)
            rec.flush()
            gc.collect()
            held.append((resident(), len(gc.get_objects())))
            if turn == 0:
                since = left_open()
        assert since() == ([], [])
    run = ls.open_run(tmp_path / "run")
    assert run.complete
    assert len(run) == 4 * steps
    if steps > 20_000:
        memory, objects = (end - middle for middle, end in zip(held[9], held[-1], strict=True))
        assert memory < (16 << 20), held  # what the allocator keeps in pieces: with one arena less than 1 MiB
        assert objects < 1000, held


def resident():
    """Bytes that lie in memory, of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
