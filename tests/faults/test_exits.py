"""A process that records ends as it would without, however it ends (on a GPU: tests/runtimes/test_cuda.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS)
def test_a_process_that_records_ends_as_it_would_without(end, code, tmp_path):
    for where in ([], [str(tmp_path / "run")]):
        command = [sys.executable, "-c", SCRIPT.replace("END", end), *where]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == code, ran.stderr
        assert "terminate called" not in ran.stderr
