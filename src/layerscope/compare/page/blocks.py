"""Everything about one compared pair, under the labels that people search for.

Layer 0 - Comparison Results
Error Metrics:
  MSE:                 1.234567e-04
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from layerscope.compare.measure.metrics import PERCENTILES, Metrics, Side
from layerscope.compare.page.bands import Bands
from layerscope.compare.result import Kind, Row
from layerscope.report.parts import Fact, Facts, Heading, Part, Tone
from layerscope.report.writing import number, percent

TONES: dict[Kind, Tone] = {
    "same": "good",
    "noise": "good",
    "inherited": "warn",
    "root": "bad",
    "nonfinite": "bad",
    "degenerate": "warn",
    "missing": "warn",
    "unpaired": "warn",
}


def block(row: Row, name: str, *, reference: str, bands: Bands) -> Iterator[Part]:
    """Show everything about one row; `name` is what it is called, `reference` what it is compared with."""
    m = row.metrics
    assert m is not None
    trusted = _shouted(reference)
    yield Heading(f"{label(name)} - Comparison Results")
    yield _facts("Verdict:", _judged(row, m, bands), tone=TONES[row.kind])
    yield _facts(f"{trusted} Reference Statistics:", _own(m.reference))
    yield _facts("Mode Output Statistics:", _own(m.candidate))
    yield _facts(f"Difference (Mode - {trusted}):", _difference(m))
    yield _facts("Error Metrics:", (("MSE:", f"{m.mse:.6e}"), ("RMSE:", exact(m.rmse)), ("MAE:", exact(m.mae))))
    yield _facts("Relative Metrics:", _relative(m))
    yield _facts("Absolute Difference Percentiles:", _percentiles(m))


def _facts(title: str, items: Iterable[tuple[str, str]], *, tone: Tone = "plain") -> Facts:
    facts = (Fact(label, value, tone=tone if i == 0 else "plain") for i, (label, value) in enumerate(items))
    return Facts("block", tuple(facts), title, audience="page")


def _judged(row: Row, m: Metrics, bands: Bands) -> Iterator[tuple[str, str]]:
    yield "Kind:", row.kind
    yield "Reason:", row.because
    if row.ratio is not None:
        floor = f" (floor {number(row.floor.error)}, {row.floor.source})" if row.floor is not None else ""
        yield "Ratio to Floor:", number(row.ratio) + floor
    words = {"mse": "MSE", "rmse": "RMSE", "mae": "MAE", "sqnr": "SQNR"}
    yield "Bands:", ", ".join(f"{words.get(k, k.replace('_', ' '))} {word}" for k, word in bands.of(m).items())
    if row.counterpart is not None and (row.counterpart != row.point or row.method not in ("", "exact")):
        yield "Paired With:", f"{row.counterpart} ({row.method})"
    shape = "\u00d7".join(map(str, m.shape)) or "one value"
    dtypes = (
        m.reference.dtype if m.reference.dtype == m.candidate.dtype else f"{m.reference.dtype} and {m.candidate.dtype}"
    )
    yield "Shape:", f"{shape}, {dtypes}"
    if m.nonfinite.either:
        where = f", first at {_index(m.nonfinite.first)}" if m.nonfinite.first is not None else ""
        yield (
            "Not Finite:",
            f"{m.nonfinite.either:,} of {m.count:,} elements, {m.nonfinite.differing:,} differ{where}",
        )
    if m.tokens is not None:
        yield (
            "Worst Token:",
            f"number {m.tokens.worst} of {m.tokens.count:,}, relative L2 {number(m.tokens.error)} "
            f"(median {number(m.tokens.median)}, 90th {number(m.tokens.p90)})",
        )
    if m.sets is not None:
        yield (
            "Changed Sets:",
            f"{m.sets.changed:,} of {m.sets.rows:,}, {m.sets.reordered:,} more in another order; "
            f"{percent(m.sets.overlap)} shared",
        )


def _own(side: Side) -> Iterator[tuple[str, str]]:
    yield "Mean:", exact(side.mean)
    yield "Std:", exact(side.std)
    yield "Range:", f"[{exact(side.min)}, {exact(side.max)}]"
    counts = {"NaN": side.nan, "+Inf": side.posinf, "-Inf": side.neginf}
    if not side.finite:
        yield "Not Finite:", ", ".join(f"{n:,} {word}" for word, n in counts.items() if n)


def _difference(m: Metrics) -> Iterator[tuple[str, str]]:
    yield "Mean Diff:", exact(m.mean)
    yield "Std Diff:", exact(m.std)
    yield "Mean Abs Diff:", exact(m.mean_abs)
    yield "Max Abs Diff:", exact(m.max_abs)
    if m.worst is not None:
        yield "Worst Element:", f"{_index(m.worst.index)}: {exact(m.worst.reference)} → {exact(m.worst.candidate)}"
    yield "Equal Elements:", f"{m.equal:,} of {m.count:,} ({m.fraction_equal:.2%})"


def _relative(m: Metrics) -> Iterator[tuple[str, str]]:
    yield "Relative MSE:", f"{m.relative_mse:.6e} ({m.relative_mse * 100:6.3f}%)"
    yield "Relative MAE:", f"{m.relative_mae:.6e} ({m.relative_mae * 100:6.3f}%)"
    yield "Correlation:", near_one(m.correlation, digits=9)
    yield "Cosine Similarity:", near_one(m.cosine, digits=9)
    yield "Relative L2:", f"{m.relative_l2:.6e}"
    yield "SQNR:", f"{m.sqnr:.2f} dB"
    yield "Max Relative Diff:", exact(m.max_relative)
    yield "Mean Relative Diff:", exact(m.mean_relative)
    yield "Best Scale:", exact(m.scale)


def _percentiles(m: Metrics) -> Iterator[tuple[str, str]]:
    for rank, value in zip(PERCENTILES, m.percentiles, strict=True):
        yield f"{rank}th (Median):" if rank == 50 else f"{rank}th:", exact(value)
    bound = m.percentile_bound
    yield "Bound:", "exact" if bound == 0 else f"each within {bound * 100:.2g}% of its value"


# How numbers and names are written --------------------------------------------------------------


def label(name: str) -> str:
    """Write `layers.0`, as the readers of other people's layouts name a layer, the way their users do.

    >>> label("layers.0"), label("model.layers.0"), label("layers.3 at step=2")
    ('Layer 0', 'model.layers.0', 'Layer 3 at step=2')
    """
    number, _, rest = name.removeprefix("layers.").partition(" ")
    return f"Layer {number} {rest}".rstrip() if name.startswith("layers.") and number.isdecimal() else name


def _shouted(name: str) -> str:
    """Write the name of a number format in capitals: fp32 is FP32."""
    return name.upper() if name.lower() in ("fp32", "fp16", "bf16", "fp64") else name


def exact(value: float) -> str:
    """Write a number with six decimals, or with an exponent where those would hide it.

    >>> [exact(x) for x in (0.0123456789, 0.0, 1e-9, -2e8)]
    ['0.012346', '0.000000', '1.000000e-09', '-2.000000e+08']
    """
    return f"{value:.6f}" if value == 0 or 1e-3 <= abs(value) < 1e7 or not math.isfinite(value) else f"{value:.6e}"


def near_one(value: float, *, digits: int = 6) -> str:
    """Write decimals cut off, not rounded: only what is one is written as one.

    >>> [near_one(x) for x in (1.0, 0.99999999, 0.5, -0.25, float("nan"))]
    ['1.000000', '0.999999', '0.500000', '-0.250000', 'nan']
    """
    if not math.isfinite(value):
        return number(value)
    return f"{math.trunc(value * 10**digits) / 10**digits:.{digits}f}"


def _index(index: tuple[int, ...] | None) -> str:
    return f"[{', '.join(map(str, index or ()))}]"
