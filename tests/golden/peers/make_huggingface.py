"""Makes the traces of transformers' debugger in this folder, and beside them what plain torch hooks saw.

    python make_huggingface.py /tmp/peers

Needs `transformers` and `safetensors`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

DUMPS = {"printed": {}, "files": {"use_repr": False}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x, *, scale):
        return x + self.up(x)[..., :4] * scale


class Tiny(nn.Module):
    """Three layers, of which the debugger prunes the middle one, and a norm that is called twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        for layer in self.layers:
            x = layer(x, scale=torch.tensor(2.0))
        return {"states": self.norm(x), "both": (x, ids)}


def model():
    torch.manual_seed(0)
    return Tiny().eval()


def inputs():
    return torch.tensor([[1, 2, 3]])


def seen_by_hooks():
    """Return what the model computes, by the point and call that a reader should find it under."""
    tiny, seen, calls = model(), {}, Counter()

    def watch(name):
        def hook(_, args, kwargs, output):
            call = calls[name]
            calls[name] += 1
            seen[f"{name}:input[0] call={call}"] = args[0].detach().clone()
            for key, value in kwargs.items():
                seen[f"{name}:input[{key}] call={call}"] = value.detach().clone()
            seen[f"{name}:output call={call}"] = output.detach().clone()

        tiny.get_submodule(name).register_forward_hook(hook, with_kwargs=True)

    for name, _ in tiny.named_modules():
        if name not in ("", "layers"):
            watch(name)
    output = tiny(inputs())
    seen[".:input[0] call=0"] = inputs()
    seen[".:output[states] call=0"] = output["states"].detach().clone()
    seen[".:output[both][0] call=0"] = output["both"][0].detach().clone()
    seen[".:output[both][1] call=0"] = output["both"][1].clone()
    return seen


def main():
    from safetensors.torch import save_file
    from transformers import model_addition_debugger_context

    folder = Path(sys.argv[1])
    for name, options in DUMPS.items():
        tiny = model()
        with model_addition_debugger_context(tiny, debug_path=str(folder / name), **options):
            tiny.forward(inputs())
    save_file(seen_by_hooks(), folder / "expected.safetensors")


if __name__ == "__main__":
    main()
