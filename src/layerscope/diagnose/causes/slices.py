"""Patterns along an axis: tokens that are shifted, dropped, zeroed, scaled or in another order, heads that are.

displaced(case, values)      # Cause("tokens", "its tokens are shifted by 1", {"axis": 1, "shift": 1, ...})
"""

from __future__ import annotations

import torch

from layerscope.diagnose.causes.cause import Case, Cause, Kind, indices, times
from layerscope.diagnose.causes.closeness import Values, away
from layerscope.diagnose.causes.orders import described, nearest_order

_SHIFTS = 8
# A slice is off when its error is this many times what rounding does to it.
_OFF = 4.0
_OF_ATTENTION = ("sample", "head", "token", "feature")
_OF_PICTURES = ("sample", "channel", "line", "column")


def some_zeroed(case: Case, values: Values) -> Cause | None:
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


def displaced(case: Case, values: Values) -> Cause | None:
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


def in_another_order(case: Case, values: Values) -> Cause | None:
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


def some_scaled(case: Case, values: Values) -> Cause | None:
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
            level = max(level, away(_slices(values.floor, axis)[off], wanted))
        if factor == 0 or away(got, factor * wanted) > 2 * level:
            continue
        at, noun = off.nonzero().flatten().tolist(), _noun(case, values, axis)
        because = f"its {case.what} {times(factor)} in {indices(at, noun)} of {len(off)}"
        return Cause("scale", because, {"axis": axis, "at": at[:64], "factor": factor})
    return None


def confined(case: Case, values: Values) -> Cause | None:
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


def _axes(values: Values) -> list[int]:
    """The axes that have slices to tell apart, tokens first and features last."""
    shape = values.got.shape
    ordered = [*range(1, len(shape) - 1), 0, len(shape) - 1] if len(shape) > 1 else [0]
    return [axis for axis in ordered if shape[axis] > 1]


def _noun(case: Case, values: Values, axis: int) -> str:
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


def _off(values: Values, axis: int) -> torch.Tensor:
    """Which slices differ by more than rounding explains: their own, or a part of the whole's."""
    wanted = _slices(values.wanted, axis)
    apart = (_slices(values.got, axis) - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    usual = values.level * size.clamp(min=float(size.square().mean().sqrt()) / 4)
    if values.floor is not None:
        usual = torch.maximum(usual, (_slices(values.floor, axis) - wanted).norm(dim=1))
    off: torch.Tensor = apart > _OFF * usual
    return off
