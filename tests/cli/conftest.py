"""The command line in this process (quick) and in one of its own (for what it imports and how it ends)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from layerscope.cli import main
from layerscope.models.tiny import tiny_transformer
from layerscope.recorder import record

SRC = Path(__file__).parents[2] / "src"


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYERSCOPE_TRACEBACK", raising=False)

    def run(*args: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(a) for a in args])
        return Answer(left.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def fresh(tmp_path):
    """Run a command in a process of its own, in an empty folder."""

    def run(*args: object, python: tuple[str, ...] = (), **env: str) -> Answer:
        done = subprocess.run(
            [sys.executable, *python, "-m", "layerscope", *map(str, args)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SRC), **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of three training steps: inputs, outputs and gradients of every layer."""
    to = tmp_path_factory.mktemp("runs") / "trained"
    torch.manual_seed(0)
    model = tiny_transformer(layers=3, hidden=16, heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, ["model.embed_tokens", "model.layers.*:*", "model.norm", "lm_head"], to=to) as rec:
        for _ in range(3):
            rec_loss = model(torch.arange(10).view(1, 10)).square().mean()
            optimizer.zero_grad()
            rec_loss.backward()
            optimizer.step()
    assert rec.completeness is not None
    return to
