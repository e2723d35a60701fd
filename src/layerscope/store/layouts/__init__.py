"""Other people's layouts, read and written.

    reader = recognised(Place(folder("layer_outputs"), mode="2-1"))     # None: nobody's

Each layout is a sibling module with one function, `recognise(place) -> Reader | None`, which looks at names and headers
and loads no tensor. `open_run` offers a place to layerscope's own layout first and then to these, in this order. A
layout's module is imported when its turn comes, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from layerscope.store.layouts.place import Place
from layerscope.store.reader import Reader

__all__ = ["LAYOUTS", "Place", "recognised"]

# Those that can tell by names alone come first; `monitor` opens a `.pt` file to see what is in it.
LAYOUTS: Final = ("quamba", "first_layer", "neuron", "msprobe", "sglang", "huggingface", "monitor")


def recognised(place: Place) -> Reader | None:
    """Return a reader of what lies there, by the first layout that knows it; None when none does."""
    for name in LAYOUTS:
        recognise: Callable[[Place], Reader | None] = import_module(f"{__name__}.{name}").recognise
        reader = recognise(place)
        if reader is not None:
            return reader
    return None
