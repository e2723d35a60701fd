#!/usr/bin/env python3
"""Compile a model with taps, run a prompt, and save what every layer computed: one `.pt` each, in Neuron's layout.

    python3 scripts/test_layer_by_layer.py --model minimax-m2-tiny --backend torchscript
    python3 scripts/test_layer_by_layer.py --skip-compile

The compiled model stays beside the outputs, in `compiled/`; --skip-compile loads it, and needs no source of the model.
It is refused where it was compiled from another model, seed or weights than are asked for.
`scripts/test_layer_by_layer_gpu.py` does the same for the model as it is; `layerscope compare gpu_reference/full_model
test_layers/full_model` finds the layer where the two part. The neuron backend has not run on Neuron hardware.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from checkout import give_up, hand_over, one_sentence, tell_user

try:
    import torch
    from layers import called_with, parser, prompt_of, save

    import layerscope as ls
    from layerscope.cli.page import working
    from layerscope.compile_taps import Compiled
    from layerscope.errors import LayerscopeError
    from layerscope.models import Loaded, load_model
    from layerscope.models.inputs import Inputs
    from layerscope.stats import fingerprint
except ModuleNotFoundError as error:
    hand_over(error)

BACKENDS = ("torchscript", "inductor", "export", "onnx", "neuron")
INPUTS, SOURCE = "inputs.pt", "source.json"


class Source(NamedTuple):
    """What a model was compiled from and called with, as it is kept beside it."""

    model: str
    backend: str
    seed: int
    weights: str
    prompt: str | None = None


def main() -> int:
    """Compile or load, run once, save."""
    asked = arguments()
    folder = Path(asked.output_dir)
    kept = folder.parent / "compiled" / f"{re.sub(r'[^0-9A-Za-z.-]+', '_', asked.model)}-{asked.backend}"
    with one_sentence(), torch.no_grad():
        compiled, inputs, source = loaded(asked, kept) if asked.skip_compile else made(asked)
        compiled(*inputs.args, **inputs.kwargs)
        if not asked.skip_compile:
            keep(compiled, inputs, source, kept)
        effect = str(compiled.observer_effect)
        about = {"model": {"name": asked.model}, "seed": source.seed, "settings": {"observer_effect": effect}}
        save(compiled, folder, inputs=inputs, prompt=source.prompt, about=about)
    print(f"  observer effect: {effect}")
    for each in compiled.missing:
        tell_user(f"{each.point} is missing: {each.reason}")
    return 0


def made(asked: argparse.Namespace) -> tuple[Compiled, Inputs, Source]:
    """Compile the model for the prompt."""
    with working(f"compiling {asked.model}"):
        model = load_model(asked.model, seed=asked.seed or 0)
        inputs = called_with(model, asked.prompt)
        said = prompt_of(model, asked.prompt)
        source = Source(asked.model, asked.backend, asked.seed or 0, weights_of(model), said)
        return ls.compile(model.model, inputs.kwargs or inputs.args, backend=asked.backend), inputs, source


def keep(compiled: Compiled, inputs: Inputs, source: Source, kept: Path) -> None:
    """Save the compiled model, its prompt and where it came from for the next time, in place of an earlier one."""
    if compiled.backend == "inductor":
        tell_user("what torch.compile makes cannot be kept: --skip-compile goes with the other backends")
        return
    if (kept / "taps.json").exists():
        shutil.rmtree(kept)
    compiled.save(kept)
    torch.save({"args": inputs.args, "kwargs": inputs.kwargs}, kept / INPUTS)
    (kept / SOURCE).write_text(json.dumps(source._asdict(), indent=1) + "\n", "utf-8")


def loaded(asked: argparse.Namespace, kept: Path) -> tuple[Compiled, Inputs, Source]:
    """Load what an earlier run compiled, and the prompt it was compiled with unless there is another."""
    if not kept.is_dir():
        give_up(f"there is nothing compiled in {kept}; run once without --skip-compile")
    source = source_of(kept)
    wanted = source._replace(
        model=asked.model, backend=asked.backend, seed=source.seed if asked.seed is None else asked.seed
    )
    for what, was, wants in zip(("model", "backend", "seed"), source, wanted, strict=False):
        if was != wants:
            give_up(
                f"what is in {kept} was compiled from --{what} {was}, and --{what} {wants} is asked for; "
                "run once without --skip-compile"
            )
    model = today(asked, source)
    if model is not None and weights_of(model) != source.weights:
        give_up(
            f"what is in {kept} was compiled from other weights than {asked.model} has now; "
            "run once without --skip-compile"
        )
    compiled = ls.load_compiled(kept)
    if asked.prompt is not None and model is not None:
        return compiled, called_with(model, asked.prompt), source._replace(prompt=asked.prompt)
    return compiled, Inputs(**torch.load(kept / INPUTS, weights_only=True)), source


def source_of(kept: Path) -> Source:
    """Read what a kept model was compiled from."""
    try:
        return Source(**json.loads((kept / SOURCE).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        give_up(
            f"{kept / SOURCE} does not say what was compiled there ({type(error).__name__}); "
            "run once without --skip-compile"
        )


def today(asked: argparse.Namespace, source: Source) -> Loaded | None:
    """Load the model itself; where its source is not at hand, and no prompt needs it, that is said."""
    try:
        return load_model(asked.model, seed=source.seed)
    except (LayerscopeError, ImportError, OSError) as error:
        if asked.prompt is not None:
            raise
        tell_user(f"the weights are not compared with those that were compiled, for the model is not at hand: {error}")
        return None


def weights_of(model: Loaded) -> str:
    """Return one fingerprint of all parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name}={fingerprint(tensor)};".encode())
    return digest.hexdigest()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    line = parser("Save what every layer of a compiled model computes.", output_dir="test_layers/full_model")
    line.set_defaults(seed=None)  # with --skip-compile, the one that was compiled
    line.add_argument("--backend", choices=BACKENDS, default="torchscript", help="(torchscript)")
    line.add_argument("--skip-compile", action="store_true", help="load what an earlier run compiled")
    return line.parse_args()


if __name__ == "__main__":
    sys.exit(main())
