"""How long a command takes to come back: CPU seconds of a process, the least of some rounds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 7


def spent(*command: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    import torch

    from layerscope.models.tiny import tiny_transformer

    with tempfile.TemporaryDirectory() as folder:
        model, ids = tiny_transformer(seed=0).eval(), torch.arange(8)[None]
        script, program = str(Path(folder) / "model.pt"), str(Path(folder) / "model.pt2")
        torch.jit.save(torch.jit.trace(model, (ids,)), script)
        torch.export.save(torch.export.export(model, (ids,)), program)
        commands = {
            "python": ("-c", "pass"),
            "layerscope --help": ("-m", "layerscope", "--help"),
            "layerscope points model.pt": ("-m", "layerscope", "points", script),
            "layerscope points model.pt2": ("-m", "layerscope", "points", program),
        }
        for name, command in commands.items():
            print(f"{name:32} {min(spent(*command) for _ in range(ROUNDS)):.2f} s")


if __name__ == "__main__":
    main()
