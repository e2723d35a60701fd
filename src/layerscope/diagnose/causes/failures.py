"""What needs no measuring: the candidate raised, has another shape, holds what is not finite, or rolls dice.

nonfinite(case)      # Cause("nonfinite", "its output has 3 NaN, first at [0, 4, 7], and its inputs are finite", ...)
"""

from __future__ import annotations

import torch
from torch import nn

from layerscope.diagnose.causes.cause import Case, Cause, indices, listed, shape
from layerscope.diagnose.causes.closeness import Values, away, precision, wide
from layerscope.diagnose.causes.parameters import parts

_SHOWN = 4  # values that differ
_ALIGNED = 4096  # tokens among which the dropped ones are sought


def raised(case: Case) -> Cause | None:
    """The candidate raised on the reference's inputs."""
    if case.raised is None:
        return None
    first = (str(case.raised).strip().splitlines() or [""])[0][:200]
    name = type(case.raised).__name__
    return Cause("raised", f"it raises {name}: {first}", {"exception": name, "message": first})


def nonfinite(case: Case) -> Cause | None:
    """The result is not finite where the reference's is."""
    if case.got is None or case.wanted is None or not case.got.is_floating_point():
        return None
    bad = ~case.got.detach().isfinite()
    if case.wanted.shape == case.got.shape:
        bad &= case.wanted.detach().isfinite().to(bad.device)
    count = int(bad.sum())
    if not count:
        return None
    first = bad.nonzero()[0].tolist()
    nans = int((case.got.detach().isnan() & bad).sum())
    what = f"{count:,} {'NaN' if nans == count else 'infinite' if not nans else 'NaN and infinite'}"
    clean = all(bool(tensor.isfinite().all()) for tensor in case.inputs if tensor.is_floating_point())
    because = f"its {case.what} has {what} value{'s' * (count != 1)}, first at {first}"
    evidence: dict[str, object] = {"count": count, "nan": nans, "first": first, "finite_inputs": clean}
    largest = float(torch.finfo(case.got.dtype).max)
    if case.wanted.shape == case.got.shape and not nans:
        top = float(case.wanted.detach().to(bad.device)[bad].abs().max())
        if top > largest:
            evidence |= {"largest": top, "limit": largest}
            dtype = str(case.got.dtype).removeprefix("torch.")
            return Cause(
                "nonfinite", f"{because}: {dtype} ends at {largest:.5g}, the reference has {top:.5g}", evidence
            )
    return Cause("nonfinite", because + (", and its inputs are finite" if clean else ""), evidence)


def other_shape(case: Case) -> Cause | None:
    """The result has another shape: transposed, tokens dropped, an axis lost or added."""
    if case.got is None or case.wanted is None or case.got.shape == case.wanted.shape:
        return None
    wanted, got = case.wanted.detach(), case.got.detach().to(case.wanted.device)
    sizes = f"its {case.what} is {shape(got.shape)} where the reference's is {shape(wanted.shape)}"
    evidence: dict[str, object] = {"wanted": tuple(wanted.shape), "got": tuple(got.shape)}
    if got.ndim == wanted.ndim:
        changed = [axis for axis in range(got.ndim) if got.shape[axis] != wanted.shape[axis]]
        if len(changed) == 2 and wanted.transpose(*changed).shape == got.shape:
            like = _alike(case, wanted.transpose(*changed), got)
            because = f"{sizes}: " + (
                f"axes {changed[0]} and {changed[1]} are exchanged" if like else "not its transpose"
            )
            return Cause("shape", because, {**evidence, "transposed": tuple(changed) if like else None})
        if len(changed) == 1 and got.shape[changed[0]] < wanted.shape[changed[0]]:
            return _dropped(case, wanted, got, changed[0], sizes, evidence)
    elif wanted.squeeze().shape == got.squeeze().shape:
        return Cause("shape", f"{sizes}: the same but for axes of size 1, which broadcast differently", evidence)
    return Cause("shape", sizes, evidence)


def other_integers(case: Case) -> Cause | None:
    """Positions, ids, choices: the first values that differ, and the step between them where it is one."""
    if case.got is None or case.wanted is None or case.got.is_floating_point() or case.wanted.is_floating_point():
        return None
    if torch.bool in (case.got.dtype, case.wanted.dtype) or case.got.is_complex() or case.wanted.is_complex():
        return None
    try:
        got, wanted = torch.broadcast_tensors(case.got.detach(), case.wanted.detach().to(case.got.device))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    off = got != wanted
    count = int(off.sum())
    if not count:
        return None
    first = off.nonzero()[0].tolist()
    values, had = (side[off][:_SHOWN].tolist() for side in (got, wanted))
    steps = (got[off].long() - wanted[off].long()).unique()
    said = f"its {case.what} is {listed(values)} where the reference's is {listed(had)}"
    because = f"{said}, from {first} on: {count:,} of {off.numel():,} differ"
    evidence: dict[str, object] = {"values": (had, values), "first": first, "count": count}
    if len(steps) == 1 and count > 1:
        because += f", all by {int(steps):+d}"
        evidence["step"] = int(steps)
    if case.operations:
        because += f"; {case.operations[0].because}"
        evidence["operation"] = case.operations[0].name
    return Cause("operation", because, evidence)


def random(case: Case) -> Cause | None:
    """Two runs of the candidate on the same inputs differ, and by no little part of the difference."""
    values = Values.of(case)
    if case.again is None or values is None or case.again.shape != values.got.shape:
        return None
    apart = away(wide(case.again).to(values.got.device), values.got)
    # Sums by atomic additions differ in the last places from run to run: that is no dice.
    if not apart > max(4 * precision(values.dtype), values.error / 10):
        return None
    dice = [
        (f"{path} " if path else "") + f"dropout (p {module.p:g})"
        for path, _, module in parts(case)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p
    ]
    because = f"two runs of it on the same input differ by {apart:.3g}"
    if dice or case.candidate.training > case.reference.training:
        because += f": {dice[0]} is on" if dice else ": it is in training mode"
    return Cause("randomness", because, {"apart": apart, "training": case.candidate.training, "dropout": dice})


def _dropped(
    case: Case, wanted: torch.Tensor, got: torch.Tensor, axis: int, sizes: str, evidence: dict[str, object]
) -> Cause:
    """Find which slices are gone: those that the others, in order, leave out."""
    one, two = (side.movedim(axis, 0).reshape(side.shape[axis], -1) for side in (wide(wanted), wide(got)))
    missing: list[int] = []
    at = 0
    for place in range(min(len(one), _ALIGNED)):
        if at < len(two) and _alike(case, one[place], two[at]):
            at += 1
        else:
            missing.append(place)
    if at < len(two) or len(one) > _ALIGNED:
        return Cause("shape", sizes, evidence)
    noun = "token" if axis < wanted.ndim - 1 else "feature"
    because = f"{sizes}: {indices(missing, noun)} {'is' if len(missing) == 1 else 'are'} dropped along axis {axis}"
    return Cause("tokens" if noun == "token" else "shape", because, {**evidence, "axis": axis, "dropped": missing[:64]})


def _alike(case: Case, wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether two parts agree as well as rounding lets them; without a measured floor of this shape, loosely."""
    unit = (
        max(precision(case.wanted.dtype), precision(case.got.dtype))
        if case.wanted is not None and case.got is not None
        else 0.0
    )
    return away(wide(got), wide(wanted)) <= max(16 * unit, 1e-5)
