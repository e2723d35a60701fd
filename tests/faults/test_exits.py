"""A process that records ends as it would without, however it ends (on a GPU: tests/runtimes/test_cuda.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from preloaded import Preloaded

SCRIPT = """
import os, signal, sys, torch, layerscope as ls

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
rec = ls.record(model, "*", to=sys.argv[1] if sys.argv[1:] else None).__enter__()
for _ in range(3):
    model(torch.ones(64, 64))
END
"""

ENDS = {
    "without reading": ("pass", 0),
    "an exception": ("raise ValueError('on purpose')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "an interrupt": ("os.kill(os.getpid(), signal.SIGINT)", -2),
}


@pytest.fixture(scope="module")
def parent():
    with Preloaded() as parent:
        yield parent


@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS)
def test_a_process_that_records_ends_as_it_would_without(end, code, tmp_path, parent):
    for where in ((), (tmp_path / "run",)):
        ran = parent.run(SCRIPT.replace("END", end), *where)
        assert ran.code == code, ran.err
        assert "terminate called" not in ran.err


def test_a_forked_process_ends_as_a_started_one(parent):
    """The test above is about processes that were forked: what they print and return is what any other does."""
    end, code = ENDS["an interrupt"]
    script = SCRIPT.replace("END", f"import atexit; atexit.register(print, 'at exit'); {end}")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    forked = parent.run(script)
    assert (ran.returncode, ran.stdout) == (forked.code, forked.out) == (code, "at exit\n")
    assert ran.stderr.splitlines()[-1] == forked.err.splitlines()[-1]
