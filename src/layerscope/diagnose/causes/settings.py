"""Numbers, flags and names that the two modules were made with, and that differ.

    differing_settings(case)      # Cause("constant", "its eps is 1e-03 where the reference has 1e-06", ...)

What has no say in the result is left out: dropout in evaluation mode, bookkeeping, dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn

from layerscope.diagnose.causes.cause import Case, Cause, listed
from layerscope.diagnose.causes.parameters import parts
from layerscope.report.writing import some

_IDLE = frozenset(
    {"inplace", "gradient_checkpointing", "gradient_checkpointing_func", "dtype", "torch_dtype", "transformers_version"}
    | {"architectures", "name_or_path", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
    | {"compute_dtype", "device", "training"}
)
_IN_TRAINING = ("drop", "momentum", "jitter")
_ALWAYS_KEPT = ("_attn_implementation",)
_LONGEST = 16  # of a tuple or list
_OTHER = object()
_NUMBERS = torch.linspace(-8, 8, 4097)
_SAME_FUNCTION = 1e-6  # of the largest value: another way to round
_LONGEST_NAME = 60


def differing_settings(case: Case) -> Cause | None:
    """The modules' own attributes differ."""
    found = {}
    for path, module, other in parts(case):
        for name, pair in _differing(vars(module), vars(other), training=other.training):
            found[f"{path}.{name}".lstrip(".")] = pair
    if found:
        return _told(found)
    wakes = [path for path, one, two in parts(case) if two.training != one.training and _minds_training(two)]
    if not wakes:
        return None
    mode, other_mode = ("training", "evaluation") if case.candidate.training else ("evaluation", "training")
    where = f"its {wakes[0]} is" if wakes[0] else "it is"
    because = f"{where} in {mode} mode where the reference is in {other_mode} mode"
    return Cause("constant", because, {"setting": "training", "values": (mode == "training", mode != "training")})


def other_function(case: Case) -> Cause | None:
    """Two classes without weights that do not compute the same, number by number: another activation."""
    if not _unrelated(case) or not all(_elementwise(side) for side in (case.reference, case.candidate)):
        return None
    had, got = (side.forward(_NUMBERS.clone()) for side in (case.reference, case.candidate))
    apart = (got - had).abs()
    at = int(apart.argmax())
    if float(apart[at]) <= _SAME_FUNCTION * float(had.abs().max()):
        return None
    x, most = float(_NUMBERS[at]), float(apart[at])
    one, two = _class(case.reference), _class(case.candidate)
    because = (
        f"it is {two} where the reference has {one}: two functions, at most {most:.2g} apart between -8 and 8 "
        f"(at {x:.3g}, {float(got[at]):.5g} against {float(had[at]):.5g})"
    )
    return Cause("operation", because, {"classes": (one, two), "apart": most, "at": x})


def other_class(case: Case) -> Cause | None:
    """Two classes of which neither is the other's: no cause, but where to look for one."""
    if not _unrelated(case):
        return None
    one, two = _class(case.reference), _class(case.candidate)
    return Cause("unknown", f"no known cause; it is {two} where the reference has {one}", {"classes": (one, two)})


def _unrelated(case: Case) -> bool:
    ours, theirs = type(case.reference), type(case.candidate)
    return not (issubclass(ours, theirs) or issubclass(theirs, ours)) and ours.__name__ != theirs.__name__


def _elementwise(module: nn.Module) -> bool:
    """Whether a module is a function of one number, without weights: what it makes of a part says so."""
    held = [*module.parameters(), *module.buffers(), *module.children()]
    if held or isinstance(module, nn.modules.dropout._DropoutNd):
        return False
    try:
        whole, part = module.forward(_NUMBERS.clone()), module.forward(_NUMBERS[:999].clone())
    except Exception:  # it takes something else
        return False
    return isinstance(whole, torch.Tensor) and whole.shape == _NUMBERS.shape and torch.allclose(whole[:999], part)


def _class(module: nn.Module) -> str:
    """Name a class with what it was made with, where that is short."""
    inner = module.extra_repr()
    name = type(module).__name__
    return f"{name}({inner})" if 0 < len(inner) <= _LONGEST_NAME else name


def differing_configuration(case: Case) -> Cause | None:
    """The configurations that the modules refer to differ; weaker, as most of what they say concerns others."""
    found = {}
    for path, module, other in parts(case):
        for name, config in vars(module).items():
            theirs = vars(other).get(name)
            if type(config).__name__.endswith(("Config", "Args", "Arguments")) and type(theirs) is type(config):
                for key, pair in _differing(vars(config), vars(theirs), training=other.training):
                    found[f"{path}.{name}.{key}".lstrip(".")] = pair
    return _told(found) if found else None


def _told(found: Mapping[str, tuple[object, object]]) -> Cause:
    said = [f"its {name} is {_text(got)} where the reference has {_text(had)}" for name, (had, got) in found.items()]
    (name, (had, got)), *_ = found.items()
    evidence: dict[str, object] = {"setting": name, "values": (had, got)}
    if len(found) > 1:
        evidence["settings"] = list(found)
    return Cause("constant", listed(said) if len(said) < 4 else some(said), evidence)


def _differing(
    ours: Mapping[str, object], theirs: Mapping[str, object], *, training: bool
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield what both have and is not the same."""
    for name, value in ours.items():
        if name not in theirs or name in _IDLE or (name.startswith("_") and name not in _ALWAYS_KEPT):
            continue
        if not training and any(word in name or name == "p" for word in _IN_TRAINING):
            continue
        one, two = _plain(value), _plain(theirs[name])
        if _OTHER not in (one, two) and not _same(one, two):
            yield name, (one, two)


def _plain(value: object) -> object:
    """Return a value that can be compared and printed; `_OTHER` for everything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__name__
    inner = tuple(value.items()) if isinstance(value, dict) else value
    if isinstance(inner, tuple | list) and len(inner) <= _LONGEST:
        plain = tuple(map(_plain, inner))
        return plain if _OTHER not in plain else _OTHER
    return _OTHER


def _same(one: object, two: object) -> bool:
    if isinstance(one, int | float) and isinstance(two, int | float):
        return math.isclose(one, two, rel_tol=1e-6) or (math.isnan(one) and math.isnan(two))
    return one == two


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else str(value)


def _minds_training(module: nn.Module) -> bool:
    """Whether a module's own result depends on its mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    return any("drop" in name and isinstance(value, int | float) and value > 0 for name, value in vars(module).items())
