"""What a row does not hold and its two tensors do: histograms, the worst elements, errors by token and by channel.

closeups = CloseUps(comparison)
closeups.of(row)                # parts, as far as the runs are still there
closeups.left_out()             # what was not looked at, in sentences
closeups.provenance()           # of every run
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np

from layerscope.compare.measure.operands import chunk_pairs, operand
from layerscope.compare.page.provenance import absent, provenance
from layerscope.compare.result import Comparison, Row
from layerscope.errors import LayerscopeError
from layerscope.report.parts import Curves, Fact, Facts, Fold, Heading, Histograms, Line, Part, Sentence
from layerscope.report.writing import many, number
from layerscope.stats.sketch import Sketch
from layerscope.stats.tensor_views import Array
from layerscope.store import Entry, Run, open_run

ELEMENTS = 24 << 20  # read for all rows together; a tensor of a quarter of it is not looked at
CURVES = 14  # rows with curves; they are the largest part of a page
WIDE = 96  # places of a curve; what is more is drawn by the worst of some neighbours
WORST = 5
OCTAVES = 16


class _BothSides(NamedTuple):
    """What one pass over both tensors told."""

    sketches: tuple[Sketch, Sketch]
    worst: list[tuple[tuple[int, ...], float, float]]
    tokens: Array
    channels: Array


@final
class CloseUps:
    """The runs of a comparison, opened where they still are, and how much of them may yet be read."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._elements = ELEMENTS
        self._curves = CURVES
        self._why: Counter[str] = Counter()
        addresses = {against.candidate: against.address for against in comparison}
        self._reference = _opened(comparison.address)
        self._candidates = {name: _opened(address) for name, address in addresses.items()}

    def of(self, row: Row) -> list[Part]:
        """Look at both tensors of a row; what cannot be looked at is counted under its reason."""
        found = self._entries(row)
        if isinstance(found, str):
            self._why[found] += 1
            return []
        reference, candidate = found
        count = math.prod(reference.shape or ())
        if count > ELEMENTS // 4 or count > self._elements:
            self._why["its tensors are too large to be read for a page"] += 1
            return []
        self._elements -= count
        try:
            seen = _looked(reference, candidate)
        except ImportError:
            self._why["its tensors are read with torch, which is not installed here"] += 1
            return []
        except (LayerscopeError, OSError, ValueError) as error:
            self._why[str(error)] += 1
            return []
        curves = self._curves > 0 and bool(seen.worst)
        self._curves -= curves
        return [*self._parts(row, seen, curves=curves)]

    def _parts(self, row: Row, seen: _BothSides, *, curves: bool) -> Iterator[Part]:
        names = (self._comparison.reference, row.candidate)
        yield from _histograms(names, seen.sketches)
        if seen.worst:
            items = tuple(Fact(str([*at]), f"{number(a)} \u2192 {number(b)}") for at, a, b in seen.worst)
            yield Facts("worst", items, f"Worst Elements, {names[0]} \u2192 {names[1]}", audience="page")
        if curves:
            yield from curve("error of each token", "token", seen.tokens)
            yield from curve("error of each channel", "channel", seen.channels)

    def _entries(self, row: Row) -> tuple[Entry, Entry] | str:
        """Return both records of a row, or why they cannot be looked at."""
        candidate = self._candidates.get(row.candidate)
        if self._reference is None or candidate is None or row.counterpart is None:
            return "a run is no longer where it was"
        when = row.moment
        sides = []
        for reader, point in ((self._reference, row.point), (candidate, row.counterpart)):
            try:
                records = reader.records(
                    point, epoch=when.epoch, step=when.step, batch=when.batch, call=when.call, rank=when.rank
                )
                there = [entry for entry in records if entry.point == point]
            except LayerscopeError:
                there = []
            if len(there) != 1:
                return "its records are not found by point and moment alone"
            if there[0].dtype is None or there[0].shape is None:
                return "only statistics were kept"
            sides.append(there[0])
        if sides[0].shape != sides[1].shape:
            return "its two tensors are of other shapes, or parts of tensors"
        return sides[0], sides[1]

    def left_out(self) -> Iterator[str]:
        """Say of how many rows there are no histograms, and why."""
        for why, count in self._why.items():
            yield f"{many(count, 'row')} without histograms and worst elements: {why}"
        if not self._curves:
            yield f"error by token and by channel is shown for the first {CURVES} rows that were looked at"

    def provenance(self) -> Iterator[Part]:
        """Say what made every run: model, versions, device, seed, taps, how complete it is; and this comparison."""
        comparison = self._comparison
        runs = [(comparison.reference, comparison.address, self._reference)]
        runs += [(one.candidate, one.address, self._candidates[one.candidate]) for one in comparison]
        runs += [("noise", address, _opened(address)) for address in comparison.noise]
        yield Heading("provenance")
        words = ["layerscope compare", comparison.address, *(against.address for against in comparison)]
        words += [f"--noise {address}" for address in comparison.noise]
        yield Sentence(" ".join(words), "quiet")
        for name, address, reader in runs:
            if reader is None:
                yield Sentence(f"{name} ({address}) is no longer there, or no run on disk", "quiet")
            else:
                yield provenance(reader, name)
                if tables := tuple(absent(reader)):
                    yield Fold(f"what {name} lacks", tables, tone="warn")


