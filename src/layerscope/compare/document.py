"""A comparison as a document: the verdict in a sentence, then the evidence, row by row.

    terminal.render(document(comparison), width=80)

JSON holds everything, whatever the page shows. Beside `title` and `sentences` its keys are:

    verdict            same, noise, quantised, cannot tell or differs; the worst of the candidates'
    because            its reason
    reference          {name, address, layout}
    noise              addresses of the noise runs
    bands              the bands as text, one per line of `--bands`
    first_divergence   {candidate, point, moment, kind, because}, or null
    candidates         one for each: candidate, address, layout, verdict, because, basis, notes, unread (records
                       that could not be read), first_divergence, kinds {kind: rows}, rows, compared (rows measured),
                       first_layer and last_layer {point, mse, mae}, average_correlation; the last three are null where
                       nothing was measured
    rows               one for each aligned pair or unpaired point: candidate, point, name, side, moment {epoch, step,
                       batch, call, rank}, kind, because, counterpart, method, reference_has, ratio,
                       floor {error, source}, bands {measure: word}, metrics {...}; null where there is none

`metrics` has the names of `Metrics`; numbers that JSON has no word for are the strings NaN, Infinity and -Infinity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from layerscope.compare.bands import PUBLISHED, Bands
from layerscope.compare.blocks import TONES, block, exact, near_one
from layerscope.compare.rows import KINDS, Against, Comparison, Kind, Row
from layerscope.points import SIDE_TITLES, leaf_text
from layerscope.report.parts import (
    Cell,
    Column,
    Data,
    Document,
    Heading,
    Notes,
    Part,
    Profile,
    Sentence,
    Table,
    Tone,
    Value,
)
from layerscope.report.writing import many

__all__ = ["Detail", "document", "overview"]

Detail = Literal["auto", "all", "none"]

FEW = 8  # so many rows have a block each without being asked
NAMED = 3  # of many rows with one reason, so many are named
MANY = 200  # beyond so many lines a table leaves out those that agree
BY_WEIGHT: tuple[Kind, ...] = (
    "nonfinite",
    "root",
    "inherited",
    "degenerate",
    "missing",
    "unpaired",
    "noise",
    "same",
)


def document(
    comparison: Comparison, *, detail: Detail = "auto", bands: Bands = PUBLISHED, summary: bool | None = None
) -> Document:
    """Build the page of a comparison; `summary` asks for the table of modes, which several candidates always have.

    `detail` says which rows have a block of their own: a few that matter, all, or none.
    """
    several = len(comparison) > 1
    names = ", ".join(a.candidate for a in comparison)
    parts = overview(comparison, summary=summary)
    for against in comparison:
        if _judged(against) and (not several or detail == "all" or against.verdict.word in ("differs", "quantised")):
            parts += _evidence(comparison, against, detail=detail, bands=bands, several=several)
    parts += _data(comparison, bands)
    return Document(f"{comparison.reference} against {names}", tuple(parts))


def overview(comparison: Comparison, *, summary: bool | None = None) -> list[Part]:
    """Return what stands above the evidence: the verdicts and, of several candidates, the table and the profiles."""
    parts: list[Part] = [*opening(comparison)]
    if len(comparison) > 1 or summary:
        parts += modes_table(comparison)
        parts += _profiles(comparison)
    return parts


# The sentences on top ---------------------------------------------------------------------------


def opening(comparison: Comparison) -> Iterator[Part]:
    """Say the verdict and its reason, how many rows there are of each kind, on what it rests, and what is partial."""
    several = len(comparison) > 1
    for against in comparison:
        said, tone = _verdict(comparison.reference, against)
        yield Sentence(f"{said} ({_counted(against.rows)})" if several and against.rows else said, tone)
        first = against.first_divergence
        if first is not None and str(first) not in against.verdict.because:
            yield Sentence(f"the first divergence is {_called(first, against.rows)}: {first.because}", "bad")
        if not several and against.rows:
            yield Sentence(_counted(against.rows))
    bases = _grouped((against.basis, against.candidate) for against in comparison if _judged(against))
    for basis, whose in bases.items():
        if several and len(bases) > 1:
            yield Sentence(f"the verdict on {', '.join(whose)} rests on {basis}", "quiet")
        else:
            yield Sentence(f"{'all verdicts rest' if several else 'the verdict rests'} on {basis}", "quiet")
    notes = _grouped((note, against.candidate) for against in comparison for note in against.notes)
    for note, whose in notes.items():
        yield Sentence(note if len(whose) == len(comparison) else f"{', '.join(whose)}: {note}", "warn")


def _grouped(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Gather of whom each thing is said, so that it is said once."""
    found: dict[str, list[str]] = {}
    for what, of in said:
        found.setdefault(what, []).append(of)
    return found


