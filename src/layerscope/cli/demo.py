"""`layerscope demo`: quantise a small model in every way there is, and see what each does to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerscope.cli import options
from layerscope.cli.page import counting, put
from layerscope.report import html, markdown
from layerscope.report.parts import Document, Fact, Facts, Heading, Notes, Part, Sentence
from layerscope.report.writing import number

if TYPE_CHECKING:
    from layerscope.compare.result import Against, Comparison
    from layerscope.store import Run

MODEL = "quamba-small"
SAMPLES, TOKENS = 2, 256
LAYERS = "backbone.layers.*"


@click.command(short_help="Quantise a small built-in model in seven ways and compare them all.")
@options.to(required=False)
def command(to: str | None) -> None:
    """Record fp32 and every quantisation mode of a small trained model, and compare them layer by layer.

    Writes a run for each mode into runs/demo (or the next free runs/demo-2, ...), and beside it a report to look at
    (runs/demo.html) and the same as Markdown.
    """
    from layerscope.compare import compare
    from layerscope.compare.page.document import document, overview

    place = (to or _free("runs/demo")).rstrip("/")
    reference, *candidates = _recorded(place)
    with counting("comparing") as progress:
        comparison = compare(reference, *candidates, progress=progress)
    report = Path(f"{place}{markdown.SUFFIX}") if "://" not in place else None
    if report is not None:
        report.write_text(markdown.render(document(comparison)), encoding="utf-8")
        comparison.to_html(report.with_suffix(html.SUFFIX))
    parts = [_opening(comparison), *overview(comparison), *_next(place, report)]
    put(Document(f"layerscope demo: {MODEL} in {len(comparison) + 1} modes", tuple(parts)))


def _recorded(place: str) -> list[Run]:
    """Record the modes on the same samples, fp32 first."""
    from layerscope.modes import choose, record_modes
    from layerscope.modes.preparing import prepare

    ready = prepare(MODEL, calib_data_num=SAMPLES, calib_seqlen=TOKENS)
    modes = choose(["all"], ready.model).modes
    runs = []
    with _one_thread(), counting("recording") as progress:
        for one in record_modes(
            ready.model,
            modes,
            list(ready.batches()),
            LAYERS,
            to=place,
            setting=ready.setting,
            settings=ready.settings,
            name=MODEL,
            progress=progress,
        ):
            if one.error is not None:
                raise one.error
            assert one.run is not None
            runs.append(one.run)
    return runs


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: two gain nothing on a model this small, and on a busy machine wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _opening(comparison: Comparison) -> Sentence:
    """Say which mode ends closest to the reference, and which furthest from it."""
    errors = {against.candidate: _final_error(against) for against in comparison}
    ranked = sorted(errors, key=errors.__getitem__)
    near, far = ranked[0], ranked[-1]
    return Sentence(
        f"mode {near} stays closest to {comparison.reference}, {number(errors[near])} away after the last layer "
        f"(relative L2); {far} drifts furthest, {number(errors[far])}"
    )


def _final_error(against: Against) -> float:
    metrics = against.compared[-1].metrics
    assert metrics is not None
    return metrics.relative_l2


def _next(place: str, report: Path | None) -> list[Part]:
    saved = [Fact("runs", place, "name")] + ([Fact("report", str(report), "name")] if report else [])
    look: list[Part] = []
    if report is not None:
        look = [Heading("look at it"), Sentence(f"{report.with_suffix(html.SUFFIX)}, in any browser")]
    commands = (
        f"layerscope compare {place}/fp32 {place}/3",
        f"layerscope show {place}/0 '{LAYERS}'",
        f"layerscope modes {MODEL} --sensitivity --mode 0",
    )
    return [
        Heading("saved"),
        Facts("saved", tuple(saved)),
        Heading("try next"),
        Notes("next", tuple(Sentence(command) for command in commands)),
        *look,
    ]


def _free(place: str) -> str:
    """Return the name, or the first numbered one that neither a folder nor a report has taken."""
    nth, name = 1, place
    while any(Path(f"{name}{suffix}").exists() for suffix in ("", markdown.SUFFIX, html.SUFFIX)):
        nth += 1
        name = f"{place}-{nth}"
    return name
