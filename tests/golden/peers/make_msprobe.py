"""Makes the msprobe dumps of this folder, and beside them what plain torch hooks saw of the same model.

    python make_msprobe.py /tmp/peers

Needs `mindstudio-probe` and `safetensors`. msprobe has one debugger per process, so each dump has a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

# Level, task, and the names that are dumped (all of them where there are none).
DUMPS = {
    "tensor": ("L0", "tensor", []),
    "operations": ("mix", "tensor", ["softmax"]),
    "statistics": ("L0", "statistics", []),
}


class Block(nn.Module):
    """Called twice in a forward, with a keyword argument, giving a tuple with a dict in it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x, scale=None):
        half = x / 2
        return x + torch.softmax(self.up(half), -1)[..., :4] * scale, {"half": half}


class Tiny(nn.Module):
    """Every tensor has one consumer, so that its gradient is that of a module's input or output."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = Block()
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            x, _ = self.block(x, scale=torch.tensor(2.0))
        return self.head(x)


def steps():
    """Give the model, then make one training step after the other."""
    torch.manual_seed(0)
    tiny = Tiny()
    yield tiny
    while True:
        tiny(torch.tensor([[1, 2, 3]])).square().sum().backward()
        yield None


def dump(name, folder):
    from msprobe.pytorch import PrecisionDebugger

    level, task, only = DUMPS[name]
    config = {"task": task, "dump_path": str(folder / name), "rank": [], "step": [], "level": level}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**config, task: {"scope": [], "list": only, "data_mode": ["all"]}}))
    debugger, training = PrecisionDebugger(config_path=str(path)), steps()
    tiny = next(training)
    for _ in range(2):
        debugger.start(model=tiny)
        next(training)
        debugger.stop()
        debugger.step()


def seen_by_hooks():
    """Return what the first step computes, by the point and call that a reader should find it under."""
    training, seen, calls = steps(), {}, Counter()
    tiny = next(training)

    def keep(name, side, leaf, call, tensor):
        seen[f"{name}:{side}{leaf} call={call}"] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(lambda g: seen.update({f"{name}:grad_{side}{leaf} call={call}": g.clone()}))

    def watch(name):
        def hook(_, args, kwargs, output):
            call = calls[name]
            calls[name] += 1
            keep(name, "input", "[0]", call, args[0])
            for key, value in kwargs.items():
                keep(name, "input", f"[{key}]", call, value)
            if isinstance(output, tuple):
                keep(name, "output", "[0]", call, output[0])
                keep(name, "output", "[1][half]", call, output[1]["half"])
            else:
                keep(name, "output", "", call, output)

        tiny.get_submodule(name).register_forward_hook(hook, with_kwargs=True)

    for name in ("embed", "block", "block.up", "head"):
        watch(name)
    next(training)
    for name, parameter in tiny.named_parameters():
        module, _, leaf = name.rpartition(".")
        seen[f"{module} parameters {leaf}"] = parameter.detach().clone()
        seen[f"{module} parameters_grad {leaf}"] = parameter.grad.clone()
    return seen


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2:
        dump(sys.argv[2], folder)
        return
    for name in DUMPS:
        subprocess.run([sys.executable, __file__, str(folder), name], check=True)
    from safetensors.torch import save_file

    save_file(seen_by_hooks(), folder / "expected.safetensors")


if __name__ == "__main__":
    main()
