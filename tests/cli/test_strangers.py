"""No command opens a connection, unless an address on its command line says so."""

from __future__ import annotations

import socket
import sys

import pytest
import torch
from torch import nn

from layerscope.cli import COMMANDS

MODEL = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), torch.ones(2, 3)
"""

EVERY = {
    "demo": [["demo", "-o", "demo"]],
    "points": [["points", of] for of in ("tiny-transformer", "make.py:make", "run", "model.pt", "model.pt2", "llama")],
    "modes": [["modes", "make.py:make"]],
    "record": [
        ["record", "make.py:make", "**", "-o", "second"],
        ["record", "model.pt", "**", "--inputs", "inputs.pt", "-o", "third"],
        ["record", "llama", "model.layers.*", "--prompt", "hello", "-o", "fourth"],
    ],
    "show": [["show", "run"], ["show", "run", "--adjacent"]],
    "compare": [["compare", "run", "run"]],
    "diagnose": [["diagnose", "make.py:make", "make.py:make"]],
    "convert": [["convert", "run", "dumped", "--to", "monitor"]],
    "recover": [["recover", "run"]],
    "report": [["report", "run", "-o", "run.html"]],
    "serve": [["serve", "--help"]],  # it listens on this machine; tests/unit/server has what it answers
}

_asked: list[str] = []
_listening = False


def _audit(event: str, args: tuple[object, ...]) -> None:
    if _listening and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        _asked.append(f"{event} {args[-1] if event == 'socket.connect' else args[0]}")
        raise OSError(101, "the network is denied")


sys.addaudithook(_audit)


@pytest.fixture
def denied(monkeypatch):
    """Deny the network, and know who asked for it; what would switch it off elsewhere is not set."""
    global _listening
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    _asked.clear()
    _listening = True
    yield _asked
    _listening = False


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """What the commands are given."""
    import layerscope as ls

    folder = tmp_path_factory.mktemp("things")
    (folder / "make.py").write_text(MODEL)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with ls.record(model, "**", to=folder / "run"):
        model(torch.ones(2, 3))
    torch.jit.save(torch.jit.trace(model, torch.ones(2, 3)), folder / "model.pt")
    torch.export.save(torch.export.export(model, (torch.ones(2, 3),)), folder / "model.pt2")
    torch.save((torch.ones(2, 3),), folder / "inputs.pt")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=256
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return folder


def test_every_command_is_tried():
    assert set(EVERY) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_opens_a_connection(command, cli, things, tmp_path, denied):
    for thing in things.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    for words in EVERY[command]:
        answer = cli(*words)
        assert answer.code == 0, answer.err
        assert denied == []


def test_a_connection_would_be_noticed(cli, denied):
    with pytest.raises(OSError, match="denied"):
        socket.create_connection(("localhost", 9), timeout=1)
    assert denied != []
    cli("show", "http://localhost:9/run")
    assert len(denied) >= 2
