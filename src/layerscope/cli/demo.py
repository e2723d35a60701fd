"""`layerscope demo`: record a small model while it trains, and look at what there is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerscope.cli import options
from layerscope.cli.choosing import at
from layerscope.cli.completeness import completeness_parts
from layerscope.cli.page import Tell, counting, put, working
from layerscope.cli.show import adjacent_parts
from layerscope.cli.statistics import point_tables, rows_at
from layerscope.report import markdown
from layerscope.report.parts import Document, Fact, Facts, Heading, Notes, Part, Profile, Sentence
from layerscope.report.writing import many

if TYPE_CHECKING:
    from layerscope.store import Reader

__all__ = ["command"]

TAPS = ["model.embed_tokens", "model.layers.*:*", "model.norm", "lm_head"]
STEPS = 6
RATE = 0.1


@click.command(short_help="Record a small built-in model and show what there is to see.")
@options.to(required=False)
def command(to: str | None) -> None:
    """Train the built-in model for a few steps, record every layer, and show the result.

    Writes the run to runs/demo (or the next free runs/demo-2, ...) and a Markdown report beside it.
    """
    place = to or _free("runs/demo")
    with working("training a small transformer"):
        losses, run = _record(place)
    with counting("reading") as tell:
        page = _page(run, place, losses, tell)
    report = Path(f"{place.rstrip('/')}{markdown.SUFFIX}") if "://" not in place else None
    if report is not None:
        report.write_text(markdown.render(page), encoding="utf-8")
    put(Document(page.title, (*page.parts, *_next(place, report))))


def _record(place: str) -> tuple[list[float], Reader]:
    import torch
    from torch.nn.functional import cross_entropy

    from layerscope.models import DEFAULT_PROMPT, load_model
    from layerscope.models.inputs import bytes_as_ids
    from layerscope.recorder import record

    model = load_model("tiny-transformer").model
    ids = bytes_as_ids(DEFAULT_PROMPT)
    losses = []
    with record(model, TAPS, to=place, name="tiny-transformer") as rec:
        for _ in range(STEPS):
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[0, 1:])
            parameters = list(model.parameters())
            # By hand: torch.optim imports the compiler, which takes longer than everything else here.
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.data -= RATE * gradient
            losses.append(loss.item())
    return losses, rec.run


def _page(run: Reader, place: str, losses: list[float], tell: Tell) -> Document:
    parts: list[Part] = [*completeness_parts(run, place)]
    parts.append(Sentence(f"tiny-transformer: 8 layers over bytes, recorded over {many(STEPS, 'training step')}"))
    labels = tuple(f"step {i}" for i in range(len(losses)))
    parts.append(Profile("loss", "loss", labels, tuple(losses)))
    moment, entries = at(run, run.points, {})
    rows, _ = rows_at(run, run.points, entries, tell)
    outputs = [row for row in rows if row.point.side == "output"]
    gradients = [row for row in rows if row.point.side == "grad_output"]
    parts.append(
        Profile(
            "gradients",
            "gradient rms",
            tuple(row.point.place for row in gradients),
            tuple(row.summary.rms for row in gradients),
        )
    )
    parts.append(Heading(f"outputs at step {moment.step}, the latest"))
    parts += point_tables(outputs)
    parts += adjacent_parts(run, outputs, layers_only=True, tell=tell)
    return Document(f"layerscope demo: {place}", tuple(parts))


def _next(place: str, report: Path | None) -> list[Part]:
    saved = [Fact("run", place, "name")] + ([Fact("report", str(report), "name")] if report else [])
    commands = (
        f"layerscope show {place} 'model.layers.*:grad_output' --step 0",
        "layerscope record tiny-transformer '**.mlp' -o runs/mine",
    )
    return [
        Heading("saved"),
        Facts("saved", tuple(saved)),
        Heading("try next"),
        Notes("next", tuple(Sentence(command) for command in commands)),
    ]


def _free(place: str) -> str:
    """Return the name, or the first numbered one that neither a run nor a report has taken."""
    number, name = 1, place
    while Path(name).exists() or Path(f"{name}{markdown.SUFFIX}").exists():
        number += 1
        name = f"{place}-{number}"
    return name
