"""What a nested value looks like without its tensors, as JSON has it; and the value made again from other tensors.

    taken = Taken.of(CausalLMOutput(logits=x))
    taken.tensors                       # [x], in the order of `leaves`
    rebuilt(taken.form, [y])            # CausalLMOutput(logits=y)

Compiled graphs take and give tensors alone, one after the other; the form is what they were taken out of.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Form", "Taken", "opaque_parts", "rebuilt"]

Form = dict[str, Any]

_PLAIN = (type(None), bool, int, float, str)


class Fields(dict[str, Any]):
    """What stands in for an output whose class cannot be imported: fields by name and by key."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(self)}.") from None


class Taken(NamedTuple):
    """A value taken apart: its form, its tensors in order, and the classes that occur in it by their text."""

    form: Form
    tensors: list[torch.Tensor]
    classes: dict[str, type]

    @classmethod
    def of(cls, value: object) -> Taken:
        """Take a value apart; the tensors come in the order in which `values.leaves` walks it."""
        taken = cls({}, [], {})
        form = _form(value, taken, ())
        return taken._replace(form=form)


def rebuilt(form: Form, tensors: Sequence[torch.Tensor], classes: Mapping[str, type] | None = None) -> Any:
    """Make the value of a form; `classes` are those at hand, others are imported where they are installed."""
    return _rebuilt(form, tensors, classes or {})


def opaque_parts(form: Form) -> list[str]:
    """List the kinds of objects that a form has no place for: they are None in what is made of it."""
    if "opaque" in form:
        return [str(form["opaque"])]
    inside = form.get("parts") or [part for _, part in form.get("fields", ())]
    return [kind for part in inside for kind in opaque_parts(part)]


def _form(value: object, taken: Taken, above: tuple[object, ...]) -> Form:
    if isinstance(value, torch.Tensor):
        taken.tensors.append(value)
        return {"tensor": len(taken.tensors) - 1}
    if type(value) in _PLAIN:
        return {"value": value}
    kind = type(value)
    if any(value is outer for outer in above):
        return {"opaque": kind.__name__}
    within = (value, *above)
    if kind in (tuple, list):
        return {"is": kind.__name__, "parts": [_form(part, taken, within) for part in value]}  # type: ignore[attr-defined]
    fields = _fields(value)
    if fields is None or not all(isinstance(key, (str, int)) for key, _ in fields):
        return {"opaque": kind.__name__}
    form: Form = {"is": "dict", "fields": [[key, _form(part, taken, within)] for key, part in fields]}
    if kind is not dict:
        form["is"] = f"{kind.__module__}:{kind.__qualname__}"
        taken.classes[form["is"]] = kind
    return form


def _fields(value: object) -> list[tuple[Any, object]] | None:
    if isinstance(value, Mapping):  # a ModelOutput is an OrderedDict first
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None


def _rebuilt(form: Form, tensors: Sequence[torch.Tensor], classes: Mapping[str, type]) -> Any:
    if "tensor" in form:
        return tensors[form["tensor"]]
    if "parts" in form:
        parts = [_rebuilt(part, tensors, classes) for part in form["parts"]]
        return tuple(parts) if form["is"] == "tuple" else parts
    if "fields" not in form:
        return form.get("value")
    fields = {key: _rebuilt(part, tensors, classes) for key, part in form["fields"]}
    if form["is"] == "dict":
        return fields
    kind = classes.get(form["is"]) or _imported(form["is"])
    if kind is None:
        return Fields(fields)
    if issubclass(kind, Mapping) and not dataclasses.is_dataclass(kind):
        return kind(fields)  # type: ignore[call-arg]
    return kind(**fields)


def _imported(text: str) -> type | None:
    """Return a class of outputs by its text: of transformers, or of a module that is imported already.

    A file must not decide what code is imported, nor what is called: only classes of plain fields are taken.
    """
    module, _, path = text.partition(":")
    try:
        found: Any = sys.modules.get(module)
        if found is None and module.split(".")[0] == "transformers":
            found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    plain = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
    return found if plain else None
