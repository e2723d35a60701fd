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
for number in range(5):
    net(torch.full((1, 4), float(number)))
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
    assert page["recovered"]["verified"] == 4
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
    if harm == "flipped":
        data[65_536 + 3] ^= 0xFF  # of the first tensor, which two points have
    segment.unlink() if harm == "gone" else segment.write_bytes(data if harm == "flipped" else data[:-1])
    verified = {"flipped": 43, "cut": 45, "gone": 0}[harm]
    for _ in range(2):
        answer = cli("recover", "run")
        assert (answer.code, answer.err) == (2, "")
        assert f"nothing to seal, {verified} records verified, " in answer.out
        assert "rank-00000/segment-00000.safetensors" in answer.out


def test_a_frame_that_a_kill_tore_is_cut_off_and_is_no_failure(cli, killed):
    (journal,) = killed.rglob("*.journal")
    data = journal.read_bytes().rstrip(b"\0")
    journal.write_bytes(data + data[:20])  # the next frame has begun
    answer = cli("recover", killed)
    assert answer.code == 0
    assert "an unfinished last frame is cut off" in answer.out
    again = cli("recover", killed)
    assert again.code == 0
    assert "nothing lost" in again.out


def test_a_spool_is_put_where_it_belongs(cli, tmp_path, monkeypatch):
    import tempfile

    from layerscope.points import Moment, Point
    from layerscope.store import Manifest, Writer, open_run
    from layerscope.store.address import RemoteFolder

    address = f"memory://{tmp_path.name}/run"
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        writer = Writer(address, Manifest())
        patch.setattr(RemoteFolder, "put_file_new", lambda self, name, source: 1 / 0)
        writer.write(Point("a"), Moment(), note={"kept": True})
        assert writer.close().state == "interrupted"
    (spool,) = tmp_path.glob("layerscope-spool-*")
    assert cli("recover", address).code == 2
    answer = cli("recover", spool, "--to", address)
    assert (answer.code, answer.err) == (0, "")
    assert "nothing lost" in answer.out
    assert [entry.note for entry in open_run(address).records()] == [{"kept": True}]
    assert not spool.exists()
    assert cli("recover", spool, "--to", address).code == 2