def _verdict(reference: str, against: Against) -> tuple[str, Tone]:
    because = against.verdict.because
    if not _judged(against):
        return f"{against.candidate} could not be compared with {reference}: {because}", "bad"
    if against.verdict.word == "differs":
        return f"{against.candidate} differs from {reference}: {because}", "bad"
    if against.verdict.word == "quantised":
        return f"{against.candidate} is {reference}, quantised: {because}", "good"
    if against.verdict.word == "cannot tell":
        return f"whether {against.candidate} agrees with {reference} cannot be told: {because}", "warn"
    agrees = "is the same as" if against.verdict.word == "same" else "agrees up to noise with"
    partial = len(_judged(against)) < len(against.rows)
    return f"{against.candidate} {agrees} {reference}: {because}", "warn" if partial else "good"


def _judged(against: Against) -> list[Row]:
    """Return the rows that say something about values, by tensors or by statistics."""
    return [row for row in against.rows if row.kind not in ("missing", "unpaired")]


def _counted(rows: Sequence[Row]) -> str:
    found = Counter(row.kind for row in rows)
    kinds = ", ".join(f"{found[kind]:,} {kind}" for kind in KINDS if found[kind])
    moments = len({row.moment for row in rows})
    return f"{many(len(rows), 'row')}: {kinds}" + (f"; {moments:,} moments" if moments > 1 else "")


def _called(row: Row, among: Iterable[Row]) -> str:
    """Name a row, with its moment where the others are of several."""
    several = any(other.moment != row.moment for other in among)
    return f"{row} at {row.moment}" if several else str(row)


# Several candidates -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layer:
    """MSE and MAE of one point over all its moments."""

    point: str
    mse: float
    mae: float


def _ends(comparison: Comparison) -> tuple[str, str] | None:
    """Return the names of the first and the last layer: numbered modules where there are some, else any point.

    Of numbered modules within each other, the outermost are the layers.
    """
    rows = [row for row in comparison.rows if row.point.side == "output" and row.reference_has]
    names = list(dict.fromkeys(row.name for row in rows))
    numbered = [n for n in names if n.rpartition(".")[2].isdecimal()]
    if not names:
        return None
    outermost = min((n.count(".") for n in numbered), default=0)
    layers = [n for n in numbered if n.count(".") == outermost] or names
    if numbered:
        layers.sort(key=lambda n: int(n.rpartition(".")[2]))
    return layers[0], layers[-1]


def _layer(against: Against, name: str) -> _Layer | None:
    found = [row.metrics for row in against.compared if row.name == name and row.point.side == "output" and row.metrics]
    weight = sum(m.compared for m in found)
    if not weight:
        return None
    mse, mae = (sum(getattr(m, k) * m.compared for m in found if m.compared) / weight for k in ("mse", "mae"))
    return _Layer(name, mse, mae)


def _average_correlation(against: Against) -> float | None:
    rows = [row for row in against.compared if row.point.side == "output" and row.metrics]
    layers = [row for row in rows if row.name.rpartition(".")[2].isdecimal()]  # and not the components inside them
    defined = [row.metrics.correlation for row in layers or rows if row.metrics]
    defined = [c for c in defined if not math.isnan(c)]
    return sum(defined) / len(defined) if defined else None


def modes_table(comparison: Comparison) -> Iterator[Part]:
    ends = _ends(comparison)
    at = ends[0].rpartition(".")[2] if ends else ""
    first = f"Layer {at}" if at.isdecimal() else "First Layer"
    columns = [
        Column("mode", "Mode", "name"),
        Column("first_mse", f"{first} MSE", rank=0),
        Column("first_mae", f"{first} MAE", rank=4),
        Column("last_mse", "Last Layer MSE", rank=2),
        Column("last_mae", "Last Layer MAE", rank=5),
        Column("correlation", "Avg Corr", rank=3),
        Column("verdict", "Verdict"),
        Column("why", "First Divergence", "name", rank=1),
    ]
    yield Heading(f"SUMMARY TABLE - All Modes vs {comparison.reference}")
    yield Table.of("summary", columns, (_summary_cells(against, ends) for against in comparison), audience="page")
    for alike in _alike(comparison):
        yield Sentence(f"{' = '.join(alike)} alike: no measure of any row tells them apart", "quiet")


