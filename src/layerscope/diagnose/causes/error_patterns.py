"""Patterns in the values of a result: of all of them, and along an axis.

    on_a_bound(case, values)      # Cause("saturation", "3.1 % of its values lie on the bound 2.5 where ...", ...)
    displaced(case, values)       # Cause("tokens", "its tokens are shifted by 1", {"axis": 1, "shift": 1, ...})

Each asks two things: does the pattern explain the difference up to rounding, and is the reference free of it.
"""

from __future__ import annotations

import math

import torch

from layerscope.diagnose.causes.cause import Case, Cause, Kind, ResultPair, indices, share, times, wide
from layerscope.diagnose.causes.grids import Grid, grid_of
from layerscope.diagnose.causes.orders import described, nearest_order
from layerscope.diagnose.causes.weights import dense, held, parts
from layerscope.diagnose.judge.measurement import precision, relative_l2

# Floats of eight bits, with the distance between their smallest numbers: near zero they lie on a grid as well.
_NARROWEST = {torch.float8_e5m2: 2.0**-16, torch.float8_e4m3fn: 2.0**-9}
_NARROW = (*_NARROWEST, torch.bfloat16, torch.float16)
_ENOUGH = 16  # values that would have to be narrow by chance
_FEW_BITS = 4  # a grid of so few may be meant, whatever else its numbers are
# A factor is judged against sixteen independent roundings: weights that are rounded once make them few.
_INDEPENDENT = 16


def scaled(case: Case, values: ResultPair) -> Cause | None:
    """The result is the reference's times a factor."""
    base = values.floor if values.floor is not None else values.wanted
    squares = float(base.square().sum())
    if not squares:
        return None
    factor = float((values.got * base).sum()) / squares
    by_chance = values.level / min(values.got.numel(), _INDEPENDENT) ** 0.5
    left = relative_l2(values.got, factor * base)
    if abs(factor - 1) <= max(2 * by_chance, left) or left > 2 * values.level or factor == 0:
        return None
    return Cause("scale", f"its {case.what} {times(factor)}", {"factor": factor, "left": left})


def shifted(case: Case, values: ResultPair) -> Cause | None:
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
                if relative_l2(vector, sign * wide(known).to(vector.device)) < 0.05:
                    full = f"{path}.{name}".lstrip(".")
                    return Cause("operation", f"its {full} {done}", {**evidence, "parameter": full})
    return Cause("operation", f"its {case.what} is off by the same vector for every token", evidence)


def left_out(case: Case, values: ResultPair) -> Cause | None:
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


def on_a_bound(case: Case, values: ResultPair) -> Cause | None:
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
    if relative_l2(rest, wanted) > max(2 * values.level, values.error / 10):
        return None
    count, top = int(on.sum()), float(wanted.abs().max())
    said = " and ".join(f"{bound:.4g}" for bound in bounds)
    because = (
        f"{share(count, got.numel())} of its values lie on the bound {said} where the reference goes up to {top:.4g}"
    )
    return Cause(
        "saturation", because, {"bounds": bounds, "count": count, "share": count / got.numel(), "largest": top}
    )


def on_a_grid(case: Case, values: ResultPair) -> Cause | None:
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


def rounded_to(case: Case, values: ResultPair) -> Cause | None:
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


_SHIFTS = 8
# A slice is off when its error is this many times what rounding does to it.
_OFF = 4.0
_OF_ATTENTION = ("sample", "head", "token", "feature")
_OF_PICTURES = ("sample", "channel", "line", "column")


def some_zeroed(case: Case, values: ResultPair) -> Cause | None:
    """Some slices are zero and the others agree."""
    for axis in _axes(values):
        got = _slices(values.got, axis)
        gone = (got == 0).all(1) & (_slices(values.wanted, axis) != 0).any(1)
        if not bool(gone.any()) or bool(gone.all()):
            continue
        kept = (~gone).nonzero().flatten()
        if values.explained(values.wanted.index_select(axis, kept), values.got.index_select(axis, kept)):
            at = gone.nonzero().flatten().tolist()
            noun = _noun(case, values, axis)
            verb = "is" if len(at) == 1 else "are"
            because = f"{indices(at, noun)} of {len(gone)} in its {case.what} {verb} zero"
            return Cause(_kind(noun), because, {"axis": axis, "at": at[:64], "zeroed": len(at)})
    return None


