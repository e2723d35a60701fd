"""The pictures of a document as SVG, complete without any script, without a style attribute and without a colour.

    figure(HeatMap(...), data)      # an HTML <figure>; the exact numbers go into `data`, for the page's script

Colours are classes, which the style sheet gives for light and for dark. Text stands outside whatever is stretched, so
it keeps its size on a telephone and on a wall.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TypeAlias

from layerscope.report.json import JSON, strict
from layerscope.report.parts import Curves, Event, HeatMap, Histograms, Line, Picture, Timeline
from layerscope.report.writing import count, landmarks, middle, number, printable

COLOURS = 8  # of lines, and as many dashes: the ninth has the colour of the first and the dashes of the second
SHADES = 12  # of a heat map
SIZE = 1000  # of the stretched drawings, either way
WRITTEN = (12, 64)  # a heat map of at most so many columns and rows has its numbers written in the cells
MARKED = 48  # a line of at most so many places has a mark at each
APART = 1 / 40  # of the width, between two signs of what is not finite
EVENTS = 8  # that are read at once
NAME = 30  # characters of a row's name
LABEL = 18  # of a label below a picture
STRAIGHT = 48  # characters of all columns together that stand side by side
AXIS = 7  # labels below a picture, at most

_Place: TypeAlias = Callable[[int], float]  # how far to the right a place stands, as a share of one
_Height: TypeAlias = Callable[[float], float]  # how far down a value stands


def quoted(text: str) -> str:
    """Return hostile text as text: what is invisible or steers is written out, what is markup is escaped."""
    return escape(printable(text))


def figure(picture: Picture, data: list[JSON]) -> str:
    """Draw a picture; appends what the script needs to `data`."""
    match picture:
        case Curves():
            body = _curves(picture, data)
        case HeatMap():
            body = _heat(picture, data)
        case Histograms():
            body = _histograms(picture, data)
        case Timeline():
            body = _timeline(picture)
    kind = type(picture).__name__.lower() + (" square" if isinstance(picture, HeatMap) and picture.square else "")
    return f'<figure class="{kind}"><figcaption>{quoted(picture.title)}</figcaption>{body}</figure>'


# Curves -----------------------------------------------------------------------------------------


def _curves(curves: Curves, data: list[JSON]) -> str:
    span = curves.span
    lines = [line for line in curves.lines if any(v is not None for v in line.values)]
    if not lines:
        return '<p class="quiet">nothing was measured</p>'
    log = curves.log and not _narrow(span, lines)
    low, high = _decades(span or (0.1, 1.0)) if log else _padded(span or (0.0, 1.0))
    many = len(curves.labels)

    def x(at: int) -> float:
        return at / (many - 1) if many > 1 else 0.5

    def y(value: float) -> float:
        if log:
            share = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) if value > 0 else 0.0
        else:
            share = value / 2 - low / 2
            share /= high / 2 - low / 2  # two huge numbers have no finite difference
        return 1 - min(1.0, max(0.0, share))

    ticks = _ticks(low, high, log=log)
    stretched = [f'<path class="grid" d="{"".join(f"M0 {_at(y(tick))}H{SIZE}" for tick in ticks)}"/>']
    stretched += [
        f'<path class="band c{nth % COLOURS}" d="{_area(line.floor, x, y)}"/>'
        for nth, line in enumerate(lines)
        if any(v is not None for v in line.floor)
    ]
    marks: list[str] = []
    for nth, line in enumerate(lines):
        colour, crossed = nth % COLOURS, -1.0
        on_scale = [v if v is None or v > 0 or not log else None for v in line.values]
        below = [v if v is not None and v <= 0 and log else None for v in line.values]  # no line leads there
        stretched.append(f'<path class="{_stroke(nth)}" d="{_path(on_scale, x, y)}{_path(below, x, y)}"/>')
        every = many <= MARKED and many * len(lines) <= 10 * MARKED
        for at, value in enumerate(line.values):
            if value is None:
                continue
            if not math.isfinite(value):
                if x(at) - crossed >= APART:
                    crossed = x(at)
                    marks.append(f'<text class="bad cross" x="{crossed:.2%}" y="12">\u2715</text>')
            elif below[at] is not None:
                if every or _ends(below, at):
                    marks.append(f'<circle class="mark hollow c{colour}" cx="{x(at):.2%}" cy="100%" r="3"/>')
            elif every or _alone(on_scale, at):
                marks.append(f'<circle class="mark c{colour}" cx="{x(at):.2%}" cy="{y(value):.2%}" r="3"/>')
    data.append({"labels": list(curves.labels), "lines": [[one.name, strict(one.values)] for one in lines]})
    said = f"{curves.title}: {'; '.join(_told(curves, nth) for nth in range(len(curves.lines)))}"
    return (
        f'<div class="frame">{_y_axis(ticks, y, curves.unit)}'
        f'<svg class="plot" role="img" tabindex="0" aria-label="{quoted(said)}" data-figure="{len(data) - 1}">'
        f"{_stretched(stretched)}{''.join(marks)}</svg>{_x_axis(curves.labels, x, curves.across)}</div>"
        f"{_legend(curves, lines, log=log)}"
    )


def _stroke(nth: int) -> str:
    return f"line c{nth % COLOURS} d{(nth + nth // COLOURS) % COLOURS}"


def _narrow(span: tuple[float, float] | None, lines: Sequence[Line]) -> bool:
    """Tell whether all of it lies within a power of ten, where a logarithmic scale shows less than a plain one."""
    nothing = any(v is not None and v <= 0 for line in lines for v in line.values)
    return span is not None and span[1] < 10 * span[0] and not nothing


def _told(curves: Curves, nth: int) -> str:
    """Say where a line begins, ends and is largest."""
    line = curves.lines[nth]
    found = landmarks([*curves.profiles()][nth])
    if found is None:
        return f"{line.name} was not measured"
    (start, first), (end, last), (where, most) = found
    peak = f", at most {number(most)} at {where}" if where not in (start, end) else ""
    return f"{line.name} {number(first)} to {number(last)}{peak}"


def _legend(curves: Curves, lines: Sequence[Line], *, log: bool) -> str:
    items = []
    floors = [(nth % COLOURS, line.name) for nth, line in enumerate(lines) if any(v is not None for v in line.floor)]
    for nth, line in enumerate(lines):
        swatch = f'<svg class="swatch" aria-hidden="true"><path class="{_stroke(nth)}" d="M0 6H30"/></svg>'
        said = _told(curves, curves.lines.index(line)).removeprefix(line.name)
        items.append(f"<li>{swatch}<b>{quoted(line.name)}</b><span>{quoted(said)}</span></li>")
    for colour, name in floors:
        band = f'<svg class="swatch" aria-hidden="true"><path class="band c{colour}" d="M0 2H30V10H0Z"/></svg>'
        said = f"the floor of {name} and those like it" if len(floors) > 1 else "the floor: what noise alone makes"
        items.append(f"<li>{band}<span>{quoted(said)}</span></li>")
    values = [v for line in lines for v in line.values]
    if any(v is not None and not math.isfinite(v) for v in values):
        items.append('<li><span class="bad">\u2715</span><span>not finite</span></li>')
    if log and any(v == 0 for v in values):
        items.append("<li><span>\u25cb</span><span>exactly 0, below the scale</span></li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _path(values: Sequence[float | None], x: _Place, y: _Height) -> str:
    drawn, pen = [], "M"
    for at, value in enumerate(values):
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        drawn.append(f"{pen}{_at(x(at))} {_at(y(value))}")
        pen = "L"
    return "".join(drawn)


def _area(values: Sequence[float | None], x: _Place, y: _Height) -> str:
    """Return the outline of what lies under the values, stretch by stretch."""
    drawn = []
    for stretch in _stretches(values):
        edge = "L".join(f"{_at(x(at))} {_at(y(value))}" for at, value in stretch)
        drawn.append(f"M{_at(x(stretch[0][0]))} {SIZE}L{edge}V{SIZE}Z")
    return "".join(drawn)


def _stretches(values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    stretch: list[tuple[int, float]] = []
    for at, value in enumerate(values):
        if value is not None and math.isfinite(value):
            stretch.append((at, value))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _alone(values: Sequence[float | None], at: int) -> bool:
    """Tell whether no line reaches this value, so that only a mark shows it."""
    beside = [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]
    return not any(v is not None and math.isfinite(v) for v in beside)


def _ends(values: Sequence[float | None], at: int) -> bool:
    """Tell whether a stretch of values begins or ends here."""
    return at in (0, len(values) - 1) or values[at - 1] is None or values[at + 1] is None


# Heat maps --------------------------------------------------------------------------------------


def _heat(heat: HeatMap, data: list[JSON]) -> str:
    across, down = len(heat.columns), len(heat.rows)
    if not across or not down or all(v is None for row in heat.values for v in row):
        return '<p class="quiet">nothing was measured</p>'
    span = heat.span or (0.0, 1.0)
    cells: dict[str, list[str]] = {}
    for at, row in enumerate(heat.values):
        shades = [_shade(value, span, log=heat.log) for value in row]
        to = 0
        for shade, alike in groupby(shades):  # neighbours of one shade are one rectangle: a page is sent by mail
            wide = len([*alike])
            cells.setdefault(shade, []).append(f"M{to} {at}h{wide}v1h-{wide}z")
            to += wide
    paths = [f'<path class="{kind}" d="{"".join(some)}"/>' for kind, some in cells.items()]
    inner = f'<svg viewBox="0 0 {across} {down}" preserveAspectRatio="none" class="cells">{"".join(paths)}</svg>'
    data.append({"rows": list(heat.rows), "columns": list(heat.columns), "values": [strict(r) for r in heat.values]})
    written = _written(heat, span) if not heat.square and across <= WRITTEN[0] and down <= WRITTEN[1] else ""
    written += _crosses(heat) if "broken" in cells and not heat.square else ""  # never by colour alone
    size = "square" if heat.square else "high" if down <= 40 else "low" if down <= 120 else "flat"
    height = f'height="{down * {"high": 20, "low": 11, "flat": 4}[size]}"' if size != "square" else ""
    label = quoted(f"{heat.title}: {_extremes(heat)}")
    plot = (
        f'<svg class="plot" {height} role="img" tabindex="0" aria-label="{label}" '
        f'data-figure="{len(data) - 1}">{inner}{written}</svg>'
    )
    names = "" if heat.square else _row_names(heat.rows, height, every=1 if size != "flat" else math.ceil(down / 40))
    columns = _column_names(heat) if not heat.square else ""
    return f'<div class="frame {size}">{names}{plot}{columns}</div>{_shades(heat, span, cells)}'


def _shade(value: float | None, span: tuple[float, float], *, log: bool) -> str:
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "broken"
    if log and value <= 0:
        return "s0"
    low, high = (math.log(v) for v in span) if log else (v / 2 for v in span)
    here = math.log(value) if log else value / 2
    share = (here - low) / (high - low) if high > low else 0.5
    return f"s{min(SHADES - 1, max(0, int(share * SHADES)))}"


def _written(heat: HeatMap, span: tuple[float, float]) -> str:
    across, down = len(heat.columns), len(heat.rows)
    texts = []
    for at, row in enumerate(heat.values):
        for to, value in enumerate(row):
            if value is None:
                continue
            kind = _shade(value, span, log=heat.log)
            x, y = (to + 0.5) / across, (at + 0.5) / down
            texts.append(f'<text class="{kind}" x="{x:.1%}" y="{y:.1%}">{_short(value)}</text>')
    return f'<g class="written" aria-hidden="true">{"".join(texts)}</g>'


def _crosses(heat: HeatMap) -> str:
    """Mark what is not finite, once for neighbours: rows that are so together, over all the columns they are."""
    patches: list[tuple[int, int, int, int]] = []  # top, bottom, left, right
    growing: dict[tuple[int, int], int] = {}
    for at, column in enumerate(zip(*heat.values, strict=True)):
        top = 0
        for broken, some in groupby(column, lambda v: v is not None and not math.isfinite(v)):
            bottom = top + len([*some])
            if broken:
                nth = growing.get((top, bottom))
                if nth is not None and patches[nth][3] == at:
                    patches[nth] = (*patches[nth][:3], at + 1)
                else:
                    growing[top, bottom] = len(patches)
                    patches.append((top, bottom, at, at + 1))
            top = bottom
    across, down = 2 * len(heat.columns), 2 * len(heat.rows)
    signs = (
        f'<text class="broken" x="{(left + right) / across:.1%}" y="{(top + bottom) / down:.1%}">\u2715</text>'
        for top, bottom, left, right in patches
    )
    return f'<g class="written crosses" aria-hidden="true">{"".join(signs)}</g>'


def _short(value: float) -> str:
    """Write a number in six characters or fewer."""
    if value == 0 or not math.isfinite(value):
        return number(value)
    return (
        f"{value:#.3g}".rstrip(".")
        if 1e-3 <= abs(value) < 1e4
        else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    )


def _row_names(rows: Sequence[str], height: str, *, every: int) -> str:
    texts = [
        f'<text x="100%" y="{(at + 0.5) / len(rows):.2%}">{_named(name, short)}</text>'
        for at, (name, short) in enumerate(zip(rows, _shortened(rows, NAME), strict=True))
        if at % every == 0
    ]
    return f'<svg class="names" {height} aria-hidden="true">{"".join(texts)}</svg>'


def _column_names(heat: HeatMap) -> str:
    across = len(heat.columns)
    if across > WRITTEN[0]:
        return _x_axis(heat.columns, lambda at: (at + 0.5) / across, heat.across)
    short = _shortened(heat.columns, 16)
    slanted = max(map(len, short)) * across > STRAIGHT
    kind = ' class="slanted"' if slanted else ""
    texts = [
        f'<svg x="{(at + 0.5) / across:.2%}" y="14"><text{kind}>{_named(name, short[at])}</text></svg>'
        for at, name in enumerate(heat.columns)
    ]
    return f'<svg class="xaxis{" slant" if slanted else ""}" aria-hidden="true">{"".join(texts)}</svg>'


def _extremes(heat: HeatMap) -> str:
    """Say where the smallest and the largest value stand."""
    there = [
        (v, f"{row}, {column}")
        for row, values in zip(heat.rows, heat.values, strict=True)
        for column, v in zip(heat.columns, values, strict=True)
        if v is not None
    ]
    finite = [one for one in there if math.isfinite(one[0])]
    said = f"{len(heat.rows)} rows, {len(heat.columns)} columns"
    if finite:
        least, most = min(finite), max(finite)
        said += f"; from {number(least[0])} ({least[1]}) to {number(most[0])} ({most[1]})"
    if len(finite) < len(there):
        said += f"; {len(there) - len(finite)} not finite"
    return said


def _shades(heat: HeatMap, span: tuple[float, float], used: Iterable[str]) -> str:
    swatches = "".join(f'<rect class="s{n}" x="{n * 12}" width="12" height="12"/>' for n in range(SHADES))
    said = [
        f'<li><span>{number(span[0])}</span><svg class="scale" aria-hidden="true" viewBox="0 0 {12 * SHADES} 12" '
        f'preserveAspectRatio="none">{swatches}</svg>'
        f"<span>{number(span[1])}{quoted(f' {heat.unit}' if heat.unit else '')}"
        f"{', logarithmic' if heat.log else ''}</span></li>"
    ]
    for kind, words in (("broken", "not finite"), ("none", "not measured")):
        if kind in used:
            swatch = f'<svg class="scale one" aria-hidden="true"><rect class="{kind}" width="12" height="12"/></svg>'
            said.append(f"<li>{swatch}<span>{words}</span></li>")
    if heat.log and any(v is not None and v <= 0 for row in heat.values for v in row):
        said.append("<li><span>0 or less has the shade of the least</span></li>")
    return f'<ul class="legend">{"".join(said)}</ul>'


# Histograms and timelines -----------------------------------------------------------------------


def _histograms(drawn: Histograms, data: list[JSON]) -> str:
    bins = len(drawn.edges) - 1
    most = max((n for _, counts in drawn.counts for n in counts), default=0)
    if bins < 1 or not most:
        return '<p class="quiet">no finite value to count</p>'
    pair = len(drawn.counts) > 1
    room = SIZE / 2 if pair else SIZE
    paths = []
    for nth, (_, counts) in enumerate(drawn.counts[:2]):
        # Of a pair, the candidate stands on the line and the reference hangs under it.
        foot, sign = (room, -1 if nth else 1) if pair else (room, -1)
        heights = [round(foot + sign * room * math.log1p(n) / math.log1p(most) * 0.97) for n in counts]
        steps = "".join(f"V{height}H{round((at + 1) * SIZE / bins)}" for at, height in enumerate(heights))
        paths.append(f'<path class="bars c{nth}" d="M0 {foot:.0f}{steps}V{foot:.0f}Z"/>')
    if pair:
        paths.append(f'<path class="grid" d="M0 {room:.0f}H{SIZE}"/>')
    data.append({"edges": strict(drawn.edges), "lines": [[name, list(counts)] for name, counts in drawn.counts]})
    label = quoted(f"{drawn.title}: {bins} bins, the fullest holds {count(most)}")
    edges = [number(edge) for edge in drawn.edges]
    legend = "".join(
        f'<li><i class="key b{nth}"></i><b>{quoted(name)}</b><span>{count(sum(counts))} finite values</span></li>'
        for nth, (name, counts) in enumerate(drawn.counts[:2])
    )
    return (
        f'<div class="frame bare"><svg class="plot" role="img" tabindex="0" aria-label="{label}" '
        f'data-figure="{len(data) - 1}">{_stretched(paths)}</svg>'
        f"{_x_axis(edges, lambda at: at / bins, '', most=3)}</div>"
        f'<ul class="legend">{legend}<li><span>log counts, bins of powers of two</span></li></ul>'
    )


def _timeline(line: Timeline) -> str:
    first, last = line.span

    def x(at: float) -> float:
        return (at - first) / (last - first) if last > first else 0.5

    at_step: dict[int, list[Event]] = {}
    for event in line.events:
        at_step.setdefault(event.at, []).append(event)
    marks = [
        f'<text class="{events[0].tone} cross" x="{x(at):.2%}" y="22">\u25bc'
        f"<title>{quoted(f'{line.unit} {at}: {events[0].text}')}"
        f"{f' and {len(events) - 1} more' if len(events) > 1 else ''}</title></text>"
        for at, events in at_step.items()
    ]
    items = [
        f'<li><b>{quoted(line.unit)} {event.at:,}</b><span class="{event.tone}">{quoted(event.text)}</span></li>'
        for event in line.events
    ]
    said = f'<ul class="events">{"".join(items[:EVENTS])}</ul>'
    if items[EVENTS:]:
        more = f"<summary>{count(len(items) - EVENTS)} more</summary>"
        said += f'<details class="fold">{more}<ul class="events">{"".join(items[EVENTS:])}</ul></details>'
    label = quoted(f"{line.title}: {count(len(line.events))} between {line.unit} {first} and {line.unit} {last}")
    places = [str(round(first + (last - first) * share / 4)) for share in range(5)] if last > first else [str(first)]
    return (
        f'<div class="frame bare"><svg class="plot strip" role="img" aria-label="{label}">'
        f'<line class="axis" x1="0" y1="28" x2="100%" y2="28"/>{"".join(marks)}</svg>'
        f"{_x_axis(places, lambda at: at / max(1, len(places) - 1), line.unit)}</div>"
        f"{said}"
    )


# Axes -------------------------------------------------------------------------------------------


def _stretched(paths: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">{"".join(paths)}</svg>'


def _at(share: float) -> str:
    return str(round(share * SIZE))


def _y_axis(ticks: Sequence[float], y: _Height, unit: str) -> str:
    texts = "".join(f'<text x="100%" y="{y(tick):.2%}">{_tick(tick)}</text>' for tick in ticks)
    above = f'<p class="unit">{quoted(unit)}</p>' if unit else ""
    return f'{above}<svg class="yaxis" aria-hidden="true">{texts}</svg>'


def _x_axis(labels: Sequence[str], x: _Place, across: str, *, most: int = AXIS) -> str:
    """Write some of the labels below a picture, the first and the last among them; the ends stand inside."""
    last = len(labels) - 1
    shown = sorted({round(last * share / (most - 1)) for share in range(most)}) if labels else []
    short = _shortened(labels, LABEL)
    texts = []
    for nth, at in enumerate(shown):
        if at not in (0, last):  # what there is not room for everywhere
            kind = "mid" if nth * 2 == len(shown) - 1 else "many"
        else:
            kind = "few" if 0.2 <= x(at) <= 0.8 else "start" if at == 0 else "end"
        text = _named(labels[at], short[at])
        texts.append(f'<text class="{kind}" x="{x(at):.2%}" y="18">{text}</text>')
    below = f'<text x="50%" y="34">{quoted(across)}</text>' if across else ""
    return f'<svg class="xaxis" aria-hidden="true">{"".join(texts)}{below}</svg>'


def _named(name: str, short: str) -> str:
    """Write a name; what is shortened says itself whole when it is pointed at."""
    return quoted(name) if short == printable(name) else f"<title>{quoted(name)}</title>{quoted(short)}"


def _shortened(names: Sequence[str], room: int) -> list[str]:
    """Write names in so many characters: where they do not fit, what most of them begin with is left out first.

    >>> _shortened(["model.layers.0.mlp", "model.layers.1.mlp", "model.norm"], 12)
    ['…0.mlp', '…1.mlp', 'model.norm']
    """
    texts = [printable(name) for name in names]
    if max(map(len, texts), default=0) > room:
        begins = Counter(text[: dot.end()] for text in texts for dot in re.finditer(r"\.", text))
        most = max((text for text, n in begins.items() if n * 3 >= len(texts) * 2), key=len, default="\0")
        texts = [f"\u2026{text.removeprefix(most)}" if text.startswith(most) else text for text in texts]
    return [middle(text, room) for text in texts]


def _tick(value: float) -> str:
    return (
        f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
        if abs(value) >= 1e5 or 0 < abs(value) < 1e-3
        else f"{value:g}"
    )


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last - first < 2:
            steps = [times * 10.0**power for power in range(first - 1, last + 1) for times in (1, 2, 5)]
            return [step for step in steps if low * 0.999 <= step <= high * 1.001]
        every = max(1, math.ceil((last - first) / 6))
        return [10.0**power for power in range(first, last + 1, every)]
    step = _round_step(low, high, 7)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _round_step(low: float, high: float, most: int = 5) -> float:
    """Return a distance of lines of which at most so many lie between these: 1, 2 or 5 times a power of ten."""
    rough = high / most - low / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough * 0.999)


def _decades(span: tuple[float, float]) -> tuple[float, float]:
    """Return the nearest of 1, 2 and 5 times a power of ten around these, within what a float holds."""
    low, high = min(307, max(-307, math.floor(math.log10(span[0])))), math.floor(math.log10(span[1]))
    least = max(times * 10.0**low for times in (1, 2, 5) if times == 1 or times * 10.0**low <= span[0])
    most = next((times * 10.0**high for times in (1, 2, 5, 10) if times * 10.0**high >= span[1]), sys.float_info.max)
    return least, most if most > least else 10 * least


def _padded(span: tuple[float, float]) -> tuple[float, float]:
    """Return round numbers around these, which may be one and the same."""
    low, high = span
    if high / 2 - low / 2 <= max(abs(low), abs(high)) * 1e-12:
        around = max(abs(high) / 2, sys.float_info.min * 1e9)
        low, high = low - around, high + around
    if not math.isfinite(high - low):
        return low, high
    step = _round_step(low, high)
    return math.floor(low / step) * step, math.ceil(high / step) * step
