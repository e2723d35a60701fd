#!/usr/bin/env python3
"""Compile a model with taps, run a prompt, and save what every layer computed: one `.pt` each, in Neuron's layout.

    python3 scripts/test_layer_by_layer.py --model minimax-m2-tiny --backend torchscript
    python3 scripts/test_layer_by_layer.py --skip-compile

The compiled model stays beside the outputs, in `compiled/`; --skip-compile loads it, and needs no source of the model.
`scripts/test_layer_by_layer_gpu.py` does the same for the model as it is; `layerscope compare gpu_reference/full_model
test_layers/full_model` finds the layer where the two part. The neuron backend has not run on Neuron hardware.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from checkout import give_up, hand_over, one_sentence, tell_user

try:
    import torch
    from layers import called_with, parser, save

    import layerscope as ls
    from layerscope.cli.page import working
    from layerscope.compiled import Compiled
    from layerscope.models import load_model
    from layerscope.models.inputs import Inputs
except ModuleNotFoundError as error:
    hand_over(error)

BACKENDS = ("torchscript", "inductor", "export", "onnx", "neuron")
INPUTS = "inputs.pt"


def main() -> int:
    """Compile or load, run once, save."""
    asked = arguments()
    folder = Path(asked.output_dir)
    kept = folder.parent / "compiled" / f"{re.sub(r'[^0-9A-Za-z.-]+', '_', asked.model)}-{asked.backend}"
    with one_sentence(), torch.no_grad():
        compiled, inputs = loaded(asked, kept) if asked.skip_compile else made(asked)
        compiled(*inputs.args, **inputs.kwargs)
        if not asked.skip_compile:
            keep(compiled, inputs, kept)
        effect = str(compiled.observer_effect)
        about = {"model": {"name": asked.model}, "seed": asked.seed, "settings": {"observer_effect": effect}}
        save(compiled, folder, about=about)
    print(f"  observer effect: {effect}")
    for each in compiled.missing:
        tell_user(f"{each.point} is missing: {each.reason}")
    return 0


def made(asked: argparse.Namespace) -> tuple[Compiled, Inputs]:
    """Compile the model for the prompt."""
    with working(f"compiling {asked.model}"):
        model = load_model(asked.model, seed=asked.seed)
        inputs = called_with(model, asked.prompt)
        return ls.compile(model.model, inputs.kwargs or inputs.args, backend=asked.backend), inputs


def keep(compiled: Compiled, inputs: Inputs, kept: Path) -> None:
    """Save the compiled model and its prompt for the next time, in place of an earlier one."""
    if compiled.backend == "inductor":
        tell_user("what torch.compile makes cannot be kept: --skip-compile goes with the other backends")
        return
    if (kept / "taps.json").exists():
        shutil.rmtree(kept)
    compiled.save(kept)
    torch.save({"args": inputs.args, "kwargs": inputs.kwargs}, kept / INPUTS)


def loaded(asked: argparse.Namespace, kept: Path) -> tuple[Compiled, Inputs]:
    """Load what an earlier run compiled, and the prompt it was compiled with unless there is another."""
    if not kept.is_dir():
        give_up(f"there is nothing compiled in {kept}; run once without --skip-compile")
    compiled = ls.load_compiled(kept)
    if asked.prompt is not None:
        return compiled, called_with(load_model(asked.model, seed=asked.seed), asked.prompt)
    return compiled, Inputs(**torch.load(kept / INPUTS, weights_only=True))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    line = parser("Save what every layer of a compiled model computes.", output_dir="test_layers/full_model")
    line.add_argument("--backend", choices=BACKENDS, default="torchscript", help="(torchscript)")
    line.add_argument("--skip-compile", action="store_true", help="load what an earlier run compiled")
    return line.parse_args()


if __name__ == "__main__":
    sys.exit(main())