def _alike(comparison: Comparison) -> list[list[str]]:
    """Return the candidates that share every number: some modes are the same arithmetic under two names."""
    groups: list[tuple[list[object], list[str]]] = []
    for against in comparison:
        numbers: list[object] = [(row.point, row.moment, row.metrics) for row in against.compared]
        for known, names in groups:
            if numbers and known == numbers:
                names.append(against.candidate)
                break
        else:
            groups.append((numbers, [against.candidate]))
    return [names for _, names in groups if len(names) > 1]


def _summary_cells(against: Against, ends: tuple[str, str] | None) -> Iterator[Cell | Value]:
    yield against.candidate
    for name in ends or ("", ""):
        layer = _layer(against, name)
        yield f"{layer.mse:.6e}" if layer else None
        yield exact(layer.mae) if layer else None
    correlation = _average_correlation(against)
    yield near_one(correlation) if correlation is not None else None
    if not _judged(against):
        yield Cell("not compared", "bad")
        yield Cell(against.verdict.because, "bad")
        return
    yield Cell(against.verdict.word, "bad" if against.verdict.word == "differs" else "good")
    first = against.first_divergence
    yield _called(first, against.rows) if first is not None else None


def _profiles(comparison: Comparison) -> Iterator[Part]:
    """Draw each candidate's error over depth as a line, all on one scale."""
    names = list(dict.fromkeys(str(row) for row in comparison.rows if row.point.side == "output" and row.reference_has))
    lines = [(against.candidate, _worst_errors(against, names)) for against in comparison if against.compared]
    positive = [v for _, values in lines for v in values if v is not None and 0 < v < math.inf]
    if not positive or len(names) < 2:
        return
    low, high = _decades(positive)
    yield Heading("error over depth")
    yield Sentence(
        f"relative L2, {names[0]} to {names[-1]}; one logarithmic scale for all, {low:g} to {high:g}{_signs(lines)}",
        "quiet",
        audience="page",
    )
    for candidate, values in lines:
        yield Profile("error", candidate, tuple(names), values, log=True, span=(low, high), audience="page")


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten around these, a decade apart at least, so that what is alike looks alike."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _worst_errors(against: Against, names: Sequence[str]) -> tuple[float | None, ...]:
    """Return the largest relative L2 error of each name over its moments; what is not finite stands out."""
    found: dict[str, float] = {}
    for row in against.compared:
        assert row.metrics is not None
        error = math.nan if row.kind == "nonfinite" else row.metrics.relative_l2
        before = found.get(str(row), 0.0)
        found[str(row)] = before if math.isnan(before) or error < before else error
    return tuple(found.get(name) for name in names)


def _signs(lines: Sequence[tuple[str, tuple[float | None, ...]]]) -> str:
    every = [v for _, values in lines for v in values]
    said = []
    if any(v == 0 for v in every):
        said.append("0 is exactly equal")
    if any(v is not None and not math.isfinite(v) for v in every):
        said.append("! is not finite")
    if None in every:
        said.append("a gap was not compared")
    return "".join(f"; {s}" for s in said)


# One candidate ----------------------------------------------------------------------------------


def _evidence(
    comparison: Comparison, against: Against, *, detail: Detail, bands: Bands, several: bool
) -> Iterator[Part]:
    of = f"{against.candidate}: " if several else ""
    neuron = "neuron" in (comparison.layout, against.layout)
    for side, title in SIDE_TITLES.items():
        rows = [row for row in _judged(against) if row.point.side == side]
        if rows:
            yield from _side_parts(rows, f"{of}{title}", neuron=neuron, everything=detail == "all")
            if side == "output" and not several:
                yield from _own_profile(against)
    roots = [row for row in against.rows if row.kind in ("root", "nonfinite", "degenerate")]
    yield from _noted(roots if len(roots) > 1 else [], f"{of}what parts by itself", against)
    apart = [row for row in against.rows if row.kind in ("missing", "unpaired")]
    yield from _noted(apart, f"{of}not compared", against)
    chosen = _in_detail(against, detail, several=several)
    for row in chosen:
        yield from block(row, _called(row, against.rows), reference=comparison.reference, bands=bands)
    left = len(against.compared) - len(chosen)
    if chosen and left > 0:
        yield Sentence(f"{many(left, 'more row')} in the same detail: --detail all", "quiet", audience="page")


