"""Whether a difference is a fault, from what it is and what rounding alone makes at that place.

    judge(got, floor=..., nudged=..., code="same")

Three models ran on the same values: the candidate, the reference in the candidate's dtypes (the floor), and that once
more with every value moved by a unit in the last place. A candidate with the same bits as the floor needs no threshold
at all; where a port computes in another order, its error must be of the size of the others'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from layerscope.diagnose.finding import Kind
from layerscope.diagnose.judge.measuring import Measured, rounding

Code = Literal["same", "patched", "other"]

# How many times the floor is too much, by what is known of the two modules' code. The same code gives the same bits;
# where threads share a sum in another way, a few last bits differ and the error grows by hundredths. Rewritten code may
# round a second time, which makes sqrt(2). Another kernel may round at every step where the floor does once.
LIMITS: dict[Code, float] = {"same": 1.2, "patched": 1.5, "other": 3.0}

# A best-fitting factor is off by chance much less than single values are: by this share of the error at most.
SCALE = 0.25
# The largest of many errors scatters more than their mean square.
WORST = 4.0
# float32 against float32: sums in another order differ by that many units without a fault.
UNITS = 64.0
WIDE = rounding(torch.float32)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was decided of one value, and why; `ratio` sorts values by how far beyond their floor they are.

    `certain` is False for noise that is not the floor's own: the values differ, by no more than rounding would.
    """

    kind: Kind
    because: str
    error: float
    floor: float
    ratio: float
    certain: bool = True

    @property
    def guilty(self) -> bool:
        """Whether the difference is more than rounding."""
        return self.kind in ("root", "nonfinite")


def judge(
    got: Measured, *, floor: Measured | None, nudged: Measured | None, code: Code, leniency: float = 1.0
) -> Judgement:
    """Judge one measured value; `leniency` multiplies the limits where the floor is not known well."""
    others = [m for m in (floor, nudged) if m is not None]
    base = max([got.rounding, *(m.error for m in others if math.isfinite(m.error))])
    ratio = got.error / base if base else (math.inf if got.error else 0.0)
    limit = LIMITS[code] * leniency

    def decided(kind: Kind, because: str, at: float = ratio, *, certain: bool = True) -> Judgement:
        return Judgement(kind, because, got.error, base, at, certain)

    if not got.shape:
        return decided("root", "it has another shape" if got.there else "nothing is handed on there", math.inf)
    if got.nonfinite > max((m.nonfinite for m in others), default=0):
        return decided("nonfinite", f"{got.nonfinite} of its {got.count} values are finite in one model only", math.inf)
    if got.equal:
        return decided("same", "every value is equal", 0.0)
    if floor is not None and floor.digest == got.digest and floor.dtype == got.dtype:
        return decided("noise", "the reference gives the same bits in this dtype", 1.0)
    changed = max((m.changed for m in others), default=0.0)
    if got.changed > 2 * changed + (0.05 if code == "other" else 0.0):
        return decided("root", f"{got.changed:.1%} of its elements are others", got.changed / max(changed, 1e-9))
    if not got.dtype.is_floating_point:
        return decided("noise", f"{got.changed:.1%} of its elements are others, as with rounding alone", certain=False)
    if got.rounding <= WIDE and got.error < UNITS * torch.finfo(got.dtype).eps:
        return decided("noise", f"off by {got.error:.1e}: sums in another order do that", certain=False)
    if ratio > limit:
        return decided("root", f"error {_times(ratio)} the {name_of(got.dtype)} floor on the same input")
    drift = max([0.0, *(abs(m.scale - 1) for m in others)])
    by_chance = 4 * base / math.sqrt(max(got.count, 1))
    # Equal values round the same way: in other code, half a unit may be the factor of all of them.
    bias = torch.finfo(got.dtype).eps / 2 if code == "other" else 0.0
    if abs(got.scale - 1) > max(bias, 4 * drift, SCALE * limit / LIMITS["same"] * base, by_chance):
        return decided(
            "root", f"it is the reference's times {got.scale:.4f}, where rounding moves that by {drift:.0e}", ratio
        )
    tail = max([2 * got.rounding * got.peak, *(m.worst for m in others if math.isfinite(m.worst))])
    if got.worst > WORST * limit / LIMITS["same"] * tail:
        return decided("root", f"its worst value is off {_times(got.worst / tail)} as far as rounding's worst", ratio)
    return decided("noise", f"error {_times(ratio)} the {name_of(got.dtype)} floor", certain=False)


def is_doubtful(got: Measured, *, floor: Measured | None, code: Code, leniency: float = 1.0) -> bool:
    """Tell whether what a nudge does could change the judgement of a value.

    It is not when nothing differs, nor when the error is far beyond what a unit in the last place can do: the floor has
    seen every input rounded already.
    """
    if got.equal or not got.shape or (floor is not None and (floor.digest, floor.dtype) == (got.digest, got.dtype)):
        return False
    base = max(got.rounding, floor.error if floor is not None and math.isfinite(floor.error) else 0.0)
    return not got.error > CLEAR * LIMITS[code] * leniency * base


CLEAR = 4.0


def worse(judgement: Judgement) -> tuple[bool, bool, float]:
    """Sort judgements: guilt first, then doubt, then how far beyond the floor."""
    ratio = math.inf if math.isnan(judgement.ratio) else judgement.ratio
    return judgement.guilty, not judgement.certain, ratio


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 1000 else f"{ratio:.0e}x"


def name_of(dtype: torch.dtype) -> str:
    """Return what people call a dtype."""
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}.get(
        str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.")
    )
