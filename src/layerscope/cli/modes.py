"""`layerscope modes`: the variants a model has, what they do to its quality, and which layers to keep out of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from layerscope.cli import options
from layerscope.cli.page import counting, leave, put
from layerscope.cli.quality import evaluated, planned, windows
from layerscope.cli.record import loaded_model
from layerscope.progress import Progress
from layerscope.report.parts import (
    Cell,
    Column,
    Curves,
    Document,
    Fact,
    Facts,
    Heading,
    HeatMap,
    Line,
    Part,
    Sentence,
    Table,
    Value,
)
from layerscope.report.writing import many, percent

if TYPE_CHECKING:
    from layerscope.modes.preparing import Prepared
    from layerscope.modes.sensitivity import Sensitivity, Share

EXAMPLES = options.examples(
    "layerscope modes tiny-transformer",
    "layerscope modes make.py:model --modes-file modes.py",
    "layerscope modes quamba-small --sensitivity --mode 0",
    "layerscope modes checkpoints/llama --mode bf16,int8-weight,int4-weight --evaluate book.txt",
    "layerscope modes checkpoints/llama --plan --within 0.05",
    "layerscope modes quamba-small --plan --within 0.01 --mode 2-4 --evaluate book.txt",
)
# Each layer is run twice; what ranks the layers of a model does not need all that is recorded.
SAMPLES, TOKENS = 2, 256
NOTHING = 0.01  # of an error is not worth a layer


@click.command(short_help="List the variants of a model, measure them, plan one.", epilog=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option("--sensitivity", is_flag=True, help="Rank the layers by what they do to the error of --mode.")
@click.option("--evaluate", metavar="TEXT", help="Perplexity, agreement and KL of each --mode on a text or file.")
@click.option("--plan", is_flag=True, help="Which layers to keep, so that a mode stays within the budget.")
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    metavar="X",
    help="The budget: relative L2 error of the last layer; with --evaluate, share of perplexity more.",
)
@options.modes("Modes to rank, measure or plan with; several with commas.")
@options.prepared
@options.model_inputs
@options.as_html
@options.as_json
def command(
    model: str,
    sensitivity: bool,
    evaluate: str | None,
    plan: bool,
    within: float | None,
    modes: tuple[str, ...],
    modes_file: str | None,
    html_to: str | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """List the modes of MODEL: what each changes, its groups, and why one does not apply.

    Functions, TorchScript, .pt2 files and compiled folders are programs, and are run.

    With --sensitivity, each decoder layer is put into the float model in --mode, alone, and kept in float, alone, while
    the rest is in --mode: how much error it brings, and how much of the whole error goes.

    With --evaluate, each --mode (default: all) predicts the text token by token, in windows of --calib_seqlen tokens
    (512): its perplexity, and how far its predictions and its layers are from the model's.

    With --plan, layers are kept as they are until a --mode (default: quant_only) stays --within the budget, with the
    fewest bits; the plan is run, and printed as code for --modes-file. Exit code 1 when no plan does.
    """
    _refuse_mixtures(sensitivity=sensitivity, evaluate=evaluate, plan=plan, within=within, modes=modes, **asked)
    ready = loaded_model(model, modes_file=modes_file, usual=(SAMPLES, TOKENS), **asked)
    code, report = 0, None
    with counting("measuring") as progress:
        text = None if evaluate is None else windows(ready, evaluate, asked["calib_seqlen"])
        if sensitivity:
            page, report = _ranked(ready, modes, progress)
        elif within is not None:
            page, code = planned(ready, modes or ("quant_only",), text, within, progress)
        elif text is not None:
            page, code = evaluated(ready, modes or ("all",), text, progress)
        else:
            page = _listed(ready)
    if html_to is not None:
        leave(report or page, html_to)
    put(page, "json" if as_json else "terminal")
    return code


def _refuse_mixtures(
    *,
    sensitivity: bool,
    evaluate: str | None,
    plan: bool,
    within: float | None,
    modes: tuple[str, ...],
    inputs: str | None,
    prompt: str | None,
    **_: Any,
) -> None:
    """Refuse options that mean nothing together."""
    if sensitivity and not modes:
        raise click.UsageError("--sensitivity and --mode go together: --sensitivity --mode int8-dynamic")
    if modes and not (sensitivity or plan or evaluate is not None):
        raise click.UsageError("say what to do with --mode: --sensitivity and --mode go together, --evaluate, --plan")
    if sensitivity and (plan or evaluate is not None):
        raise click.UsageError("--sensitivity is a page of its own; leave out --plan and --evaluate")
    if within is not None and not math.isfinite(within):
        raise click.UsageError(f"--within {within:g} is no budget; give a number, such as --plan --within 0.05")
    if plan != (within is not None):
        raise click.UsageError("--plan and --within go together: --plan --within 0.05")
    if evaluate is not None and (inputs is not None or prompt is not None):
        raise click.UsageError("--evaluate is the text that is run; leave out --inputs and --prompt")


# The list ---------------------------------------------------------------------------------------


def _listed(ready: Prepared) -> Document:
    from layerscope.modes import GROUPS, modes_of, why_not

    modes = [(mode, why_not(mode, ready.model)) for mode in modes_of(ready.model)]
    columns = [Column(key, key) for key in ("mode", "applies", "about", "groups", "because")]
    rows = [
        (mode.name, reason is None, mode.about, [g for g in GROUPS if g in mode.groups], reason)
        for mode, reason in modes
    ]
    lines = [
        Fact(mode.name, mode.about) if reason is None else Fact(mode.name, f"does not apply: {reason}", tone="quiet")
        for mode, reason in modes
    ]
    groups = [(group, [mode.name for mode, reason in modes if group in mode.groups and not reason]) for group in GROUPS]
    name, fit = ready.loaded.name, sum(reason is None for _, reason in modes)
    parts: list[Part] = [
        Sentence(f"{fit} of {many(len(modes), 'mode')} apply to {name}"),
        Table.of("modes", columns, rows, audience="data"),
        Facts("lines", tuple(lines), audience="page"),
        Heading("groups"),
        Facts("groups", tuple(Fact(group, " ".join(names)) for group, names in groups), audience="page"),
    ]
    if dict(groups)["all"]:
        parts.append(
            Sentence(f"`layerscope record {name} --mode all --layers first,last -o RUNS` records them", "quiet")
        )
    return Document(f"modes of {name}", tuple(parts))


# The ranking ------------------------------------------------------------------------------------


def _ranked(ready: Prepared, modes: Sequence[str], progress: Progress) -> tuple[Document, Document]:
    """Return the page of the ranking, and the one to look at, with pictures above it."""
    from layerscope.modes import choose
    from layerscope.modes.sensitivity import sensitivity

    batches = list(ready.batches())
    parts: list[Part] = []
    measured: list[Sensitivity] = []
    for mode in choose(modes, ready.model).modes:
        found = sensitivity(ready.model, mode, batches, setting=ready.setting, progress=progress)
        measured.append(found)
        parts += [Heading(f"{found.mode}: {mode.about}"), *_said(found), _table(found)]
    parts.append(
        Sentence(
            "returns: share of the error that goes when the layer alone is kept in float, below 0 where errors had "
            "cancelled; alone: error of the float model with the layer alone in the mode",
            "quiet",
        )
    )
    title = f"which layers of {ready.loaded.name} to keep in high precision"
    return Document(title, tuple(parts)), Document(title, (*_drawn(measured), *parts, *_provenance(ready)))


def _provenance(ready: Prepared) -> list[Part]:
    from layerscope.recorder.provenance import said_of, versions

    settings = [Fact(key, str(value)) for key, value in ready.settings.items() if value not in (None, "")]
    facts = [Fact("model", ready.loaded.name), Fact("which is", said_of(ready.model)), Fact("seed", ready.loaded.seed)]
    facts += [*settings, Fact("versions", versions())]
    return [Heading("provenance"), Facts("provenance", tuple(facts), audience="page")]


def _drawn(measured: Sequence[Sensitivity]) -> Iterator[Part]:
    """Draw what each layer does in each mode, over depth; what is in no layer comes last."""
    names = tuple(share.name for share in measured[0].shares)
    for title, key, log in (("error that goes without the layer", "returned", False), ("error alone", "alone", True)):
        lines = [Line(found.mode, tuple(getattr(share, key) for share in found.shares)) for found in measured]
        yield Curves(key, title, names, tuple(lines), log, audience="page")
        if len(measured) > 1:
            table = tuple(zip(*(line.values for line in lines), strict=True))
            yield HeatMap("map", title, names, tuple(line.name for line in lines), table, log=log, audience="page")


def _said(found: Sensitivity) -> list[Part]:
    if not math.isfinite(found.error):
        return [Sentence("its output is not finite: no layer can be told from another", "bad")]
    parts: list[Part] = [Sentence(f"the output is off by {percent(found.error)} (relative L2 error)")]
    outside, first = found.outside, found.layers[0]
    if outside.returned > first.returned:
        parts.append(
            Sentence(f"what is outside the layers comes first: {percent(outside.returned)} of the error is its doing")
        )
    if first.returned < NOTHING:
        parts.append(Sentence("no layer stands out: to keep one of them in float takes nothing from the error"))
        return parts
    parts.append(Sentence(f"keep {first.name} in float first: {percent(first.returned)} of the error goes"))
    if found.together > first.returned:
        parts.append(Sentence(f"{', '.join(found.kept)} together: {percent(found.together)} of it"))
    return parts


def _table(found: Sensitivity) -> Table:
    columns = [
        Column("mode", "", audience="data"),
        Column("rank", "", "count"),
        Column("layer", "layer", "name"),
        Column("returned", "returns", "percent"),
        Column("returned_bar", "", "bar", audience="page"),
        Column("alone", "alone", "percent"),
        Column("alone_bar", "", "bar", audience="page", rank=1),
        Column("without", "without", "number", audience="data"),
        Column("error", "", "number", audience="data"),
    ]
    rows = [_row(found, rank, share) for rank, share in enumerate(found.ranking, 1)]
    return Table.of("layers", columns, rows)


def _row(found: Sensitivity, rank: int, share: Share) -> Sequence[Cell | Value]:
    returned = max(0.0, share.returned)
    return (
        found.mode,
        rank,
        share.name,
        share.returned,
        returned,
        share.alone,
        share.alone,
        share.without,
        found.error,
    )
