"""What a notebook shows that does not draw itself: how far long work is, and matplotlib's figures.

with bar("comparing") as tell:         # under the cell until the work is done; outside a notebook, `tell` says nothing
    tell("model.layers.3", 4, 24)
"""

from __future__ import annotations

import importlib
import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from layerscope.progress import Progress, no_progress
from layerscope.report.writing import printable

PATIENCE = 0.5  # seconds without a bar: work that is over by then needs none
EVERY = 0.1  # seconds between two messages to the browser


@contextmanager
def bar(what: str) -> Iterator[Progress]:
    """Show how far the block is, as it tells: what it works on, how much is done, of how much (0: not known)."""
    if "ipykernel" not in sys.modules:  # a terminal has the commands' bars
        yield no_progress
        return
    ipython: Any = importlib.import_module("IPython.display")
    shown: Any = None
    due = time.monotonic() + PATIENCE

    def tell(now: str, done: int, of: int) -> None:
        nonlocal shown, due
        if time.monotonic() < due:
            return
        due = time.monotonic() + EVERY
        share = f' value="{done}" max="{of}"' if of else ""
        bar = ipython.HTML(f"<label>{escape(printable(f'{what} {now}'))} <progress{share}></progress></label>")
        if shown is None:
            shown = ipython.display(bar, display_id=True)
        else:
            shown.update(bar)

    try:
        yield tell
    finally:
        if shown is not None:
            shown.update(ipython.HTML(""))


def draws(figure: type) -> None:
    """Have a notebook draw matplotlib's figures; `%matplotlib inline`, or pyplot, does so by itself."""
    shell = importlib.import_module("IPython").get_ipython() if "ipykernel" in sys.modules else None
    if shell is None:
        return
    formatters = shell.display_formatter.formatters.values()
    if not any(figure in one.type_printers for one in formatters if one.format_type.startswith("image/")):
        shell.display_formatter.formatters["image/png"].for_type(figure, _png)


def _png(figure: Any) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    return drawn.getvalue()
