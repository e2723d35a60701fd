"""`layerscope serve`: the address it prints, how it ends, and what it says without its extra."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def test_it_prints_an_address_that_answers_and_ctrl_c_ends_it(tmp_path):
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "layerscope", "serve", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"{tmp_path} is served at\n"
        address = server.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=20) as page:
            assert b"0 runs below" in page.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address.partition("?")[0], timeout=20)
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=20)
    assert (server.returncode, out, err) == (0, "", "")


def test_runs_are_served_without_torch(trained, tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed')\n")
    command = [sys.executable, "-m", "layerscope", "serve", str(trained.parent), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        address = server.stdout.readline().strip()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(address, timeout=20) as page:
            (run,) = re.findall(r'href="(/run/[0-9a-f]{24})">trained<', page.read().decode())
        with browser.open(address.partition("/?")[0] + run, timeout=20) as page:
            assert "layers and steps" in page.read().decode()
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)
    assert server.returncode == 0


def test_without_the_extra_it_says_how_to_get_it(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "layerscope.server.live_server", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "layerscope.server.live_server")
    answer = cli("serve")
    assert answer.code == 2
    assert answer.err == "layerscope: serve takes starlette and uvicorn: pip install 'layerscope[web]'\n"


def test_no_folder_is_a_sentence(cli):
    pytest.importorskip("uvicorn")
    answer = cli("serve", "nowhere")
    assert (answer.code, answer.out) == (2, "")
    assert "nowhere is no folder" in answer.err
