"""A recording in surroundings that are not kind: Python's switches, no home, no cache, odd names, a C locale."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
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


def resident():
    """Bytes that lie in memory, of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
