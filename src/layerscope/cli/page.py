"""Where a command's words go: documents to stdout, progress to stderr.

put(document, "json")
with working("loading the model"):
    ...
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from layerscope.report import Document, html, json, markdown, terminal
from layerscope.report.writing import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["Form", "ReaderGone", "Tell", "counting", "leave", "put", "working"]

Form = Literal["terminal", "json", "markdown"]
Tell = Callable[[str, int, int], None]  # what is being worked on, how much is done, of how much (0: nobody knows)
PATIENCE = 0.5  # seconds without a bar: work that is over by then needs none


class ReaderGone(Exception):
    """Whoever read stdout has closed it; click would make that exit code 1, which means "differs" here."""


def put(document: Document, form: Form = "terminal") -> None:
    """Write the document to stdout; a terminal gets its width and colours, a pipe gets everything."""
    if sys.stdout is None or sys.stdout.closed:  # `layerscope ... >&-`
        raise ReaderGone
    try:
        if form == "json":
            sys.stdout.write(json.render(document))
        elif form == "markdown":
            sys.stdout.write(markdown.render(document))
        else:
            from rich.console import Console

            terminal.draw(document, Console(width=None if sys.stdout.isatty() else terminal.UNLIMITED))
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EBADF):
            raise
        raise ReaderGone from error


def leave(document: Document, to: str) -> None:
    """Write the document as an HTML report, and say where it is."""
    html.save(document, to)
    sys.stderr.write(f"layerscope: the report is {printable(to)}\n")


def working(what: str) -> AbstractContextManager[Any]:
    """Show on stderr that something takes its time, until the block ends."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(f"{what} ..."))


@contextmanager
def counting(what: str) -> Iterator[Tell]:
    """Show a bar on stderr, once the work has taken a while; the block says how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started = time.monotonic()
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task: TaskID | None = None

    def tell(now: str, done: int, total: int) -> None:
        nonlocal task
        if time.monotonic() - started < PATIENCE:
            return
        if task is None:
            progress.start()
            task = progress.add_task(what, total=total or None)
        progress.update(task, description=f"{what} {now}".strip(), completed=done, total=total or None)

    try:
        yield tell
    finally:
        progress.stop()
