"""Modes of a model recorded in memory, one after the other, for scripts that save them in a layout of their own.

for one in recorded("quamba-130m-w8a8", ["fp32", "2-1"], layers="first,last"):
    convert(one.run, "layer_outputs", layout="quamba")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from checkout import tell_user

from layerscope.cli.page import counting, working
from layerscope.errors import BadModel
from layerscope.modes import Recorded, choose, record_modes
from layerscope.modes.layer_taps import chosen_layers, component_taps, stack_of
from layerscope.modes.preparing import prepare
from layerscope.store.joining import SAMPLES, joined

__all__ = ["recorded"]


def recorded(
    model: str,
    modes: Sequence[str],
    *,
    layers: str,
    sides: str = "output",
    components: str | None = None,
    stop: bool = False,
    **asked: Any,
) -> Iterator[Recorded]:
    """Load the model once, record each mode of it and yield what became of it; `asked` is what `prepare` takes.

    Every tensor of a run has all samples. Where the weights are from, and why a mode failed or was left out, is told on
    stderr. Let go of a mode before the next is asked for, and one alone is in memory.
    """
    with working(f"loading {model}"):
        ready = prepare(model, **asked)
        choice = choose(modes, ready.model)
        if SAMPLES not in ready.settings and ready.loaded.given is None and not ready.loaded.speaks:
            raise BadModel(f"{model!r} came without inputs; return (model, inputs) from the function.")
        taps = [f"{layer}:{sides}" for layer in chosen_layers(ready.model, layers)]
        taps += [] if components is None else component_taps(ready.model, layers, components)
        last = stack_of(ready.model)[0] if stop else None  # a forward that nobody records on is not run to its end
        batches = list(ready.batches())
    if "weights" in ready.settings and ready.ran not in ready.notes:
        tell_user(f"no --pretrained_dir: {ready.ran}" if asked.get("pretrained_dir") is None else ready.ran)
    for note in ready.notes:
        tell_user(note)
    for mode, reason in choice.left_out:
        tell_user(f"mode {mode.name} is left out: {reason}")
    with counting("recording") as progress:
        for one in record_modes(
            ready.model,
            choice.modes,
            batches,
            taps,
            to=None,
            setting=ready.setting,
            settings=ready.settings,
            name=ready.loaded.name,
            seed=ready.loaded.seed,
            stop_after=last,
            floors=False,  # the layouts of these scripts have no place for them
            progress=progress,
        ):
            if one.error is not None:
                tell_user(f"mode {one.mode.name} failed: {one.error}")
            # The scales of codes are not joined, and whoever writes components joins their samples.
            yield one if one.run is None or components is not None else replace(one, run=joined(one.run))
            del one
