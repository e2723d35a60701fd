"""`layerscope recover`: seal what a kill left behind."""

from __future__ import annotations

import click

from layerscope.cli import options
from layerscope.cli.completeness import damage_parts, many
from layerscope.cli.page import counting, put
from layerscope.report.parts import Document, Fact, Facts, Part, Sentence

__all__ = ["command"]


@click.command(short_help="Seal a run that was cut short.")
@click.argument("run", metavar="RUN")
@options.as_json
def command(run: str, as_json: bool) -> None:
    """Seal RUN after a kill or a crash: everything acknowledged is kept, what is lost is named.

    Doing it twice changes nothing. A run that is still being written is left alone.
    """
    from layerscope.store import recover

    with counting("recovering") as tell:
        done = recover(run, progress=tell)
    kept = f"{many(done.sealed, 'segment')} sealed, {many(done.records, 'record')} verified"
    if done.lost:
        first = Sentence(f"{kept}, {many(len(done.lost), 'piece')} lost", "warn")
    elif done.sealed:
        first = Sentence(f"{kept}, nothing lost", "good")
    else:
        first = Sentence("nothing to seal: this run is whole already", "good")
    facts = [Fact("sealed", done.sealed, audience="data"), Fact("records", done.records, audience="data")]
    parts: list[Part] = [first, Facts("recovered", tuple(facts))]
    parts += damage_parts(done.lost)
    put(Document(run, tuple(parts)), "json" if as_json else "terminal")
