"""`layerscope report`: runs and saved comparisons as one HTML file to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from layerscope.cli import options
from layerscope.cli.page import counting
from layerscope.progress import Progress
from layerscope.report import html
from layerscope.report.parts import Document, Fold, Part, Sentence, renamed
from layerscope.report.writing import printable

EXAMPLES = options.examples(
    "layerscope report runs/fp32",
    "layerscope report comparison.json -o report.html",
    "layerscope report runs/train runs/int8 comparison.json -o all.html",
)


@click.command(short_help="Make a report to look at: one HTML file of runs and comparisons.", epilog=EXAMPLES)
@click.argument("what", metavar="RUN|COMPARISON.json...", nargs=-1, required=True)
@click.option("-o", "--to", "to", metavar="FILE.html", default="report.html", show_default=True, help="Where to write.")
def command(what: tuple[str, ...], to: str) -> None:
    """Make one HTML file of runs and of comparisons that `layerscope compare --save_comparison` saved.

    The file needs nothing else: no network, no program but a browser.
    """
    with counting("reading") as progress:
        pages = [_page(one, progress) for one in what]
    html.save(pages[0] if len(pages) == 1 else _together(pages), to)
    click.echo(f"the report is {printable(to)}")


def _page(address: str, progress: Progress) -> Document:
    if address.endswith(".json") and Path(address).is_file():
        from layerscope.compare.page.html_page import page as compared
        from layerscope.compare.page.saved import loads

        return compared(loads(Path(address).read_bytes(), name=address))
    from layerscope.pages.run import page
    from layerscope.store import open_run

    return page(open_run(address), address, progress=progress)


def _together(pages: Sequence[Document]) -> Document:
    """Fold each page away under its title and its first sentence."""
    folds: list[Part] = []
    for nth, page in enumerate(pages):
        first = next((part for part in page.parts if isinstance(part, Sentence)), Sentence(""))
        title = f"{page.title}: {first.text}" if first.text else page.title
        folds.append(Fold(title, renamed(page.parts, f"{nth}-"), f"page-{nth}", first.tone))
    return Document(f"{len(pages)} reports", tuple(folds))
