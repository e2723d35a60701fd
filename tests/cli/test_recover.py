"""`layerscope recover`: after a kill, what was acknowledged is sealed."""

import json
import shutil
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
    answer = cli("recover", killed, "--json")
    assert answer.code == 2
    page = json.loads(answer.out)
    assert page["recovered"]["records"] == 4
    (lost,) = page["damaged"]
    assert lost["point"] == "0:output"
    assert "checksum" in lost["reason"]


def test_a_healthy_run_is_left_as_it_is(cli, trained):
    files = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    answer = cli("recover", trained)
    assert answer.code == 0
    assert "nothing to seal, 45 records verified, nothing lost" in answer.out
    assert {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()} == files


def test_what_is_no_run_is_exit_code_2(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    assert cli("recover", "empty").code == 2


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_a_sealed_segment_is_verified_and_its_damage_is_exit_code_2_each_time(cli, trained, tmp_path, harm):
    shutil.copytree(trained, tmp_path / "run")
    (segment,) = (tmp_path / "run").rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-3] ^= 0xFF
    segment.unlink() if harm == "gone" else segment.write_bytes(data if harm == "flipped" else data[:-1])
    for _ in range(2):
        answer = cli("recover", "run")
        assert (answer.code, answer.err) == (2, "")
        good = 0 if harm == "gone" else 44
        assert f"nothing to seal, {good} records verified, {45 - good} piece" in answer.out
        assert "rank-00000/segment-00000.safetensors" in answer.out


def test_a_line_that_a_kill_tore_is_cut_off_and_is_no_failure(tmp_path, monkeypatch, capsys):
    import torch

    import layerscope as ls
    from layerscope.cli import main

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with ls.record(model, "0", to=tmp_path / "run"):
        model(torch.ones(1, 2))
    with (tmp_path / "run" / "rank-00000" / "journal").open("ab") as journal:
        journal.write(b'{"record":1,"point":"0:outp')
    for sentence in ("an unfinished last line is cut off", "nothing lost"):
        monkeypatch.setattr("sys.argv", ["layerscope", "recover", str(tmp_path / "run")])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code in (0, None)
        assert sentence in " ".join(capsys.readouterr().out.split())
