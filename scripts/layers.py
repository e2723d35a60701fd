"""What the two layer-by-layer scripts share: the prompt, the files of Neuron's layout, and what is printed of them.

compiled(*inputs.args, **inputs.kwargs)
save(compiled, Path("test_layers/full_model"), about={"model": {"name": "minimax-m2-tiny"}, "seed": 0})
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from layerscope import get_layer_hidden_states
from layerscope.compile_taps import Compiled
from layerscope.models import DEFAULT_PROMPT, Loaded
from layerscope.models.inputs import Inputs
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Manifest
from layerscope.store.layouts.convert import convert
from layerscope.store.layouts.neuron import STATISTICS
from layerscope.store.memory import MemoryRun

__all__ = ["called_with", "parser", "prompt_of", "save"]


def parser(description: str, *, output_dir: str) -> argparse.ArgumentParser:
    """Return the command line that both scripts have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", metavar="MODEL", default="minimax-m2-tiny", help="a built-in name or a PATH")
    made.add_argument("--prompt", metavar="TEXT", help="what the model is given (the same text for both scripts)")
    made.add_argument("--seed", metavar="N", type=int, default=0, help="of weights that are drawn (0)")
    made.add_argument("--output_dir", metavar="D", default=output_dir, help=f"where to save ({output_dir})")
    return made


def called_with(loaded: Loaded, prompt: str | None) -> Inputs:
    """Return the arguments of the one forward that is saved."""
    return next(loaded.batches(prompt=prompt))


def prompt_of(loaded: Loaded, prompt: str | None) -> str | None:
    """Return the text that the model is given; None where it came with inputs of its own."""
    return DEFAULT_PROMPT if prompt is None and loaded.given is None and loaded.speaks else prompt


def save(compiled: Compiled, folder: Path, *, inputs: Inputs, prompt: str | None, about: dict[str, Any]) -> None:
    """Write the hidden states and the logits of the last call, and print what they are like.

    `about` is for the manifest; of that, the layout's `metadata.pt` has the model's name and the settings, beside the
    prompt and the token ids that the model was given.
    """
    states = get_layer_hidden_states() or []
    ids = token_ids(inputs)
    settings = {"seed": about["seed"], "prompt": prompt, **about.get("settings", {})}
    settings |= {} if ids is None else {"input_ids": ids.tolist()}
    run = MemoryRun(Manifest(mode=compiled.backend, runtime=compiled.backend, **{**about, "settings": settings}))
    numbers = range(-1 if compiled.table.embedded else 0, len(states))
    for number, state in zip(numbers, states, strict=False):
        _add(run, "embedding" if number < 0 else f"layers.{number}", state)
    if "logits" in compiled.taps():
        _add(run, "logits", compiled.taps()["logits"])
    convert(run, folder, layout="neuron", overwrite=True)
    show(folder)


def token_ids(inputs: Inputs) -> Any:
    """Return the token ids among the arguments: those called so, or the first, where it holds integers."""
    import torch

    ids = inputs.kwargs.get("input_ids", next(iter(inputs.args), None))
    return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() and not ids.is_complex() else None


def show(folder: Path) -> None:
    """Print the statistics of the embedding and of three layers, and where values are not finite."""
    import torch

    statistics = torch.load(folder / STATISTICS, weights_only=True)
    depth = max(int(name.removeprefix("layer_")) for name in statistics)
    titles = {0: "embedding", 1: "first layer", (depth + 1) // 2: "middle layer", depth: "last layer"}
    print(f"{folder}: {len(statistics)} hidden states")
    for number, title in titles.items():
        layer = statistics.get(f"layer_{number}")
        if layer is not None:
            mean, std, low, high = (float(layer[key]) for key in ("mean", "std", "min", "max"))
            print(
                f"  {title:<12}  layer_{number:<3} {layer['shape']}  mean {mean:.6f}  std {std:.6f}  "
                f"range [{low:.6f}, {high:.6f}]"
            )
    for word, key in (("NaN", "has_nan"), ("Inf", "has_inf")):
        found = [name for name, layer in statistics.items() if layer[key]]
        print(f"  layers with {word}: {', '.join(found) or 'none'}")


def _add(run: MemoryRun, name: str, tensor: Any) -> None:
    tensor = tensor.detach().cpu()
    run.add(Point(name), Moment(), tensor=tensor, summary=summarize(tensor, level="full"))
