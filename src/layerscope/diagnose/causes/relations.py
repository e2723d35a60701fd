"""How one parameter relates to the reference's: a factor, an order, a grid, and what else happens to weights.

    relation("weight", reference, candidate)      # Cause: "its weight is the reference's times 1.050"

Each relation is one function that tells what it found or returns None; exact ones are tried first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from layerscope.diagnose.causes.cause import Cause, indices, times
from layerscope.diagnose.causes.grids import Grid, grid_of
from layerscope.diagnose.causes.orders import order_of
from layerscope.diagnose.causes.sums import Lines, Sums, same

# The root mean square of rounding to nearest is about a quarter of the distance between numbers, or less.
_ROUNDING = 0.3
# Standard deviations: how far off 1 a factor must be.
_SURE = 6.0
# Quantisation moves factors by itself, by clipping and by rounding the few largest: of all values, and of one line.
_QUANTISED, _QUANTISED_LINE = 0.03, 0.1
# A line this short is another's times a factor, whatever they are.
_SHORT = 4
_UNRELATED = 0.2

_Told: TypeAlias = "tuple[str, dict[str, object]]"  # a clause that follows the parameter's name, and its evidence


@dataclass(frozen=True, slots=True)
class _Pair:
    """One parameter on both sides, with their sums and the grid that the candidate's lies on."""

    reference: torch.Tensor
    candidate: torch.Tensor
    sums: Sums
    grid: Grid | None
    noise: float  # what rounding and the grid leave of a perfect relation, relatively

    @property
    def lines(self) -> list[tuple[str, Lines]]:
        """Rows and columns; the elements of a vector."""
        if self.reference.ndim < 2:
            return [("element", self.sums.columns)]
        return [("row", self.sums.rows), ("column", self.sums.columns)]

    @property
    def moved(self) -> bool:
        """Whether the factor of the whole is further from 1 than rounding, or a grid, takes it."""
        least = _QUANTISED if self.grid is not None else 0.0
        off = abs(float(self.sums.whole.factor) - 1)
        return bool(off > max(least, _SURE * self.noise / self.sums.telling**0.5))


def relation(name: str, reference: torch.Tensor, candidate: torch.Tensor) -> Cause | None:
    """Return how a tensor of the same shape differs from the reference's; None where it is that tensor, rounded."""
    sums = Sums.of(reference, candidate)
    grid = grid_of(candidate)
    grid = grid if grid is None or grid_of(reference, rounded=candidate.dtype) is None else None
    noise = max(_ROUNDING * sums.unit, 1e-8)
    if grid is not None:
        typical = float((sums.whole.cc / candidate.numel()).sqrt())
        noise = max(noise, grid.step[1] / 12**0.5 / max(typical, 1e-300))
    pair = _Pair(reference, candidate, sums, grid, noise)
    if not float(sums.whole.wrong) and not pair.moved:
        return None
    for word, tried in _RELATIONS.items():
        told = tried(pair)
        if told is not None:
            return _cause(name, word, pair, *told)
    return None


def _cause(name: str, word: str, pair: _Pair, because: str, evidence: Mapping[str, object]) -> Cause:
    found: dict[str, object] = {"parameter": name, "relation": word, "relative": pair.sums.relative, **evidence}
    if pair.grid is not None:
        found |= {"bits": pair.grid.bits, "step": pair.grid.step, "per": pair.grid.per}
        because += f", on {pair.grid}" if word != "grid" else ""
    return Cause("weights", f"its {name} {because}", found)


# One relation each -------------------------------------------------------------------------------


def _all_zero(pair: _Pair) -> _Told | None:
    whole = pair.sums.whole
    if float(whole.rr) and float(whole.cc):
        return None
    if float(whole.rr):
        return "is all zero", {}
    return f"goes up to {float(pair.candidate.abs().max()):.3g} where the reference's is all zero", {}


def _scaled(pair: _Pair) -> _Told | None:
    whole = pair.sums.whole
    if float(whole.left) > 2 * pair.noise or not pair.moved:
        return None
    factor = _exact_factor(pair) or float(whole.factor)
    return times(factor), {"factor": factor}


def _exact_factor(pair: _Pair) -> float | None:
    """Return the factor that gives every rounded value, where one does: each value confines it to an interval."""
    if pair.grid is not None or pair.reference.numel() > 1 << 24:
        return None
    candidate = pair.candidate.to(torch.float64)
    for base in (pair.reference.to(pair.candidate.dtype), pair.reference):
        base = base.to(candidate)
        there = (base != 0) & (candidate.abs() > torch.finfo(pair.candidate.dtype).tiny)
        got = candidate[there]
        half = pair.sums.unit / 2 * torch.exp2(got.abs().log2().floor())
        ends = torch.stack([(got - half) / base[there], (got + half) / base[there]]).sort(0).values
        low, high = float(ends[0].max()), float(ends[1].min())
        if low <= high:
            return (low + high) / 2
    return None


def _zeroed_lines(pair: _Pair) -> _Told | None:
    for kind, lines in pair.lines:
        zero = (lines.cc == 0) & (lines.rr > 0)
        if bool(zero.any()) and not float(lines.wrong[~zero].sum()):
            at = zero.nonzero().flatten().tolist()
            return f"has zeros in {indices(at, kind)} of {len(lines)}", {"axis": kind, "at": at[:64]}
    return None


