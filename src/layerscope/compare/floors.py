"""How much error is to be expected at a point without any fault.

    expected(key, metrics, noise=[Noise("runs/bf16", measured)], depth=12, coarsest=0.0, before=None).floor

A noise run (the trusted implementation in BF16, with another kernel, another seed) shows it. Without one it is
estimated from the rounding of the coarsest dtype on the way, growing with depth as a random walk does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from layerscope.compare.metrics import Metrics, Tokens
from layerscope.compare.rows import Floor
from layerscope.points import Moment, Point

__all__ = [
    "ESTIMATED",
    "Expected",
    "Key",
    "Noise",
    "Step",
    "TokenErrors",
    "expected",
    "off_most",
    "rounding",
    "step_of",
]

Key: TypeAlias = "tuple[Point, Moment]"
Step: TypeAlias = "tuple[int | None, int, int]"  # epoch, step, rank

# An estimate knows neither the model's width nor its outliers: rows are judged that many times more leniently by it.
ESTIMATED = 6.0

# The distance between 1 and the next number. A quarter of it is about what rounding to nearest is off by, relatively
# and in the root mean square.
_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "complex32": 2.0**-10,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
    "float4_e2m1fn_x2": 2.0**-1,
}


@dataclass(frozen=True, slots=True)
class Noise:
    """A noise run, measured against the reference: where it lies, and its metrics by point and moment.

    `rerouted` are the tokens of each step that a choice sent elsewhere: their errors are no measure of rounding.
    """

    address: str
    metrics: Mapping[Key, Metrics]
    rerouted: Mapping[Step, frozenset[int]] = field(default_factory=dict)


class TokenErrors(NamedTuple):
    """The median, the 90th percentile and the largest of the errors of single tokens."""

    median: float
    p90: float
    worst: float


@dataclass(frozen=True, slots=True)
class Expected:
    """The floor of one row, with what else the noise runs show there.

    `scale` is how far noise moved the best-fitting factor from 1, `tokens` the errors of its tokens, `changed` the
    share of rows of an index tensor that noise alone changed; None where no noise run has them.
    """

    floor: Floor
    scale: float | None = None
    tokens: TokenErrors | None = None
    changed: float | None = None


def rounding(dtype: str) -> float:
    """Return how far off values of a dtype are by rounding, relatively; 0 for integers, which do not round."""
    return _EPSILON.get(dtype, 0.0) / 4


def expected(
    key: Key, metrics: Metrics, *, noise: Sequence[Noise], depth: int, coarsest: float, before: Floor | None
) -> Expected:
    """Return what is to be expected of a row that is the `depth`-th to run.

    `coarsest` is the largest rounding of any dtype on the way here: a float32 sum of bfloat16 terms carries theirs.
    Where the noise runs lack the point (another shape, a schedule of their own) the floor of the row before stands in.
    The dtype that a side is stored in always rounds, whatever the noise runs show.
    """
    stored = max(rounding(metrics.reference.dtype), rounding(metrics.candidate.dtype))
    found = [(run.metrics[key], run) for run in noise if key in run.metrics]
    found = [(m, run) for m, run in found if math.isfinite(m.relative_l2)]
    if found:
        worst, run = max(found, key=lambda pair: pair[0].relative_l2)
        tokens = [(m.tokens, run.rerouted.get(step_of(key[1]), frozenset())) for m, run in found if m.tokens]
        return Expected(
            Floor(max(worst.relative_l2, stored), run.address),
            scale=max(abs(m.scale - 1) for m, _ in found),
            tokens=_worst_of(tokens, at_least=stored),
            changed=max((m.sets.changed / m.sets.rows for m, _ in found if m.sets and m.sets.rows), default=None),
        )
    if noise and before is not None:
        return Expected(Floor(max(before.error, stored), before.source))
    return Expected(Floor(max(coarsest, stored, rounding("float32")) * (1 + math.sqrt(depth) / 2), "estimate"))


def step_of(moment: Moment) -> Step:
    """Return the step that a moment belongs to."""
    return moment.epoch, moment.step, moment.rank


def off_most(tokens: Tokens, rerouted: Collection[int]) -> tuple[int, float] | None:
    """Return the worst token that was not sent elsewhere, and its error; None when the few worst all were."""
    return next(((at, error) for at, error in tokens.largest if at not in rerouted), None)


def _worst_of(several: Sequence[tuple[Tokens, Collection[int]]], *, at_least: float) -> TokenErrors | None:
    if not several:
        return None
    worst = [off_most(tokens, rerouted) or (0, tokens.error) for tokens, rerouted in several]
    return TokenErrors(
        max(at_least, *(tokens.median for tokens, _ in several)),
        max(at_least, *(tokens.p90 for tokens, _ in several)),
        max(at_least, *(error for _, error in worst)),
    )
