"""What a compiled model is called with: any way of giving the same arguments comes to the same tensors.

    arguments = Arguments.of(model, (ids,))
    arguments.tensors((), {"input_ids": ids})       # [ids]: forward calls its first parameter so

What is no tensor (`use_cache=False`) is part of what was compiled: it may be left out, and cannot be changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layerscope.compiled.structure import Form, Taken, opaque_parts, rebuilt
from layerscope.errors import Unsupported

__all__ = ["Arguments", "split"]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)


def split(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read `example_inputs`: a tuple are positional arguments, a mapping keyword arguments, a tensor the only one."""
    if isinstance(example_inputs, Mapping):
        return (), {str(name): value for name, value in example_inputs.items()}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    raise Unsupported(
        f"example_inputs is a {type(example_inputs).__name__}; give a tuple of positional arguments, "
        "a dict of keyword arguments, or one tensor."
    )


@dataclass(frozen=True, slots=True)
class Arguments:
    """The names of a forward's parameters, and the form of the arguments it was compiled with.

    Arguments go by their parameter's name; those without one (`*args`) by their number.
    """

    parameters: tuple[str, ...]
    form: Form

    @classmethod
    def of(cls, model: torch.nn.Module, example_inputs: object) -> Arguments:
        """Describe the example; at least one of its arguments must hold a tensor."""
        parameters = _parameters(model)
        taken = Taken.of(_named(parameters, *split(example_inputs)))
        if not taken.tensors:
            raise Unsupported("example_inputs holds no tensor; there is nothing to compile the model for.")
        unknown = opaque_parts(taken.form)
        if unknown:
            raise Unsupported(
                f"example_inputs holds a {unknown[0]}, which a compiled graph does not take; "
                "give tensors, numbers, texts, and tuples, lists and dicts of them."
            )
        return cls(parameters, taken.form)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call in the order of the example's; raises where the call is another one."""
        given = _named(self.parameters, args, kwargs)
        for name, form in self.form["fields"]:
            if name not in given and not _holds_tensors(form):
                given[name] = rebuilt(form, ())
        order = [name for name, _ in self.form["fields"]]
        taken = Taken.of({name: given[name] for name in [*order, *given] if name in given})
        if taken.form != self.form:
            raise Unsupported(f"compiled for the arguments {_told(self.form)}; it was called with {_told(taken.form)}.")
        return taken.tensors

    def call(self, tensors: list[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments that these tensors stand for."""
        fields = rebuilt(self.form, tensors)
        named = {name: value for name, value in fields.items() if isinstance(name, str)}
        return [value for name, value in fields.items() if not isinstance(name, str)], named


def _parameters(model: torch.nn.Module) -> tuple[str, ...]:
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind not in _NAMED:
            break
        names.append(parameter.name)
    return tuple(names)


def _named(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    positional: dict[Any, Any] = {
        parameters[at] if at < len(parameters) else at: value for at, value in enumerate(args)
    }
    twice = [name for name in kwargs if name in positional]
    if twice:
        raise Unsupported(f"{twice[0]} is given twice: by position and by name.")
    return {name: value for name, value in {**positional, **kwargs}.items() if value is not None}


def _holds_tensors(form: Form) -> bool:
    inside = form.get("parts") or [part for _, part in form.get("fields", ())]
    return "tensor" in form or any(map(_holds_tensors, inside))


def _told(form: Form) -> str:
    def one(name: object, part: Form) -> str:
        if _holds_tensors(part):
            return str(name)
        return f"{name}={part['value']!r}" if "value" in part else f"{name}={part.get('opaque', part.get('is'))}"

    return ", ".join(one(name, part) for name, part in form["fields"]) or "none"
