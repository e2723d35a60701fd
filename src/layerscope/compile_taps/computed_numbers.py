"""Which numbers in what a model returns are constants, and which the example's inputs made what they are.

    checked(model, arguments, tensors, form)        # the form, with what is not known to be constant left out

A compiled graph gives tensors alone: a number of the example would come back for every input. So a model that returns
numbers is run once more on tensors of unknown sizes and values, and what is still a number then is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.tapped_model import copied
from layerscope.compile_taps.value_forms import FlatValue, Form, opaque_parts, same
from layerscope.runtimes.snapshot import restored

_COMPUTED = "computed "


def checked(model: torch.nn.Module, arguments: Arguments, tensors: Sequence[torch.Tensor], output: Form) -> Form:
    """Return the form of the output with a stand-in for each number that is not known to be a constant."""
    if not _has_numbers(output):
        return output
    try:
        seen = _seen_without_values(model, arguments, tensors)
    except Exception:  # what cannot be run so is not known
        seen = {}
    return _without_computed(output, seen)


def is_computed(form: Form) -> bool:
    """Tell whether a form leaves out numbers that the model computes."""
    return any(kind.startswith(_COMPUTED) for kind in opaque_parts(form))


def _seen_without_values(model: torch.nn.Module, arguments: Arguments, tensors: Sequence[torch.Tensor]) -> Form:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with restored(model), mode, torch.no_grad():
        own = copied(model)
        for module in own.modules():
            tensors_held: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in tensors_held:
                held.update({name: mode.from_tensor(each) for name, each in held.items() if each is not None})
        args, kwargs = arguments.call([_of_any_size(mode, tensor) for tensor in tensors])
        return FlatValue.of(own(*args, **kwargs)).form


def _of_any_size(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    free: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
    return mode.from_tensor(tensor, symbolic_context=free)


def _has_numbers(form: Form) -> bool:
    inside = form.get("parts") or [part for _, part in form.get("fields", ())]
    return _is_number(form) or any(map(_has_numbers, inside))


def _is_number(form: Form) -> bool:
    return type(form.get("value")) in (bool, int, float)


def _without_computed(form: Form, seen: Form) -> Form:
    if _is_number(form):
        return form if same(form, seen) else {"opaque": f"{_COMPUTED}{type(form['value']).__name__}"}
    if "parts" in form:
        others = _of_length(seen.get("parts", ()), len(form["parts"]))
        return {**form, "parts": [_without_computed(*pair) for pair in zip(form["parts"], others, strict=True)]}
    if "fields" in form:
        there = dict(seen.get("fields", ()))
        return {**form, "fields": [[key, _without_computed(part, there.get(key, {}))] for key, part in form["fields"]]}
    return form


def _of_length(parts: Sequence[Form], length: int) -> Sequence[Form]:
    return parts if len(parts) == length else [{}] * length
