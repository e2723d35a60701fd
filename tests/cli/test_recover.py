"""`layerscope recover`: after a kill, what was acknowledged is sealed."""

import json
import subprocess
import sys

import pytest

KILLED = """
import os, signal, sys, torch
from layerscope.recorder import record
net = torch.nn.Sequential(torch.nn.Linear(4, 4))
rec = record(net, "0", to=sys.argv[1])
rec.__enter__()
for _ in range(5):
    net(torch.ones(1, 4))
rec.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path):
    """A run whose writer was killed after five records were acknowledged."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], timeout=60, check=False)
    assert done.returncode == -9
    return tmp_path / "run"


def test_a_killed_run_is_readable_and_says_how_to_seal_it(cli, killed):
    answer = cli("show", killed)
    assert answer.code == 0
    assert f"layerscope recover {killed}" in answer.out
    assert "step 4, the latest of 0-4" in answer.out


def test_recover_seals_and_says_what_it_kept(cli, killed):
    answer = cli("recover", killed)
    assert answer.code == 0
    assert "1 segment sealed, 5 records verified, nothing lost" in answer.out
    assert list(killed.rglob("*.partial")) == []
    assert "recovered" in cli("show", killed).out


def test_a_second_time_there_is_nothing_to_do(cli, killed):
    cli("recover", killed)
    files = {p: p.read_bytes() for p in killed.rglob("*") if p.is_file()}
    again = cli("recover", killed)
    assert again.code == 0
    assert "nothing to seal" in again.out
    assert {p: p.read_bytes() for p in killed.rglob("*") if p.is_file()} == files


def test_what_is_lost_is_named(cli, killed):
    (partial,) = killed.rglob("*.partial")
    data = bytearray(partial.read_bytes())
    data[-3] ^= 0xFF
    partial.write_bytes(data)
    page = json.loads(cli("recover", killed, "--json").out)
    assert page["recovered"]["records"] == 4
    (lost,) = page["damaged"]
    assert lost["point"] == "0:output"
    assert "checksum" in lost["reason"]


def test_a_healthy_run_is_left_as_it_is(cli, trained):
    files = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    answer = cli("recover", trained)
    assert answer.code == 0
    assert "nothing to seal" in answer.out
    assert {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()} == files


def test_what_is_no_run_is_exit_code_2(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    assert cli("recover", "empty").code == 2