def _scaled_lines(pair: _Pair) -> _Told | None:
    for kind, lines in pair.lines:
        length = pair.candidate.numel() / len(lines)
        by_chance = _SURE * pair.noise / length**0.5
        off = lines.wrong > 0
        if pair.grid is not None:  # all lines of a grid differ: a wrong scale stands out from the others
            off = (lines.factor - lines.factor.median()).abs() > max(_QUANTISED_LINE, by_chance)
        if not bool(off.any()) or float(lines.left[off].max()) > 4 * pair.noise:
            continue
        if float((lines.factor[off] - 1).abs().min()) <= by_chance:
            continue
        if length < _SHORT and int(off.sum()) > max(1, len(lines) // 8):
            continue
        factors, at = lines.factor[off], off.nonzero().flatten().tolist()
        low, high = float(factors.min()), float(factors.max())
        one = high - low <= 0.01 * abs(high)
        by = times(float(factors.mean())) if one else f"is the reference's times {low:.4g} to {high:.4g}"
        evidence: dict[str, object] = {
            "axis": kind,
            "at": at[:64],
            "factor": float(factors.mean()) if one else (low, high),
        }
        return f"{by} in {indices(at, kind)} of {len(lines)}", evidence
    return None


def _flipped(pair: _Pair) -> _Told | None:
    for axis in range(2, pair.reference.ndim):
        if pair.reference.shape[axis] > 1 and same(pair.reference.flip(axis), pair.candidate):
            return f"is the reference's flipped along axis {axis}", {"axis": axis}
    return None


def _transposed(pair: _Pair) -> _Told | None:
    reference = pair.reference
    for one in range(reference.ndim):
        for two in range(one + 1, reference.ndim):
            if reference.shape[one] == reference.shape[two] and same(reference.transpose(one, two), pair.candidate):
                how = "transposed" if reference.ndim == 2 else f"with axes {one} and {two} exchanged"
                return f"is the reference's {how}", {"axes": (one, two)}
    return None


def _permuted(pair: _Pair) -> _Told | None:
    for axis, (kind, _) in enumerate(pair.lines if pair.reference.ndim else ()):
        order = order_of(pair.reference, pair.candidate, axis=axis)
        if order is not None:
            return f"has the reference's {kind}s {order}", {"axis": kind, **order.evidence}
    return None


def _offset(pair: _Pair) -> _Told | None:
    """A constant that was added: a zero-point, the 1 of a norm that has 1 + weight."""
    mean, size, whole = pair.sums.mean, pair.reference.numel(), pair.sums.whole
    spread = max(0.0, float(whole.cc - 2 * whole.cr + whole.rr) / size - mean**2) ** 0.5
    typical = float((whole.cc / size).sqrt())
    if size < _SHORT or spread > 2 * pair.noise * (typical + abs(mean)):
        return None
    if pair.grid is not None and abs(mean) < pair.grid.step[0]:
        return None
    return f"is the reference's {'plus' if mean > 0 else 'minus'} {abs(mean):.4g}", {"offset": mean}


def _other_base(pair: _Pair) -> _Told | None:
    """Powers of another number: the frequencies of rotary positions."""
    bases = [_base(side) for side in (pair.reference, pair.candidate)]
    if None in bases:
        return None
    had, got = bases
    return f"has powers of {got:.4g} where the reference's has powers of {had:.4g}: another rope base", {
        "bases": (had, got)
    }


def _base(tensor: torch.Tensor) -> float | None:
    """Return b of b^0, b^(-1/n), b^(-2/n), ...; None for anything else."""
    if tensor.ndim != 1 or len(tensor) < _SHORT or not bool((tensor > 0).all()) or abs(float(tensor[0]) - 1) > 1e-2:
        return None
    falls = -tensor.to(torch.float64).log().diff()
    steady = float(falls.std()) <= 2 * torch.finfo(tensor.dtype).eps + 1e-5 * abs(float(falls.mean()))
    return math.exp(float(falls.mean()) * len(tensor)) if steady and float(falls.mean()) > 0 else None


def _on_a_grid(pair: _Pair) -> _Told | None:
    return (f"lies on {pair.grid}", {}) if pair.grid is not None else None


def _in_part(pair: _Pair) -> _Told | None:
    count, size = int(pair.sums.whole.wrong), pair.reference.numel()
    if count <= max(1, size // 64):
        far = (pair.candidate.to(torch.float64) - pair.reference.to(pair.candidate.device).to(torch.float64)).abs()
        at = tuple((far == far.max()).nonzero()[0].tolist())
        got, had = float(pair.candidate[at]), float(pair.reference[at])
        said = f"differs in {count:,} of {size:,} values: {got:.4g} where the reference has {had:.4g} at {list(at)}"
        return said, {"count": count, "at": at, "values": (had, got)}
    for kind, lines in pair.lines:
        off = lines.wrong.nonzero().flatten().tolist()
        if len(off) <= len(lines) // 4:
            return f"differs in {indices(off, kind)} of {len(lines)}", {"axis": kind, "at": off[:64]}
    return None


def _otherwise(pair: _Pair) -> _Told | None:
    cosine = pair.sums.cosine
    if abs(cosine) < _UNRELATED:
        return f"is unrelated to the reference's (cosine {cosine:.2f})", {"cosine": cosine}
    return f"differs from the reference's by {pair.sums.relative:.3g} of its norm", {"cosine": cosine}


_RELATIONS: Mapping[str, Callable[[_Pair], _Told | None]] = {
    "zero": _all_zero,
    "scaled": _scaled,
    "zeroed": _zeroed_lines,
    "scaled lines": _scaled_lines,
    "transposed": _transposed,
    "permuted": _permuted,
    "flipped": _flipped,
    "offset": _offset,
    "base": _other_base,
    "grid": _on_a_grid,
    "part": _in_part,
    "other": _otherwise,
}