def _noted(rows: Sequence[Row], title: str, against: Against) -> Iterator[Part]:
    """List rows with their reasons; what many have in common is said once."""
    alike: dict[tuple[Kind, str], list[str]] = {}
    for row in rows:
        alike.setdefault((row.kind, row.because), []).append(_called(row, against.rows))
    items = []
    for (kind, because), names in alike.items():
        if len(names) > NAMED:
            names = [f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more"]
        items += [Sentence(f"{name}: {kind}, {because}", TONES[kind]) for name in names]
    if items:
        yield Heading(title)
        yield Notes("noted", tuple(items), audience="page")


def _own_profile(against: Against) -> Iterator[Part]:
    names = list(dict.fromkeys(str(row) for row in against.compared if row.point.side == "output"))
    values = _worst_errors(against, names)
    positive = [v for v in values if v is not None and 0 < v < math.inf]
    if len(names) > FEW and positive:
        span = _decades(positive)
        yield Profile("error", "relative L2 (log)", tuple(names), values, log=True, span=span, audience="page")


def _in_detail(against: Against, detail: Detail, *, several: bool) -> list[Row]:
    """Choose the rows that have a block: all of a few, else those one would ask for first."""
    rows = against.compared
    if detail == "none" or (several and detail == "auto"):
        return []
    if detail == "all" or len(rows) <= FEW:
        return rows
    worst = max(rows, key=lambda row: _finite(row.ratio))
    outputs = [row for row in rows if row.point.side == "output"] or rows
    wanted = [against.first_divergence, worst, outputs[0], outputs[-1]]
    return [row for row in rows if any(row is w for w in wanted)]


def _finite(value: float | None) -> float:
    return -1.0 if value is None or math.isnan(value) else value


def _side_parts(rows: Sequence[Row], title: str, *, neuron: bool, everything: bool) -> Iterator[Part]:
    """Show a table of one side: a line per point, the worst of its moments."""
    of_point: dict[str, list[Row]] = {}
    for row in rows:
        of_point.setdefault(str(row), []).append(row)
    moments = max(map(len, of_point.values()))
    worst = [min(some, key=_weight) for some in of_point.values()]
    shown = worst if everything or len(worst) <= MANY else _worth_a_line(worst)
    yield Heading(f"{title}, the worst of {moments:,} moments each" if moments > 1 else title)
    yield _row_table(shown, neuron=neuron, several_moments=moments > 1)
    if len(shown) < len(worst):
        yield Sentence(
            f"{len(worst) - len(shown):,} rows that agree are left out; --detail all shows them",
            "quiet",
            audience="page",
        )


def _weight(row: Row) -> tuple[int, float]:
    error = row.ratio if row.ratio is not None else row.metrics.relative_l2 if row.metrics else 0.0
    return BY_WEIGHT.index(row.kind), -_finite(error)


def _worth_a_line(rows: Sequence[Row]) -> list[Row]:
    """Leave out what agrees, but for the ends and what stands beside something that does not."""
    agrees = [row.kind in ("same", "noise") for row in rows]
    last = len(rows) - 1
    return [
        row
        for i, row in enumerate(rows)
        if i in (0, last) or not (agrees[max(0, i - 1)] and agrees[i] and agrees[min(last, i + 1)])
    ]


def _row_table(rows: Sequence[Row], *, neuron: bool, several_moments: bool) -> Table:
    renamed = any(row.counterpart is not None and row.counterpart != row.point for row in rows)
    unusual = any(row.method not in ("", "exact") for row in rows)
    columns = [
        Column("point", "layer", "name"),
        *([Column("counterpart", "candidate's name", "name", rank=4)] if renamed else []),
        *([Column("moment", "moment", rank=2)] if several_moments else []),
        Column("kind", "kind"),
        *([Column(key, title, "number") for key, title in _NEURON] if neuron else []),
        Column("ratio", "ratio", "number", rank=1 if neuron else 0),
        Column("relative_l2", "relative L2", "number", rank=2 if neuron else 0),
        Column("bar", "over depth", "bar", rank=3, audience="page", log=_wide(rows)),
        *([] if neuron else [Column(key, title, kind, rank) for key, title, kind, rank in _USUAL]),
        Column("mse", "MSE", "number", rank=6),
        Column("correlation", "correlation", "number", rank=4),
        Column("sqnr", "SQNR dB", "number", rank=7),
        Column("fraction_equal", "equal", "percent", rank=8),
        *([Column("method", "paired by", rank=5)] if unusual else []),
    ]
    return Table.of("table", columns, (_row_cells(row, columns) for row in rows), audience="page")


def _wide(rows: Sequence[Row]) -> bool:
    """Tell whether the errors are more than a decade apart; closer ones would look further apart than they are."""
    errors = [row.metrics.relative_l2 for row in rows if row.metrics is not None]
    positive = [e for e in errors if 0 < e < math.inf]
    return bool(positive) and max(positive) > 10 * min(positive)


_NEURON = (
    ("max_abs", "max abs"),
    ("mean_abs", "mean abs"),
    ("max_relative", "max rel"),
    ("mean_relative", "mean rel"),
    ("cosine", "cosine"),
)
_USUAL: tuple[tuple[str, str, Literal["number"], int], ...] = (
    ("max_abs", "max abs", "number", 2),
    ("mean_abs", "mean abs", "number", 5),
    ("cosine", "cosine", "number", 6),
)


def _row_cells(row: Row, columns: Sequence[Column]) -> Iterator[Cell | Value]:
    tone, metrics = TONES[row.kind], row.metrics
    for column in columns:
        match column.key:
            case "point":
                place = row.point.place + leaf_text(row.point.leaf)  # the title above says which side
                yield Cell(place, tone if tone != "good" else "plain")
            case "counterpart":
                yield str(row.counterpart).removesuffix(":output")
            case "moment":
                yield str(row.moment)
            case "kind":
                yield Cell(row.kind, tone)
            case "ratio":
                yield row.ratio
            case "method":
                yield row.method
            case _ if metrics is None:
                yield None
            case "bar":
                yield metrics.relative_l2 if math.isfinite(metrics.relative_l2) else None
            case "correlation" | "cosine" as key:
                yield Cell(None, text=near_one(getattr(metrics, key)))
            case key:
                yield getattr(metrics, key)


# For machines -----------------------------------------------------------------------------------


def _data(comparison: Comparison, bands: Bands) -> Iterator[Data]:
    verdict = comparison.verdict
    yield Data("verdict", verdict.word)
    yield Data("because", verdict.because)
    reference = {"name": comparison.reference, "address": comparison.address, "layout": comparison.layout}
    yield Data("reference", reference)
    yield Data("noise", comparison.noise)
    yield Data("bands", [str(band) for band in bands])
    yield Data("first_divergence", _divergence(comparison.first_divergence))
    ends = _ends(comparison)
    yield Data("candidates", [_candidate(against, ends) for against in comparison])
    yield Data("rows", lambda: [_row(row, bands) for row in comparison.rows])


def _divergence(row: Row | None) -> dict[str, Value] | None:
    if row is None:
        return None
    return {
        "candidate": row.candidate,
        "point": str(row.point),
        "moment": asdict(row.moment),
        "kind": row.kind,
        "because": row.because,
    }


def _candidate(against: Against, ends: tuple[str, str] | None) -> dict[str, Value]:
    found = Counter(row.kind for row in against.rows)
    first, last = (_layer(against, name) for name in ends) if ends else (None, None)
    return {
        "candidate": against.candidate,
        "address": against.address,
        "layout": against.layout,
        "verdict": against.verdict.word,
        "because": against.verdict.because,
        "basis": against.basis,
        "notes": against.notes,
        "unread": against.unread,
        "first_divergence": _divergence(against.first_divergence),
        "kinds": {kind: found[kind] for kind in KINDS},
        "rows": len(against.rows),
        "compared": len(against.compared),
        "first_layer": asdict(first) if first else None,
        "last_layer": asdict(last) if last else None,
        "average_correlation": _average_correlation(against),
    }


def _row(row: Row, bands: Bands) -> dict[str, Value]:
    return {
        "candidate": row.candidate,
        "point": str(row.point),
        "name": row.name,
        "side": row.point.side,
        "moment": asdict(row.moment),
        "kind": row.kind,
        "because": row.because,
        "counterpart": str(row.counterpart) if row.counterpart is not None else None,
        "method": row.method,
        "reference_has": row.reference_has,
        "ratio": row.ratio,
        "floor": asdict(row.floor) if row.floor is not None else None,
        "bands": dict(bands.of(row.metrics)) if row.metrics is not None else None,
        "metrics": row.metrics.to_json() if row.metrics is not None else None,
        "excess": row.excess,
        "evidence": row.evidence,
        "checked": row.checked,
        "arithmetic": row.arithmetic,
        "chaotic": row.chaotic,
        "numbers": row.numbers._asdict() if row.numbers is not None else None,
    }
