"""How one parameter relates to the reference's: a factor, an order, a grid, and what else happens to weights.

    relation("weight", reference, candidate)      # Cause: "its weight is the reference's times 1.050"

Each relation is one function that tells what it found or returns None; exact ones are tried first. They share one pass
over the pair, which goes piece by piece, so that an embedding of billions of bytes costs no second copy.
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
from layerscope.diagnose.judge.measurement import PIECE, as_matrix, coarser, precision, same

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
class _ParameterPair:
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
    pair = _ParameterPair(reference, candidate, sums, grid, noise)
    if not float(sums.whole.wrong) and not pair.moved:
        return None
    for word, tried in _RELATIONS.items():
        told = tried(pair)
        if told is not None:
            return _cause(name, word, pair, *told)
    return None


def _cause(name: str, word: str, pair: _ParameterPair, because: str, evidence: Mapping[str, object]) -> Cause:
    found: dict[str, object] = {"parameter": name, "relation": word, "relative": pair.sums.relative, **evidence}
    if pair.grid is not None:
        found |= {"bits": pair.grid.bits, "step": pair.grid.step, "per": pair.grid.per}
        because += f", on {pair.grid}" if word != "grid" else ""
    return Cause("weights", f"its {name} {because}", found)


# One relation each -------------------------------------------------------------------------------


def _all_zero(pair: _ParameterPair) -> _Told | None:
    whole = pair.sums.whole
    if float(whole.rr) and float(whole.cc):
        return None
    if float(whole.rr):
        return "is all zero", {}
    return f"goes up to {float(pair.candidate.abs().max()):.3g} where the reference's is all zero", {}


def _scaled(pair: _ParameterPair) -> _Told | None:
    whole = pair.sums.whole
    if float(whole.left) > 2 * pair.noise or not pair.moved:
        return None
    factor = _exact_factor(pair) or float(whole.factor)
    return times(factor), {"factor": factor}


def _exact_factor(pair: _ParameterPair) -> float | None:
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


def _zeroed_lines(pair: _ParameterPair) -> _Told | None:
    for kind, lines in pair.lines:
        zero = (lines.cc == 0) & (lines.rr > 0)
        if bool(zero.any()) and not float(lines.wrong[~zero].sum()):
            at = zero.nonzero().flatten().tolist()
            return f"has zeros in {indices(at, kind)} of {len(lines)}", {"axis": kind, "at": at[:64]}
    return None


def _scaled_lines(pair: _ParameterPair) -> _Told | None:
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


def _flipped(pair: _ParameterPair) -> _Told | None:
    for axis in range(2, pair.reference.ndim):
        if pair.reference.shape[axis] > 1 and same(pair.reference.flip(axis), pair.candidate):
            return f"is the reference's flipped along axis {axis}", {"axis": axis}
    return None


def _transposed(pair: _ParameterPair) -> _Told | None:
    reference = pair.reference
    for one in range(reference.ndim):
        for two in range(one + 1, reference.ndim):
            if reference.shape[one] == reference.shape[two] and same(reference.transpose(one, two), pair.candidate):
                how = "transposed" if reference.ndim == 2 else f"with axes {one} and {two} exchanged"
                return f"is the reference's {how}", {"axes": (one, two)}
    return None


def _permuted(pair: _ParameterPair) -> _Told | None:
    for axis, (kind, _) in enumerate(pair.lines if pair.reference.ndim else ()):
        order = order_of(pair.reference, pair.candidate, axis=axis)
        if order is not None:
            return f"has the reference's {kind}s {order}", {"axis": kind, **order.evidence}
    return None


def _offset(pair: _ParameterPair) -> _Told | None:
    """A constant that was added: a zero-point, the 1 of a norm that has 1 + weight."""
    mean, size, whole = pair.sums.mean, pair.reference.numel(), pair.sums.whole
    spread = max(0.0, float(whole.cc - 2 * whole.cr + whole.rr) / size - mean**2) ** 0.5
    typical = float((whole.cc / size).sqrt())
    if size < _SHORT or spread > 2 * pair.noise * (typical + abs(mean)):
        return None
    if pair.grid is not None and abs(mean) < pair.grid.step[0]:
        return None
    return f"is the reference's {'plus' if mean > 0 else 'minus'} {abs(mean):.4g}", {"offset": mean}


def _other_base(pair: _ParameterPair) -> _Told | None:
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


def _on_a_grid(pair: _ParameterPair) -> _Told | None:
    return (f"lies on {pair.grid}", {}) if pair.grid is not None else None


def _in_part(pair: _ParameterPair) -> _Told | None:
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


def _otherwise(pair: _ParameterPair) -> _Told | None:
    cosine = pair.sums.cosine
    if abs(cosine) < _UNRELATED:
        return f"is unrelated to the reference's (cosine {cosine:.2f})", {"cosine": cosine}
    return f"differs from the reference's by {pair.sums.relative:.3g} of its norm", {"cosine": cosine}


_RELATIONS: Mapping[str, Callable[[_ParameterPair], _Told | None]] = {
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


@dataclass(frozen=True, slots=True)
class Lines:
    """All rows, or all columns: the sums of squares and products of each; how many elements no rounding explains."""

    rr: torch.Tensor
    cr: torch.Tensor
    cc: torch.Tensor
    wrong: torch.Tensor

    def __len__(self) -> int:
        return len(self.rr)

    @property
    def factor(self) -> torch.Tensor:
        """What each line of the reference is best multiplied by to give the candidate's."""
        return self.cr / self.rr.clamp(min=1e-300)

    @property
    def left(self) -> torch.Tensor:
        """What that leaves of each line, relatively."""
        rest = (self.cc - self.factor * self.cr).clamp(min=0)
        return (rest / self.cc.clamp(min=1e-300)).sqrt()


