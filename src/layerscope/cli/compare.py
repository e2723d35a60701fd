"""`layerscope compare`: do runs agree, where do they part first, and how sure is that."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerscope.cli import options
from layerscope.cli.page import counting, leave, put, working
from layerscope.errors import BadText, Incomparable, LayerscopeError
from layerscope.progress import Progress
from layerscope.report import Document, json
from layerscope.report.writing import printable

if TYPE_CHECKING:
    from layerscope.compare.page.bands import Bands
    from layerscope.compare.page.document import Detail
    from layerscope.compare.result import Against, Comparison, Kind

EXAMPLES = options.examples(
    "layerscope compare runs/fp32 runs/int8 --noise runs/bf16",
    "layerscope compare layer_outputs:fp32 layer_outputs:2-1",
    "layerscope compare runs/fp32 runs/int8 runs/int4 --points 'model.layers.*'",
    "layerscope compare runs/fp32 runs/int8 --fail-on nonfinite --fail-on band:large",
    "layerscope compare gpu neuron --pairing pairs.txt --save_comparison out/gpu_neuron.json",
    "layerscope compare a b --bands 'mse < 1e-6: fine; mse: off'",
)
KINDS: tuple[Kind, ...] = ("root", "nonfinite", "missing", "unpaired")
NEVER, BAND = "never", "band:"


@click.command(short_help="Compare runs: do they agree, and where do they part first?", epilog=EXAMPLES)
@click.argument("reference", metavar="REF")
@click.argument("candidates", metavar="CAND...", nargs=-1, required=True)
@click.option("--noise", metavar="RUN", multiple=True, help="A trusted run that differs from REF by rounding alone.")
@click.option("--pairing", metavar="FILE", help="Declared pairs: fused and split projections, other names.")
@click.option("--points", metavar="PATTERN", multiple=True, help="Only these points of REF.")
@click.option(
    "--limit",
    metavar="X",
    type=click.FloatRange(min=0, min_open=True),
    help="How many times the floor an error may be.",
)
@click.option(
    "--arithmetic",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="What CAND computes in, where that is coarser than what it stores.",
)
@click.option("--tokens", metavar="FILE.npy", help="Which tokens count, [batch, tokens]; the others are padding.")
@click.option("--bands", "bands_said", metavar="FILE|TEXT", help="Other levels: `mse < 1e-6: fine; mse: off`.")
@click.option(
    "--detail",
    type=click.Choice(["auto", "all", "none"]),
    default="auto",
    show_default=True,
    help="Which rows to show in full.",
)
@click.option(
    "--fail-on",
    "fail_on",
    metavar="WHAT",
    multiple=True,
    help=f"What makes the exit code 1: {', '.join(KINDS)}, band:LEVEL (or worse), never; default: it differs.",
)
@click.option("--save_comparison", "--save-comparison", "save_to", metavar="FILE.json", help="Save what --json prints.")
@options.as_html
@options.as_json
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def command(
    reference: str,
    candidates: tuple[str, ...],
    noise: tuple[str, ...],
    pairing: str | None,
    arithmetic: str | None,
    tokens: str | None,
    points: tuple[str, ...],
    limit: float | None,
    bands_said: str | None,
    detail: Detail,
    fail_on: tuple[str, ...],
    save_to: str | None,
    html_to: str | None,
    as_json: bool,
    as_markdown: bool,
) -> int:
    """Compare one or more runs CAND with the run REF: any layout, `folder:mode` where a folder holds several.

    Exit code 0 when they are the same, differ by noise alone or are quantised, 1 when they differ, 2 when something
    cannot be read or compared, or REF itself has NaN. After Ctrl-C nothing is left behind.
    """
    from layerscope.compare.page.document import document

    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown are two pages; ask for one of them.")
    bands = _bands(bands_said)
    _check(fail_on, bands)
    how: dict[str, Any] = {"noise": noise, "points": points}
    if pairing is not None:
        how["pairing"] = Path(pairing)
    if arithmetic is not None:
        how["arithmetic"] = arithmetic
    if tokens is not None:
        how["tokens"] = _tokens(tokens)
    if limit is not None:
        how["limit"] = limit
    try:
        with counting("comparing") as progress:
            comparison = compared(reference, candidates, progress=progress, **how)
    except KeyboardInterrupt:
        click.echo("layerscope: interrupted; nothing was written", err=True)
        return 130
    page = document(comparison, detail=detail, bands=bands)
    try:
        if save_to is not None:
            saved(page, Path(save_to))
        if html_to is not None:
            from layerscope.compare.page.html_page import page as report

            with working("reading what the report shows"):
                leave(report(comparison, bands=bands), html_to)
    finally:  # what took long to find out is shown, even where it cannot be saved
        put(page, "json" if as_json else "markdown" if as_markdown else "terminal")
    wrong = list(complaints(comparison))
    for sentence in wrong:
        click.echo(f"layerscope: {printable(sentence)}", err=True)
    return 2 if wrong else int(_fails(comparison, fail_on, bands))


def compared(reference: str, candidates: Sequence[str], *, progress: Progress | None = None, **how: Any) -> Comparison:
    """Compare; of several candidates, one that cannot be opened has a verdict that says so.

    Raises what opening raised when there is no other, and Incomparable when nothing of any can be compared.
    """
    from layerscope.compare.comparing import compare
    from layerscope.store import Run, open_run

    trusted = open_run(reference)
    opened: list[Run | Against] = []
    for address in candidates:
        try:
            opened.append(open_run(address))
        except (LayerscopeError, OSError) as error:
            if len(candidates) == 1:
                raise
            opened.append(_unopened(address, error))
    readers = [one for one in opened if isinstance(one, Run)]
    if not readers:
        raise Incomparable("; ".join(one.verdict.because for one in opened if not isinstance(one, Run)))
    comparison = compare(trusted, *readers, progress=progress, **how)
    judged = iter(comparison)
    return replace(comparison, candidates=tuple(next(judged) if isinstance(one, Run) else one for one in opened))


def saved(page: Document, to: Path) -> None:
    """Write the page as JSON, whole or not at all, into folders that are made where there are none."""
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = to.with_name(f".{to.name[:100]}.{os.getpid()}")
    try:
        beside.write_text(json.render(page), encoding="ascii")
        beside.replace(to)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(to)) from error
    finally:
        beside.unlink(missing_ok=True)


def not_compared(comparison: Comparison) -> list[Against]:
    """Return the candidates of which no row says anything about values."""
    return [a for a in comparison if all(row.kind in ("missing", "unpaired") for row in a.rows)]


def _unopened(address: str, error: Exception) -> Against:
    from layerscope.compare.result import Against, Verdict

    name = address.rstrip("/").rpartition("/")[2]
    because = str(error) if isinstance(error, LayerscopeError) or not error.args else f"{address}: {error}"
    return Against(name.rpartition(":")[2] or address, address, "", (), Verdict("differs", because), "nothing")


def _tokens(file: str) -> Any:
    import numpy as np

    try:
        return np.load(file, allow_pickle=False)
    except ValueError as error:
        raise BadText(f"--tokens {file!r} is no array: {error}") from None


def _bands(said: str | None) -> Bands:
    from layerscope.compare.page.bands import PUBLISHED, Bands

    if said is None:
        return PUBLISHED
    file = Path(said)
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else said
    except (OSError, ValueError):  # too long for a name, or not text
        text = said
    try:
        return PUBLISHED | Bands.parse(text)
    except BadText as error:
        if text is said and ":" not in said:
            raise BadText(f"{said!r} is neither a file nor bands: {error}") from None
        raise


def _check(fail_on: Sequence[str], bands: Bands) -> None:
    """Refuse conditions that cannot be meant, before anything is measured."""
    if NEVER in fail_on and len(fail_on) > 1:
        raise click.UsageError("--fail-on never stands alone; it has nothing to add to the others.")
    for what in fail_on:
        if what.startswith(BAND):
            bands.level(what.removeprefix(BAND))
        elif what not in (*KINDS, NEVER):
            raise click.UsageError(
                f"--fail-on {printable(what)!r} is not known; there is {', '.join(KINDS)}, band:LEVEL, never."
            )


def _fails(comparison: Comparison, fail_on: Sequence[str], bands: Bands) -> bool:
    if not fail_on:
        return comparison.verdict.word == "differs"
    levels = [what.removeprefix(BAND) for what in fail_on if what.startswith(BAND)]
    return any(
        row.kind in fail_on
        or (row.metrics is not None and any(bands.at_or_beyond(level, row.metrics) for level in levels))
        for row in comparison.rows
    )


def complaints(comparison: Comparison) -> Iterator[str]:
    """Say what makes the answer less than an answer: a sentence each."""
    tainted = next((row for row in comparison.rows if row.metrics is not None and row.metrics.reference.nan), None)
    if tainted is not None and tainted.metrics is not None:
        yield (
            f"the reference itself has NaN, first at {tainted} ({tainted.moment}), "
            f"{tainted.metrics.reference.nan:,} of {tainted.metrics.count:,} values: no verdict rests on that"
        )
    for against in not_compared(comparison):
        yield f"{against.candidate} could not be compared: {against.verdict.because}"
    for against in comparison:
        if against.unread:
            more = f" (and {len(against.unread) - 1:,} more)" if len(against.unread) > 1 else ""
            yield f"not everything could be read: {against.unread[0]}{more}"
