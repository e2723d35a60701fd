"""Patterns in the values of a result: a factor, an offset, a bound, a grid, a narrower dtype, something left out.

    on_a_bound(case, values)      # Cause("saturation", "3.1 % of its values lie on the bound 2.5 where ...", ...)

Each asks two things: does the pattern explain the difference up to rounding, and is the reference free of it.
"""

from __future__ import annotations

import math

import torch

from layerscope.diagnose.causes.cause import Case, Cause, share, times
from layerscope.diagnose.causes.closeness import Values, away, precision, wide
from layerscope.diagnose.causes.grids import Grid, grid_of
from layerscope.diagnose.causes.parameters import dense, held, parts

# Floats of eight bits, with the distance between their smallest numbers: near zero they lie on a grid as well.
_NARROWEST = {torch.float8_e5m2: 2.0**-16, torch.float8_e4m3fn: 2.0**-9}
_NARROW = (*_NARROWEST, torch.bfloat16, torch.float16)
_ENOUGH = 16  # values that would have to be narrow by chance
_FEW_BITS = 4  # a grid of so few may be meant, whatever else its numbers are
# A factor is judged against sixteen independent roundings: weights that are rounded once make them few.
_INDEPENDENT = 16


def scaled(case: Case, values: Values) -> Cause | None:
    """The result is the reference's times a factor."""
    base = values.floor if values.floor is not None else values.wanted
    squares = float(base.square().sum())
    if not squares:
        return None
    factor = float((values.got * base).sum()) / squares
    by_chance = values.level / min(values.got.numel(), _INDEPENDENT) ** 0.5
    left = away(values.got, factor * base)
    if abs(factor - 1) <= max(2 * by_chance, left) or left > 2 * values.level or factor == 0:
        return None
    return Cause("scale", f"its {case.what} {times(factor)}", {"factor": factor, "left": left})


def shifted(case: Case, values: Values) -> Cause | None:
    """A constant, or the same vector for all tokens, was added or left out."""
    apart = values.got - values.wanted
    if apart.numel() < _ENOUGH:
        return None
    mean = apart.mean()
    if values.explained(values.wanted + mean):
        more = f"{'plus' if mean > 0 else 'minus'} {abs(float(mean)):.4g}"
        return Cause("constant", f"its {case.what} is the reference's {more}", {"offset": float(mean)})
    if apart.ndim < 2 or apart.numel() < 4 * apart.shape[-1]:
        return None
    vector = apart.reshape(-1, apart.shape[-1]).mean(0)
    if not values.explained(values.wanted + vector):
        return None
    evidence: dict[str, object] = {"offset": float(vector.norm())}
    for path, module, _ in parts(case):
        for name, tensor in held(module).items():
            known = dense(tensor)
            if known is None or known.shape != vector.shape or not known.is_floating_point():
                continue
            for sign, done in ((-1, "is not added"), (1, "is added twice")):
                if away(vector, sign * wide(known).to(vector.device)) < 0.05:
                    full = f"{path}.{name}".lstrip(".")
                    return Cause("operation", f"its {full} {done}", {**evidence, "parameter": full})
    return Cause("operation", f"its {case.what} is off by the same vector for every token", evidence)


def left_out(case: Case, values: Values) -> Cause | None:
    """The result is the input, or lacks it: a module that was skipped, a residual that is missing."""
    for at, tensor in enumerate(case.inputs):
        if case.wanted is None or tensor.shape != case.wanted.shape or not tensor.is_floating_point():
            continue
        given = wide(tensor).to(values.got.device)
        if values.explained(given):
            return Cause("operation", f"its {case.what} is its input unchanged", {"input": at})
        if values.explained(values.wanted - given):
            return Cause("operation", "its input is not added: a missing residual", {"input": at})
        if values.explained(values.wanted + given):
            return Cause("operation", "its input is added once more: a residual too many", {"input": at})
    if not float(values.got.abs().max()):
        return Cause("operation", f"its {case.what} is all zero", {"zero": True})
    return None


def on_a_bound(case: Case, values: Values) -> Cause | None:
    """Values stop at a bound that the reference's go beyond, and the others agree."""
    got, wanted = values.got, values.wanted
    unit = precision(values.rounded)
    limit = float(torch.finfo(values.dtype).max)
    on = torch.zeros_like(got, dtype=torch.bool)
    bounds: list[float] = []
    for sign in (1, -1):
        bound = float((sign * got).max())
        here = sign * got == bound
        beyond = here & (sign * wanted > bound + (4 * unit + 2 * values.level) * abs(bound))
        inside = here & (sign * wanted < bound - (4 * unit + 4 * values.level) * abs(bound))
        enough = int(here.sum()) >= (1 if abs(bound) == limit else 2)
        if enough and int(beyond.sum()) > int(here.sum()) / 2 and not bool(inside.any()):
            on |= here
            bounds.append(sign * bound)
    if not bounds or bool(on.all()):
        return None
    rest = torch.where(on, wanted, got)
    if away(rest, wanted) > max(2 * values.level, values.error / 10):
        return None
    count, top = int(on.sum()), float(wanted.abs().max())
    said = " and ".join(f"{bound:.4g}" for bound in bounds)
    because = (
        f"{share(count, got.numel())} of its values lie on the bound {said} where the reference goes up to {top:.4g}"
    )
    return Cause(
        "saturation", because, {"bounds": bounds, "count": count, "share": count / got.numel(), "largest": top}
    )


def on_a_grid(case: Case, values: Values) -> Cause | None:
    """Values are multiples of a step, and the reference's are not."""
    if case.got is None or case.wanted is None:
        return None
    grid = grid_of(case.got)
    healthy = case.floor if case.floor is not None else case.wanted
    if grid is None or grid_of(healthy) is not None or grid_of(case.wanted, rounded=values.rounded) is not None:
        return None
    if _of_eight_bits(values.got, grid):
        return None
    evidence = {"step": grid.step, "bits": grid.bits, "per": grid.per}
    return Cause("grid", f"its {case.what} lies on {grid}", evidence)


def rounded_to(case: Case, values: Values) -> Cause | None:
    """Every value is one of a narrower dtype, and the reference's are not."""
    healthy = values.floor if values.floor is not None else values.wanted
    telling = (values.got != 0) & (healthy != 0)
    if int(telling.sum()) < _ENOUGH:
        return None
    for dtype in _NARROW:
        if precision(dtype) <= precision(values.dtype) or not bool(_representable(values.got, dtype).all()):
            continue
        if float(_representable(healthy[telling], dtype).to(torch.float64).mean()) > 0.5:
            return None
        name, own = (str(one).removeprefix("torch.") for one in (dtype, values.dtype))
        evidence = {"dtype": name, "within": own, "error": values.error}
        return Cause("cast", f"its {case.what} is {own}, and every value of it is one of {name}'s", evidence)
    return None


def _of_eight_bits(values: torch.Tensor, grid: Grid) -> bool:
    """Whether a grid is no more than what a cast to a float of eight bits leaves of small numbers."""
    return any(
        (grid.bits > _FEW_BITS or math.isclose(grid.step[0], smallest, rel_tol=1e-3))
        and bool(_representable(values, dtype).all())
        for dtype, smallest in _NARROWEST.items()
    )


def _representable(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(torch.float32).to(dtype).to(torch.float64) == values
