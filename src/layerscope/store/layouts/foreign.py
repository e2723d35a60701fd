"""Somebody else's dump under the same reading verbs.

    foreign_run(address, "neuron", items, manifest=Manifest(mode="fp32"))

A layout's reader says what there is, as items; nothing is loaded before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from layerscope.store.manifest import Manifest
from layerscope.store.run import Run
from layerscope.store.source import Item, Items

__all__ = ["Item", "foreign_run"]


def foreign_run(
    address: str,
    layout: str,
    items: Iterable[Item],
    *,
    manifest: Manifest,
    notes: Iterable[str] = (),
    reopen: tuple[Any, ...] = (),
) -> Run:
    """Return a dump that layerscope did not write; `notes` says what was odd about it, in sentences."""
    return Run(Items(address, items, manifest=manifest, layout=layout, notes=notes, reopen=reopen))
