"""Pictures of a document as a matplotlib figure, for a paper: the same numbers, the same colours.

figure(curves, heat).savefig("error.pdf")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerscope.errors import MissingExtra
from layerscope.report.notebook import draws
from layerscope.report.parts import Curves, HeatMap, Histograms, Picture, Timeline

# As page.css has them, readable by the colour-blind; dashes tell them apart without colour.
COLOURS = ("#0065a8", "#c14a00", "#00805c", "#a3457e", "#946c00", "#2a8fc7", "#5b4bb5", "#3d4752")
DASHES = ("-", "--", ":", "-.", (0, (4, 2)), (0, (8, 3)), (0, (2, 2, 6, 2)), (0, (1, 2)))
WIDTH, HEIGHT = 8.0, 3.2  # inches of one picture
NAMES = 40  # of rows, at most, beside a map


def figure(*pictures: Picture) -> Any:
    """Draw the pictures one under the other; raises MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("a figure takes matplotlib: pip install matplotlib") from error
    draws(Figure)
    heights = [max(HEIGHT, 0.16 * len(one.rows)) if isinstance(one, HeatMap) else HEIGHT for one in pictures]
    drawn = Figure(figsize=(WIDTH, sum(heights) or HEIGHT), layout="constrained")
    axes = drawn.subplots(max(1, len(pictures)), 1, squeeze=False, height_ratios=heights or [1])
    for axis, picture in zip(axes[:, 0], pictures, strict=False):
        axis.set_title(picture.title, fontsize="medium", loc="left", parse_math=False)
        match picture:
            case Curves():
                _curves(axis, picture)
            case HeatMap():
                _heat(drawn, axis, picture)
            case Histograms():
                _histograms(axis, picture)
            case Timeline():
                _timeline(axis, picture)
    return drawn


def _curves(axis: Any, curves: Curves) -> None:
    places = range(len(curves.labels))
    for nth, line in enumerate(curves.lines):
        colour, dashes = COLOURS[nth % len(COLOURS)], DASHES[(nth + nth // len(COLOURS)) % len(DASHES)]
        values = [math.nan if v is None else v for v in line.values]
        axis.plot(places, values, color=colour, linestyle=dashes, label=_plain(line.name), linewidth=1.5)
        if any(v is not None for v in line.floor):
            floor = [math.nan if v is None else v for v in line.floor]
            axis.fill_between(places, floor, min(v for v in floor if v == v) / 10, color=colour, alpha=0.16, lw=0)
    if curves.log and curves.span is not None:
        axis.set_yscale("log")
    axis.set_ylabel(curves.unit, parse_math=False)
    _ticks(axis.xaxis, curves.labels, 7)
    axis.set_xlabel(curves.across, parse_math=False)
    if len(curves.lines) > 1:
        axis.legend(fontsize="small", frameon=False)


def _heat(drawn: Any, axis: Any, heat: HeatMap) -> None:
    from matplotlib.colors import LogNorm

    values = [[math.nan if v is None else v for v in row] for row in heat.values]
    span = heat.span
    norm = LogNorm(*span) if heat.log and span is not None and span[0] < span[1] else None
    if not values or not values[0]:
        return
    image = axis.imshow(
        values, aspect="equal" if heat.square else "auto", cmap="Blues", norm=norm, interpolation="none"
    )
    drawn.colorbar(image, ax=axis, label=heat.unit)
    _ticks(axis.yaxis, heat.rows, NAMES)
    _ticks(axis.xaxis, heat.columns, 12)
    axis.set_xlabel(heat.across, parse_math=False)


def _histograms(axis: Any, histograms: Histograms) -> None:
    for nth, (name, counts) in enumerate(histograms.counts):
        axis.stairs(counts, range(len(counts) + 1), color=COLOURS[nth], label=_plain(name), fill=nth == 0, alpha=0.7)
    axis.set_yscale("symlog", linthresh=1)
    _ticks(axis.xaxis, [f"{edge:.3g}" for edge in histograms.edges], 7)
    axis.legend(fontsize="small", frameon=False)


def _timeline(axis: Any, line: Timeline) -> None:
    axis.vlines([event.at for event in line.events], 0, 1, color=COLOURS[1])
    axis.set_xlim(*line.span) if line.span[0] < line.span[1] else None
    axis.set_yticks([])
    axis.set_xlabel(line.unit, parse_math=False)


def _ticks(axis: Any, labels: Sequence[str], most: int) -> None:
    """Name some places; names of layers are no formulas."""
    every = max(1, math.ceil(len(labels) / most))
    axis.set_ticks(range(0, len(labels), every))
    axis.set_ticklabels([*labels[::every]], fontsize="small", parse_math=False)


def _plain(name: str) -> str:
    """Keep a name out of a legend's own language: a leading underscore hides it, a dollar is a formula."""
    return name.replace("$", r"\$") if not name.startswith("_") else f" {name}".replace("$", r"\$")
