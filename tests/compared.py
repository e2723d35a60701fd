"""Comparisons written by hand, with the numbers that plain numpy gives in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from layerscope.compare.measure.metrics import PERCENTILES, Metrics, NonfiniteCounts, Side, Worst
from layerscope.compare.result import Against, Comparison, Floor, Kind, Row, Verdict
from layerscope.points import Moment, Point


def measured(reference: np.ndarray, candidate: np.ndarray) -> Metrics:
    """What plain numpy says of two finite arrays."""
    r, c = (np.asarray(a, dtype=np.float64) for a in (reference, candidate))
    d = c - r
    with np.errstate(all="ignore"):
        mse, mae = np.mean(d * d), np.mean(abs(d))
        at = np.unravel_index(np.argmax(abs(d)), d.shape)
        constant = r.std() == 0 or c.std() == 0
        return Metrics(
            shape=r.shape,
            count=r.size,
            compared=r.size,
            bitwise=bool((r == c).all()),
            equal=int((r == c).sum()),
            reference=_side(r),
            candidate=_side(c),
            mean=float(d.mean()),
            std=float(d.std()),
            mae=float(mae),
            max_abs=float(abs(d).max()),
            worst=Worst(tuple(map(int, at)), float(r[at]), float(c[at])),
            mse=float(mse),
            relative_mse=float(mse / np.mean(r * r)),
            relative_mae=float(mae / np.mean(abs(r))),
            max_relative=float((abs(d) / (abs(r) + 1e-8)).max()),
            mean_relative=float((abs(d) / (abs(r) + 1e-8)).mean()),
            correlation=float("nan") if constant else float(np.corrcoef(r.ravel(), c.ravel())[0, 1]),
            cosine=float((r * c).sum() / np.linalg.norm(r) / np.linalg.norm(c)),
            sqnr=float(10 * np.log10(np.mean(r * r) / mse)),
            relative_l2=float(np.linalg.norm(d) / np.linalg.norm(r)),
            scale=float((r * c).sum() / (r * r).sum()),
            percentiles=tuple(float(np.percentile(abs(d), p)) for p in PERCENTILES),
            percentile_bound=0.0,
            nonfinite=NonfiniteCounts(0, 0, None),
        )


def metrics(*, nan: int = 0, **changed: object) -> Metrics:
    """Some pair of eight values with these numbers in place of its own, and so many NaN in the candidate."""
    base = measured(np.arange(8.0), np.arange(8.0) + 0.5)
    if nan:
        lost = replace(base.candidate, nan=nan)
        base = replace(base, candidate=lost, compared=8 - nan, nonfinite=NonfiniteCounts(nan, nan, (0,)))
    return replace(base, **changed)


def row(name: str, kind: Kind, *, candidate: str = "int8", error: float = 1e-3, **changed: object) -> Row:
    """One row as a comparison would have it: the candidate is the reference times 1 + error."""
    point = Point.parse(name)
    values = np.linspace(-1, 2, 24).reshape(1, 4, 6)
    measures = kind not in ("missing", "unpaired")
    defaults: dict[str, object] = {
        "counterpart": point if measures else None,
        "method": "exact" if measures else "",
        "metrics": measured(values, values * (1 + error)) if measures else None,
        "floor": Floor(1e-3, "estimate") if measures else None,
        "ratio": error / 1e-3 if measures else None,
    }
    defaults |= {"moment": Moment(), "because": f"because of {kind}"}
    return Row(point=point, candidate=candidate, kind=kind, **{**defaults, **changed})


def against(candidate: str, rows: Sequence[Row], *, notes: Sequence[str] = (), layout: str = "layerscope") -> Against:
    """One candidate whose verdict follows from its rows."""
    rows = tuple(replace(r, candidate=candidate) for r in rows)
    first = next((r for r in rows if r.kind in ("root", "nonfinite")), None)
    if first is not None:
        verdict = Verdict("differs", f"{first} parts first: {first.because}")
    elif any(r.kind == "noise" for r in rows):
        verdict = Verdict("noise", "every row is within its floor")
    else:
        verdict = Verdict("same", "every value is equal")
    basis = "an estimate of the rounding of bfloat16; a noise run would say more"
    return Against(candidate, f"runs/{candidate}", layout, rows, verdict, basis, tuple(notes))


def comparison(*candidates: Against, layout: str = "layerscope", reference: str = "fp32") -> Comparison:
    """A comparison with these candidates."""
    return Comparison(reference, f"runs/{reference}", layout, candidates)


def _side(values: np.ndarray) -> Side:
    return Side(
        dtype="float32",
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        max=float(values.max()),
        rms=float(np.sqrt(np.mean(values**2))),
        mean_abs=float(abs(values).mean()),
        nan=0,
        posinf=0,
        neginf=0,
        zeros=int((values == 0).sum()),
    )
