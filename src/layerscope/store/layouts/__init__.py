"""Other people's layouts, read and written.

    reader = recognised(Place(folder("layer_outputs"), mode="2-1"))     # None: no known layout

Each layout is a sibling module with one function, `recognise(place) -> Run | None`, which looks at names and headers
and loads no tensor. `open_run` offers a place to layerscope's own layout first and then to these, in this order. A
layout's module is imported when its turn comes, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from layerscope.errors import NotARun
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.run import Run

__all__ = ["LAYOUTS", "DumpPlace", "recognised"]

# Those that can tell by names alone come first; `monitor` opens a `.pt` file to see what is in it.
LAYOUTS: Final = ("quamba", "first_layer", "neuron", "msprobe", "sglang", "huggingface", "monitor")


def recognised(place: DumpPlace) -> Run | None:
    """Return a reader of what lies there, by the first layout that knows it; None when none does.

    Raises NotARun where a layout knows the names and understands nothing of what they hold: an empty run would look
    like one that saw nothing.
    """
    for name in LAYOUTS:
        recognise: Callable[[DumpPlace], Run | None] = import_module(f"{__name__}.{name}").recognise
        reader = recognise(place)
        if reader is not None:
            if reader.points:
                return reader
            why = [*reader.notes, *(f"{one.point}: {one.reason}" for one in reader.manifest.completeness.missing)]
            raise NotARun(
                f"{reader.address} looks like a dump in the {reader.layout} layout, and nothing of it can be read: "
                f"{'; '.join(why[:5]) or 'it holds no tensor and no statistics'}"
            )
    return None