def displaced(case: Case, values: ResultPair) -> Cause | None:
    """From one slice on, each holds what belongs a few places further or before."""
    for axis in _axes(values):
        wanted, got = values.wanted.movedim(axis, 0), values.got.movedim(axis, 0)
        off = _off(values, axis)
        if not bool(off.any()):
            continue
        count, start = len(off), int(off.nonzero()[0])
        noun = _noun(case, values, axis)
        for shift in range(1, min(_SHIFTS, count - start - 2) + 1):
            late = values.explained(wanted[start : count - shift], got[start + shift :])
            early = values.explained(wanted[start + shift :], got[start : count - shift])
            if not (late or early) or (late and early):
                continue
            by = shift if late else -shift
            evidence = {"axis": axis, "shift": by, "start": start}
            if early and start:
                gone = indices(range(start, start + shift), noun)
                because = f"{gone} of {count} {'is' if shift == 1 else 'are'} dropped, and those after move up"
            else:
                because = f"its {noun}s are shifted by {by}" + (f" from {noun} {start} on" if start else "")
            return Cause(_kind(noun), because, evidence)
    return None


def in_another_order(case: Case, values: ResultPair) -> Cause | None:
    """The slices along an axis are the reference's in another order."""
    for axis in _axes(values):
        places = nearest_order(values.wanted, values.got, axis=axis)
        order = described(places) if places is not None else None
        if places is None or order is None or not values.explained(values.wanted.index_select(axis, places)):
            continue
        noun = _noun(case, values, axis)
        if noun == "feature" and order.block > 1:
            because = f"its heads are in another order: blocks of {order.block} features"
            return Cause("heads", because, {"axis": axis, **order.evidence})
        kind: Kind = "heads" if noun == "head" else "order"
        return Cause(kind, f"its {noun}s are the reference's {order}", {"axis": axis, **order.evidence})
    return None


def some_scaled(case: Case, values: ResultPair) -> Cause | None:
    """Some slices are the reference's times a factor, and the others agree."""
    for axis in _axes(values):
        off = _off(values, axis)
        if not bool(off.any()) or int(off.sum()) > len(off) // 2 or values.got.numel() < 2 * len(off):
            continue
        wanted, got = _slices(values.wanted, axis)[off], _slices(values.got, axis)[off]
        factors = (wanted * got).sum(1) / wanted.square().sum(1).clamp(min=1e-300)
        factor = float(factors.median())
        level = values.level
        if values.floor is not None:
            level = max(level, relative_l2(_slices(values.floor, axis)[off], wanted))
        if factor == 0 or relative_l2(got, factor * wanted) > 2 * level:
            continue
        at, noun = off.nonzero().flatten().tolist(), _noun(case, values, axis)
        because = f"its {case.what} {times(factor)} in {indices(at, noun)} of {len(off)}"
        return Cause("scale", because, {"axis": axis, "at": at[:64], "factor": factor})
    return None


def confined(case: Case, values: ResultPair) -> Cause | None:
    """Say which slices differ where only a few of them do: no cause, but where to look for one."""
    for axis in _axes(values):
        off = _off(values, axis)
        if 0 < int(off.sum()) <= len(off) // 2:
            at = off.nonzero().flatten().tolist()
            where = f"{indices(at, _noun(case, values, axis))} of {len(off)}"
            return Cause(
                "unknown", f"no known cause; only {where} differ along axis {axis}", {"axis": axis, "at": at[:64]}
            )
    return None


def _axes(values: ResultPair) -> list[int]:
    """The axes that have slices to tell apart, tokens first and features last."""
    shape = values.got.shape
    ordered = [*range(1, len(shape) - 1), 0, len(shape) - 1] if len(shape) > 1 else [0]
    return [axis for axis in ordered if shape[axis] > 1]


def _noun(case: Case, values: ResultPair, axis: int) -> str:
    """What people call a slice along this axis."""
    ndim = values.got.ndim
    if ndim == 4:
        attention = "att" in f"{case.name} {type(case.reference).__name__}".lower()
        return _OF_ATTENTION[axis] if attention else _OF_PICTURES[axis]
    if axis == ndim - 1:
        return "feature"
    return "sample" if axis == 0 and ndim > 2 else "token"


def _kind(noun: str) -> Kind:
    return "heads" if noun == "head" else "tokens" if noun in ("token", "line", "column") else "order"


def _slices(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)


def _off(values: ResultPair, axis: int) -> torch.Tensor:
    """Which slices differ by more than rounding explains: their own, or a part of the whole's."""
    wanted = _slices(values.wanted, axis)
    apart = (_slices(values.got, axis) - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    usual = values.level * size.clamp(min=float(size.square().mean().sqrt()) / 4)
    if values.floor is not None:
        usual = torch.maximum(usual, (_slices(values.floor, axis) - wanted).norm(dim=1))
    off: torch.Tensor = apart > _OFF * usual
    return off
