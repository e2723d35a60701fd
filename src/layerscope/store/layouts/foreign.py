"""Another tool's dump under the same reading verbs.

    foreign_run(address, "neuron", items, mode="fp32")

A layout's reader says what there is, as items; nothing is loaded before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from layerscope.store.manifest import Completeness, Manifest, Missing
from layerscope.store.run import Run
from layerscope.store.source import Item, Items


def foreign_run(
    address: str,
    layout: str,
    items: Iterable[Item],
    *,
    notes: Iterable[str] = (),
    missing: Iterable[Missing] = (),
    reopen: tuple[Any, ...] = (),
    **said: Any,
) -> Run:
    """Return a dump that layerscope did not write; how complete it is, is not known.

    `notes` says what was odd about it, in sentences; `said` are fields of its manifest.
    """
    items = list(items)
    done = Completeness("unknown", points=len({i.point for i in items}), records=len(items), missing=list(missing))
    manifest = Manifest(**{"started": "", **said}, completeness=done)
    return Run(Items(address, items, manifest=manifest, layout=layout, notes=notes, reopen=reopen))
