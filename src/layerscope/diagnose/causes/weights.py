"""How the candidate's weights differ from the reference's, parameter by parameter, buffers included.

    differing_weights(case)      # Cause("weights", "its weight is the reference's times 1.050", ...)

Weights that are the reference's cast to another dtype do not differ. A module inside that never ran by itself lends its
weights to its parent's code (`MultiheadAttention.out_proj`, Mamba's `conv1d`): they are the parent's here, under their
path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from layerscope.diagnose.causes.cause import Case, Cause, listed, shape
from layerscope.diagnose.causes.relations import relation
from layerscope.diagnose.judge.measurement import same


def differing_weights(case: Case) -> Cause | None:
    """Return how parameters and buffers differ; None where they do not, or no more than a grid makes them."""
    found = _first_of([cause for cause in _differences(case) if cause.evidence.get("relation") != "grid"])
    return (_owner(case) or found) if found is not None else _missing(case)


def quantised_weights(case: Case) -> Cause | None:
    """Return the grid that weights lie on; in a quantised model that is no fault by itself."""
    return _first_of([cause for cause in _differences(case) if cause.evidence.get("relation") == "grid"])


def _differences(case: Case) -> list[Cause]:
    unlike = ((name, one, two) for name, one, two in paired(case) if not same(one, two))
    return [found for one in unlike if (found := _difference(case, *one)) is not None]


def _first_of(causes: Sequence[Cause]) -> Cause | None:
    """Tell the first, and name the parameters of the others."""
    if len(causes) < 2:
        return causes[0] if causes else None
    first, *rest = causes
    names = [str(cause.evidence["parameter"]) for cause in causes]
    also = f"; its {listed(names[1:])} differ{'s' * (len(rest) == 1)} as well"
    return Cause(first.kind, first.because + also, {**first.evidence, "parameters": names})


def _difference(case: Case, name: str, reference: torch.Tensor, candidate: torch.Tensor) -> Cause | None:
    if reference.shape != candidate.shape:
        return _reshaped(name, reference, candidate)
    broken = _nonfinite(name, reference, candidate)
    if broken is not None:
        return broken
    return _exchanged(case, name, candidate) or (relation if reference.is_floating_point() else _whole_numbers)(
        name, reference, candidate
    )


def _owner(case: Case) -> Cause | None:
    """Find the module whose weights the candidate holds instead of its own."""
    mine = {name: candidate for name, _, candidate in paired(case)}
    paths = {path for path, _, _ in parts(case)}
    for name, other in case.others.items():
        if other is case.reference or name == case.name:
            continue
        theirs = _inside(other, paths)
        if mine.keys() == theirs.keys() and all(_equal(theirs[key], mine[key]) for key in mine):
            evidence = {"relation": "exchanged", "owner": name, "parameters": list(mine)}
            return Cause("weights", f"it holds the weights of {name}", evidence)
    return None


def _exchanged(case: Case, name: str, candidate: torch.Tensor) -> Cause | None:
    """Find whose tensor stands in place of this one."""
    for path, module, _ in parts(case):
        for key, tensor in held(module).items():
            full = f"{path}.{key}".lstrip(".")
            if full != name and _equal(dense(tensor), candidate):
                return Cause(
                    "weights",
                    f"its {name} is the reference's {full}",
                    {"parameter": name, "relation": "exchanged", "owner": full},
                )
    for owner, other in case.others.items():
        theirs = _inside(other, {""})
        for key, tensor in theirs.items():
            if (owner, key) != (case.name, name) and _equal(tensor, candidate):
                full = f"{owner}.{key}"
                return Cause(
                    "weights",
                    f"its {name} is that of {full}",
                    {"parameter": name, "relation": "exchanged", "owner": full},
                )
    return None


def _reshaped(name: str, reference: torch.Tensor, candidate: torch.Tensor) -> Cause | None:
    """Weights of another shape: transposed, or simply another one."""
    if reference.numel() == candidate.numel() and same(reference.reshape(-1), candidate.reshape(-1)):
        return None
    evidence: dict[str, object] = {"parameter": name, "shapes": (tuple(reference.shape), tuple(candidate.shape))}
    if reference.ndim == 2 and same(reference.T, candidate):
        return Cause("weights", f"its {name} is the reference's transposed", {**evidence, "relation": "transposed"})
    because = f"its {name} is {shape(candidate.shape)} where the reference's is {shape(reference.shape)}"
    return Cause("weights", because, {**evidence, "relation": "shape"})


def _nonfinite(name: str, reference: torch.Tensor, candidate: torch.Tensor) -> Cause | None:
    bad = candidate.isfinite().logical_not() & reference.isfinite().to(candidate.device)
    if not bool(bad.any()):
        return None
    count, first = int(bad.sum()), bad.nonzero()[0].tolist()
    values = "value that is" if count == 1 else "values that are"
    because = f"its {name} has {count:,} {values} not finite, first at {first}"
    return Cause("nonfinite", because, {"parameter": name, "count": count, "first": first})


def _whole_numbers(name: str, reference: torch.Tensor, candidate: torch.Tensor) -> Cause | None:
    """Masks and indices: how many differ, and whether they are the same ones a step away."""
    off = int((reference != candidate.to(reference.device)).sum())
    evidence: dict[str, object] = {"parameter": name, "count": off, "relation": "values"}
    for axis, size in enumerate(reference.shape):
        for step in (1, -1) if size > 2 else ():
            early, late = (slice(None, -1), slice(1, None))[::step]
            if same(reference.movedim(axis, 0)[early], candidate.movedim(axis, 0)[late]):
                because = f"its {name} is the reference's shifted by {step} along axis {axis}"
                return Cause("weights", because, {**evidence, "relation": "shifted", "axis": axis, "shift": step})
    return Cause("weights", f"its {name} differs in {off:,} of {reference.numel():,} values", evidence)


def _missing(case: Case) -> Cause | None:
    """Name a parameter that only one of two modules of the same type has."""
    for path, module, other in parts(case):
        if type(module) is not type(other):
            continue
        ours, theirs = ({n for n, p in side._parameters.items() if p is not None} for side in (module, other))
        for name in sorted(ours ^ theirs):
            full = f"{path}.{name}".lstrip(".")
            has = f"has no {full}" if name in ours else f"has a {full}"
            also = "where the reference has one" if name in ours else "where the reference has none"
            return Cause("weights", f"it {has} {also}", {"parameter": full, "relation": "missing"})
    return None


def _inside(module: nn.Module, paths: set[str]) -> Mapping[str, torch.Tensor]:
    found = {}
    for path in paths:
        inner = dict(module.named_modules()).get(path) if path else module
        for name, tensor in held(inner).items() if inner is not None else ():
            full = dense(tensor)
            if full is not None and name != "num_batches_tracked":
                found[f"{path}.{name}".lstrip(".")] = full
    return found


def _equal(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors are the same and say something: zeros and ones are in any model."""
    if one is None or one.shape != other.shape or one.numel() < 2 or not other.is_floating_point():
        return False
    few = one.reshape(-1)[:8], other.reshape(-1)[:8]
    return same(*few) and same(one, other) and bool((one != one.reshape(-1)[0]).any())


