"""The decoder layers of a live model, found by their numbers, and the words that choose among them.

stack_of(model)                     # ['model.layers.0', ..., 'model.layers.7']
chosen_layers(model, "first,last")  # ['model.layers.0', 'model.layers.7']
component_taps(model, "0", "ssm")   # ['backbone.layers.0.mixer.scan:input[0]', 'backbone.layers.0.mixer.scan:output']
"""

from __future__ import annotations

import re
from typing import Any

from layerscope.errors import BadText, NoSuchPoint
from layerscope.points import Point, escape
from layerscope.runtimes import find
from layerscope.store.layouts.components import COMPONENTS
from layerscope.store.layouts.decoder import decoder

_WORDS = re.compile(r"(?:first|last|all|-?\d{1,9})(?:,(?:first|last|all|-?\d{1,9}))*")


def stack_of(model: Any) -> list[str]:
    """Return the names of the decoder layers by depth; raises NoSuchPoint where no stack of them is found."""
    points = [Point(place.name) for place in find(model).points(model)]
    return list(decoder(points, address=type(model).__name__).names.values())


def chosen_layers(model: Any, text: str) -> list[str]:
    """Return patterns for `first`, `last`, `all` and depths (`-1` is the last), with commas; any other text is one."""
    if not _WORDS.fullmatch(text):
        return [text]
    stack = stack_of(model)
    chosen: dict[str, None] = {}
    for word in text.split(","):
        if word == "all":
            chosen |= dict.fromkeys(stack)
            continue
        depth = {"first": 0, "last": -1}.get(word)
        depth = int(word) if depth is None else depth
        if not -len(stack) <= depth < len(stack):
            raise NoSuchPoint(
                f"there is no layer {word} among the {len(stack)} of {type(model).__name__}, "
                f"{stack[0]} to {stack[-1]}; they count from 0, and -1 is the last."
            )
        chosen[stack[depth]] = None
    return [escape(name) for name in chosen]


def component_taps(model: Any, layers: str, components: str) -> list[str]:
    """Return patterns for what goes into components of these layers and what comes out: `conv,ssm`."""
    words = components.split(",")
    unknown = [word for word in words if word not in COMPONENTS]
    if unknown:
        raise BadText(f"--components has no {unknown[0]!r}; there are {', '.join(COMPONENTS)}, several with commas.")
    names = [place.name for place in find(model).points(model)]
    taps: dict[str, None] = {}
    for layer in chosen_layers(model, layers):
        for word in words:
            inside = [
                n for n in names if escape(n).startswith(f"{layer}.") and n.rpartition(".")[2] in COMPONENTS[word]
            ]
            if not inside:
                called = " or ".join(COMPONENTS[word])
                raise NoSuchPoint(f"{layer} of {type(model).__name__} has no {word}: a module {called} is looked for.")
            taps |= dict.fromkeys(f"{escape(n)}:{side}" for n in inside for side in ("input[0]", "output"))
    return list(taps)
