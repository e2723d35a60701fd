"""`layerscope recover`: seal what a kill left behind, and verify everything."""

from __future__ import annotations

import click

from layerscope.cli import options
from layerscope.cli.page import counting, put
from layerscope.pages.completeness import damage_parts, damage_text
from layerscope.report.parts import Document, Fact, Facts, Part, Sentence
from layerscope.report.writing import many


@click.command(short_help="Seal a run that was cut short, and verify it.")
@click.argument("run", metavar="RUN")
@click.option("--to", metavar="ADDRESS", help="Where the spool's run is (s3://...): put what is missing there.")
@options.as_json
def command(run: str, to: str | None, as_json: bool) -> int:
    """Seal RUN after a kill or a crash: everything acknowledged is kept, what is lost is named.

    Of a run that was recorded elsewhere RUN is the spool, a layerscope-spool-* folder among the temporary files of its
    machine; with --to it is put there, and removed here.

    Every checksum is verified. Doing it twice changes nothing. A run that is still being written is left alone.
    Exit code 2 when something that was acknowledged is lost or damaged.
    """
    from layerscope.store import recover

    with counting("recovering") as progress:
        done = recover(run, to=to, progress=progress)
    sealed = f"{many(done.sealed, 'segment')} sealed" if done.sealed else "nothing to seal"
    kept = f"{sealed}, {many(done.verified, 'record')} verified"
    damaged = [damage for damage in done.lost if damage.acknowledged]
    if damaged:
        first = Sentence(f"{kept}, {many(len(damaged), 'piece')} lost: {damage_text(damaged)}", "bad")
    elif done.lost:
        first = Sentence(f"{kept}, nothing lost that was acknowledged; an unfinished last frame is cut off", "good")
    else:
        first = Sentence(f"{kept}, nothing lost", "good")
    data = {"sealed": done.sealed, "records": done.records, "verified": done.verified, "lost": len(done.lost)}
    facts = tuple(Fact(label, value, audience="data") for label, value in data.items())
    parts: list[Part] = [first, Facts("recovered", facts)]
    parts += damage_parts(done.lost)
    put(Document(run, tuple(parts)), "json" if as_json else "terminal")
    return 2 if damaged else 0