# Where wrappers keep what they wrap: PEFT, torch.compile, DDP.
_WRAPPED = ("base_layer", "_orig_mod", "module")
# Counters, which no result depends on.
_IDLE = frozenset({"num_batches_tracked"})


def parts(case: Case) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the suspect and what is used functionally inside it: path, the reference's, the candidate's."""
    there = dict(_unwrapped(case.candidate).named_modules())
    for path, module in _unwrapped(case.reference).named_modules():
        if path and case.uncalled is not None:
            above = (path, *(path[:at] for at, letter in enumerate(path) if letter == "."))
            if not set(above) & set(case.uncalled):
                continue
        if path in there:
            yield path, module, _unwrapped(there[path])


def paired(case: Case) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors that both sides hold under one name, as dense ones."""
    for path, module, other in parts(case):
        theirs = held(other)
        for name, tensor in held(module).items():
            if name in theirs and name not in _IDLE:
                one, two = dense(tensor), dense(theirs[name])
                if one is not None and two is not None:
                    yield f"{path}.{name}".lstrip("."), one, two


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own tensors by name, not those of the modules inside it."""
    found = {name: tensor for name, tensor in module.__dict__.items() if isinstance(tensor, torch.Tensor)}
    for kept in (module._parameters, module._buffers):
        found |= {name: tensor for name, tensor in kept.items() if tensor is not None}
    return found


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's values as a plain tensor, dequantised where it is quantised; None where they cannot be had."""
    tensor = tensor.detach()
    try:
        if tensor.is_quantized or getattr(type(tensor), "dequantize", None) is not torch.Tensor.dequantize:
            tensor = tensor.dequantize()
        return None if tensor.is_meta or tensor.layout is not torch.strided else tensor
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what a wrapper wraps; an adapter keeps its own weights beside it, the others nothing."""
    for name in _WRAPPED:
        inner = module._modules.get(name)
        if inner is not None and (name == "base_layer" or len(module._modules) == 1):
            return _unwrapped(inner)
    return module
