"""What a compiled model is called with: any way of giving the same arguments comes to the same tensors.

    arguments = Arguments.of(model, (ids,))
    arguments.tensors((), {"input_ids": ids})       # [ids]: forward calls its first parameter so

What is no tensor (`use_cache=False`, an explicit None) is part of what was compiled: it may be left out, and cannot be
changed. What the example left out has its parameter's default, and may be given as that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layerscope.compile_taps.value_forms import FlatValue, Form, counted, opaque_parts, rebuilt, same
from layerscope.errors import Unsupported

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
    """The names of a forward's parameters, the form of the arguments it was compiled with, and the forms of defaults.

    Arguments go by their parameter's name; those without one (`*args`) by their number.
    """

    parameters: tuple[str, ...]
    form: Form
    defaults: dict[str, Form]

    @classmethod
    def of(cls, model: torch.nn.Module, example_inputs: object) -> Arguments:
        """Describe the example; at least one of its arguments must hold a tensor."""
        parameters = _parameters(model)
        taken = FlatValue.of(_named(parameters, *split(example_inputs)))
        if not taken.tensors:
            raise Unsupported("example_inputs holds no tensor; there is nothing to compile the model for.")
        unknown = opaque_parts(taken.form)
        if unknown:
            raise Unsupported(
                f"example_inputs holds a {unknown[0]}, which a compiled graph does not take; "
                "give tensors, numbers, texts, and tuples, lists and dicts of them."
            )
        return cls(parameters, taken.form, _defaults(model))

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call in the order of the example's; raises where the call is another one."""
        fields = dict(self.form["fields"])
        given = {
            name: value
            for name, value in _named(self.parameters, args, kwargs).items()
            if name in fields or not self._is_default(name, value)
        }
        for name, form in fields.items():
            if isinstance(name, str) and name not in given and not _holds_tensors(form):
                given[name] = rebuilt(form, ())
        taken = FlatValue.of({name: given[name] for name in [*fields, *given] if name in given})
        if not same(taken.form, self.form):
            raise Unsupported(
                f"compiled for the arguments {_told(self.form)}; it was called with {_told(taken.form)}. Compile it "
                "for these: what is no tensor is part of the graph."
            )
        return taken.tensors

    def call(self, tensors: list[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments that these tensors stand for."""
        fields = rebuilt(self.form, tensors)
        rest = [name for name in fields if not isinstance(name, str)]
        before = [name for name in self.parameters if name in fields] if rest else []
        args = [fields.pop(name) for name in (*before, *rest)]
        return args, fields

    def names(self) -> list[str]:
        """Return what to call each tensor: its argument's name, and its place in what is nested."""
        fields = [(each if isinstance(each, str) else f"argument {each}", form) for each, form in self.form["fields"]]
        return [name for field, form in fields for name in _places(field, form)]

    def _is_default(self, name: object, value: object) -> bool:
        default = self.defaults.get(name) if isinstance(name, str) else None
        return default is not None and same(FlatValue.of(value).form, default)


def _parameters(model: torch.nn.Module) -> tuple[str, ...]:
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind not in _NAMED:
            break
        names.append(parameter.name)
    return tuple(names)


def _defaults(model: torch.nn.Module) -> dict[str, Form]:
    parameters = inspect.signature(model.forward).parameters.values()
    forms = {each.name: FlatValue.of(each.default).form for each in parameters if each.default is not each.empty}
    return {name: form for name, form in forms.items() if not counted(form) and not opaque_parts(form)}


def _named(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    positional: dict[Any, Any] = {
        parameters[at] if at < len(parameters) else at: value for at, value in enumerate(args)
    }
    twice = [name for name in kwargs if name in positional]
    if twice:
        raise Unsupported(f"{twice[0]} is given twice: by position and by name.")
    return {**positional, **kwargs}


def _holds_tensors(form: Form) -> bool:
    inside = form.get("parts") or [part for _, part in form.get("fields", ())]
    return "tensor" in form or any(map(_holds_tensors, inside))


def _places(above: str, form: Form) -> list[str]:
    if "tensor" in form:
        return [above]
    inside = list(enumerate(form.get("parts", ()))) or form.get("fields", ())
    return [place for key, part in inside for place in _places(f"{above}[{key!r}]", part)]


def _told(form: Form) -> str:
    """Say what arguments there are: the name alone of what is one tensor."""
    return ", ".join(str(n) if "tensor" in part else f"{n}={_word(part)}" for n, part in form["fields"]) or "none"


def _word(form: Form) -> str:
    if "tensor" in form:
        return "tensor"
    if "parts" in form:
        inside = ", ".join(map(_word, form["parts"]))
        return f"[{inside}]" if form["is"] == "list" else f"({inside})"
    if "fields" in form:
        return "{" + ", ".join(f"{name}: {_word(part)}" for name, part in form["fields"]) + "}"
    return str(form["opaque"]) if "opaque" in form else repr(form["value"])