@dataclass(frozen=True, slots=True)
class Sums:
    """The pair's sums, by row and by column; a vector is one row."""

    rows: Lines
    columns: Lines
    telling: float  # how many elements have a say in the factor: a few large ones outvote the rest
    mean: float  # of the difference
    unit: float  # the rounding of the coarser dtype

    @classmethod
    def of(cls, reference: torch.Tensor, candidate: torch.Tensor) -> Sums:
        """Go through both tensors once."""
        unit, tiny = _rounding(reference, candidate)
        wanted, got = as_matrix(reference), as_matrix(candidate)
        step = max(1, PIECE // max(1, wanted.shape[1]))
        rows: list[torch.Tensor] = []
        columns = torch.zeros(4, wanted.shape[1], dtype=torch.float64, device=wanted.device)
        fourth = apart = 0.0
        for at in range(0, len(wanted), step):
            r = wanted[at : at + step].to(torch.float64)
            c = got[at : at + step].to(r.device).to(torch.float64)
            d = c - r
            terms = torch.stack([r * r, c * r, c * c, (d.abs() > unit * r.abs() + tiny).to(torch.float64)])
            rows.append(terms.sum(2))
            columns += terms.sum(1)
            fourth += float((terms[0] ** 2).sum())
            apart += float(d.sum())
        by_row = torch.cat(rows, 1)
        by_column = columns.view(4, reference.shape[1], -1).sum(2) if reference.ndim > 2 else columns
        squares = float(by_row[0].sum())
        return cls(
            Lines(*by_row), Lines(*by_column), squares**2 / fourth if fourth else 1.0, apart / reference.numel(), unit
        )

    @property
    def whole(self) -> Lines:
        """All of it as one line."""
        lines = self.rows
        return Lines(*(term.sum()[None] for term in (lines.rr, lines.cr, lines.cc, lines.wrong)))

    @property
    def relative(self) -> float:
        """The relative L2 difference."""
        whole = self.whole
        apart = float((whole.cc - 2 * whole.cr + whole.rr).clamp(min=0))
        return float((apart / float(whole.rr)) ** 0.5) if float(whole.rr) else float("inf")

    @property
    def cosine(self) -> float:
        """The cosine of the two."""
        whole = self.whole
        size = float((whole.rr * whole.cc).sqrt())
        return float(whole.cr) / size if size else 0.0


def _rounding(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float]:
    dtype = coarser(reference.dtype, candidate.dtype)
    if not dtype.is_floating_point:
        return 0.0, 0.0
    # Below the smallest normal number the steps no longer shrink.
    return precision(dtype), float(torch.finfo(dtype).tiny) * precision(dtype)