def _opened(address: str) -> Run | None:
    try:
        return open_run(address)
    except (LayerscopeError, OSError):
        return None


def _looked(reference: Entry, candidate: Entry) -> _BothSides:
    """Go through both tensors once, in float64."""
    one, other = operand(reference), operand(candidate)
    shape = one.shape
    width = shape[-1] if shape else 1
    sketches = [Sketch.of(np.empty(0)), Sketch.of(np.empty(0))]
    errors, powers = [], []
    worst: list[tuple[float, int, float, float]] = []
    at = 0
    for left, right in chunk_pairs(one, other):
        a, b = (_real(side.values(items)) for side, items in ((one, left), (other, right)))
        sketches = [sketch + Sketch.of(values) for sketch, values in zip(sketches, (a, b), strict=True)]
        with np.errstate(all="ignore"):
            d = np.where(np.isfinite(a) & np.isfinite(b), b - a, 0.0)
            power = np.where(np.isfinite(a), a, 0.0)
        size = np.abs(d)
        far = np.argpartition(size, -WORST)[-WORST:] if size.size > WORST else range(size.size)
        worst = sorted([*worst, *((float(-abs(d[i])), at + int(i), float(a[i]), float(b[i])) for i in far)])[:WORST]
        errors.append(d * d)
        powers.append(power * power)
        at += a.size
    square = np.concatenate(errors) if errors else np.empty(0)
    total = np.concatenate(powers) if powers else np.empty(0)
    places = [(tuple(map(int, np.unravel_index(n, shape))), a, b) for far, n, a, b in worst if far]
    tokens = channels = np.empty(0)
    if square.size and len(shape) > 1 and width > 1:
        tokens = _relative(square.reshape(-1, width).sum(1), total.reshape(-1, width).sum(1))
        channels = _relative(square.reshape(-1, width).sum(0), total.reshape(-1, width).sum(0))
    return _BothSides((sketches[0], sketches[1]), places, tokens, channels)


def _real(values: Array) -> Array:
    return np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)


def _relative(errors: Array, powers: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.where(errors == 0, 0.0, np.sqrt(errors / powers))


def _histograms(names: tuple[str, str], sketches: tuple[Sketch, Sketch]) -> Iterator[Part]:
    """Lay both histograms on one grid: powers of two, and one bin around zero that is the same for both."""
    found = [sketch.histogram() for sketch in sketches]
    away = [abs(edge) for one in found for edge in one.edges if edge]
    if not away:
        return
    near = max(min(away), max(away) / 2.0**OCTAVES)
    tallies: list[Counter[float]] = [Counter(), Counter()]
    for tally, one in zip(tallies, found, strict=True):
        for low, high, count in zip(one.edges, one.edges[1:], one.counts, strict=False):
            tally[-near if low < 0 < high or max(-low, high) <= near else low] += count
    lows = [low for tally in tallies for low in tally]
    edges = [min(lows)]
    while edges[-1] < max(lows):
        edges.append(-edges[-1] if edges[-1] == -near else edges[-1] * (2.0 if edges[-1] > 0 else 0.5))
    last = edges[-1]
    edges.append(-last if last == -near else last * (2.0 if last > 0 else 0.5))
    counts = [(name, tuple(tally[low] for low in edges[:-1])) for name, tally in zip(names, tallies, strict=True)]
    yield Histograms("histogram", "values, the reference below", tuple(edges), tuple(counts), "page")


def _largest(sizes: Array) -> float | None:
    """Return the largest, to six digits, which is more than a picture shows: a page is sent by mail."""
    there = sizes[~np.isnan(sizes)]
    return float(f"{there.max():.6g}") if there.size else None


def curve(title: str, what: str, sizes: Array, measure: str = "relative L2") -> Iterator[Part]:
    """Draw a number for each token or channel; of many neighbours, the largest."""
    if sizes.size < 2:
        return
    every = math.ceil(sizes.size / WIDE)
    edges = range(0, sizes.size, every)
    values = [_largest(sizes[at : at + every]) for at in edges]
    labels = [f"{what} {at}" if every == 1 else f"{what} {at} to {min(at + every, sizes.size) - 1}" for at in edges]
    said = f"{title}, the largest of each {every}" if every > 1 else title
    yield Curves("curve", said, tuple(labels), (Line(measure, tuple(values)),), unit=measure, audience="page")
