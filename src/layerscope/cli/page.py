"""Where a command's words go: documents to stdout, progress to stderr.

put(document, "json")
with working("loading the model"):
    ...
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from layerscope.progress import Progress
from layerscope.report import Document, Fact, Facts, html, json, markdown, terminal
from layerscope.report.writing import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

Form = Literal["terminal", "json", "markdown"]
PATIENCE = 0.5  # seconds without a bar: work that is over by then needs none


class ReaderGone(Exception):
    """The reader of stdout has closed it; click would make that exit code 1, which means "differs" here."""


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
    """Write the document as an HTML report, with the command that made it at its end, and say where it is."""
    made = Facts("command", (Fact("made with", click.get_current_context().obj),), audience="page")
    html.save(replace(document, parts=(*document.parts, made)), to)
    sys.stderr.write(f"layerscope: the report is {printable(to)}\n")


def working(what: str) -> AbstractContextManager[Any]:
    """Show on stderr that something takes its time, until the block ends."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(f"{what} ..."))


@contextmanager
def counting(what: str) -> Iterator[Progress]:
    """Show a bar on stderr, once the work has taken a while; the block says how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    started = time.monotonic()
    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task: TaskID | None = None

    def progress(now: str, done: int, total: int) -> None:
        nonlocal task
        if time.monotonic() - started < PATIENCE:
            return
        if task is None:
            bar.start()
            task = bar.add_task(what, total=total or None)
        bar.update(task, description=f"{what} {now}".strip(), completed=done, total=total or None)

    try:
        yield progress
    finally:
        bar.stop()
