#!/usr/bin/env python3
"""Save what every layer of a model computes, as it is and on whatever device there is, in Neuron's layout.

    python3 scripts/test_layer_by_layer_gpu.py --model minimax-m2-tiny --output_dir gpu_reference/full_model

The reference for `scripts/test_layer_by_layer.py`: same weights, same prompt, same seed, same files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from checkout import hand_over, one_sentence

try:
    import torch
    from layers import called_with, parser, prompt_of, save

    import layerscope as ls
    from layerscope.cli.page import working
    from layerscope.models import load_model
    from layerscope.runtimes.values import replaced
except ModuleNotFoundError as error:
    hand_over(error)


def main() -> int:
    """Run the model once with its taps, and save what they took."""
    line = parser("Save what every layer of a model computes.", output_dir="gpu_reference/full_model")
    line.add_argument("--device", metavar="DEVICE", help="cuda, cuda:1, mps, cpu (an accelerator where there is one)")
    asked = line.parse_args()
    with one_sentence(), torch.no_grad():
        device = torch.device(asked.device) if asked.device else best_device()
        with working(f"loading {asked.model}"):
            model = load_model(asked.model, seed=asked.seed)
            inputs = called_with(model, asked.prompt)
            args, kwargs = replaced((inputs.args, inputs.kwargs), lambda _, tensor: tensor.to(device))
            tapped = ls.compile(model.model.to(device), kwargs or args, backend=eager, observer="skip")
        tapped(*args, **kwargs)
        about = {"model": {"name": asked.model}, "seed": asked.seed, "device": str(device)}
        said = prompt_of(model, asked.prompt)
        save(tapped, Path(asked.output_dir), inputs=inputs, prompt=said, about=about)
    return 0


def eager(module: torch.nn.Module, example_inputs: Any) -> torch.nn.Module:
    """Return the module as it is: the compiler that changes nothing."""
    return module


def best_device() -> torch.device:
    """Return the accelerator that torch finds, else the CPU."""
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found


if __name__ == "__main__":
    sys.exit(main())
