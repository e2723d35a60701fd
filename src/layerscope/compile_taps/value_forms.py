"""What a nested value looks like without its tensors, as JSON has it; and the value made again from other tensors.

    taken = FlatValue.of(CausalLMOutput(logits=x))
    taken.tensors                       # [x], in the order of `leaves`
    rebuilt(taken.form, [y])            # CausalLMOutput(logits=y)

Compiled graphs take and give tensors alone, one after the other; the form is what they were taken out of.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

Form = dict[str, Any]

_PLAIN = (type(None), bool, int, float, str)
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str)}


class Fields(dict[str, Any]):
    """What stands in for an output whose class cannot be imported: fields by name and by key."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(self)}.") from None


class LeftOut:
    """What stands where the model returned an object that a compiled graph cannot: to use it is an error that says so.

    None would say that there is none, and would be taken for that when it is given back to the model.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<a {self._kind} that the compiled graph left out>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"no {name!r}: the model returns a {self._kind} here, which a compiled graph cannot; compile with "
            "backend='inductor', which can, or so that the model returns none (a cache: use_cache=False)."
        )

    def _used(self, *_: object) -> NoReturn:
        raise TypeError(
            f"the model returns a {self._kind} here, which a compiled graph cannot; have it return a tensor, or "
            "compile with backend='inductor'."
        )

    __bool__ = __int__ = __float__ = __index__ = __eq__ = __len__ = __iter__ = _used
    __hash__ = object.__hash__


class FlatValue(NamedTuple):
    """A value taken apart: its form, its tensors in order, and the classes that occur in it by their text."""

    form: Form
    tensors: list[torch.Tensor]
    classes: dict[str, type]

    @classmethod
    def of(cls, value: object) -> FlatValue:
        """Take a value apart; the tensors come in the order in which `values.leaves` walks it."""
        taken = cls({}, [], {})
        form = _form(value, taken, ())
        return taken._replace(form=form)


def rebuilt(form: Form, tensors: Sequence[torch.Tensor], classes: Mapping[str, type] | None = None) -> Any:
    """Make the value of a form; `classes` are those at hand, others are imported where they are installed."""
    return _rebuilt(form, tensors, classes or {})


def opaque_parts(form: Form) -> list[str]:
    """List the kinds of objects that a form has no place for: they are left out of what is made of it."""
    if "opaque" in form:
        return [str(form["opaque"])]
    return [kind for part in _inside(form) for kind in opaque_parts(part)]


def counted(form: Form) -> int:
    """Count the tensors of a form; raises ValueError for what is no form, or numbers its tensors out of order."""
    numbers = _numbers(form)
    if numbers != list(range(len(numbers))):
        raise ValueError(f"its tensors are numbered {numbers}")
    return len(numbers)


def same(form: Form, other: Form) -> bool:
    """Tell whether two forms are the same to a model: 1, 1.0 and True are not, NaN and NaN are."""
    if form.keys() != other.keys() or len(_inside(form)) != len(_inside(other)):
        return False
    for key in form.keys() - {"parts", "fields"}:
        if type(form[key]) is not type(other[key]) or repr(form[key]) != repr(other[key]):
            return False
    names, others = ([key for key, _ in each.get("fields", ())] for each in (form, other))
    return names == others and all(map(same, _inside(form), _inside(other)))


def tensors_of(form: Form, value: object) -> list[torch.Tensor]:
    """Return the tensors of a value that are where the form has tensors, and leave out any others."""
    if "tensor" in form:
        return [value] if isinstance(value, torch.Tensor) else []
    if "parts" in form:
        held: list[Any] = list(value) if isinstance(value, Sequence) else []
    else:
        held = [part for _, part in _fields(value) or ()] if "fields" in form else []
    return [tensor for part, each in zip(_inside(form), held, strict=False) for tensor in tensors_of(part, each)]


def _inside(form: Form) -> list[Form]:
    return list(form.get("parts") or [part for _, part in form.get("fields", ())])


def _numbers(form: Any) -> list[int]:
    if not isinstance(form, dict) or sum(key in form for key in ("tensor", "value", "opaque", "parts", "fields")) != 1:
        raise ValueError(f"{str(form)[:40]!r} is no form of a value")
    if "tensor" in form:
        return [form["tensor"]]
    if ("parts" in form or "fields" in form) and not isinstance(form.get("is"), str):
        raise ValueError(f"{str(form)[:40]!r} does not say what it is")
    return [number for part in _inside(form) for number in _numbers(part)]


def _form(value: object, taken: FlatValue, above: tuple[object, ...]) -> Form:
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
    if _is_torchs(kind):  # what topk, max and sort return
        return {"is": _text(kind), "parts": [_form(part, taken, within) for part in value]}  # type: ignore[attr-defined]
    fields = _fields(value)
    if fields is None or not all(type(key) in (str, int) for key, _ in fields):
        return {"opaque": kind.__name__}
    form: Form = {"is": "dict", "fields": [[key, _form(part, taken, within)] for key, part in fields]}
    if kind is defaultdict:
        factory = value.default_factory  # type: ignore[attr-defined]
        form["is"] = f"defaultdict:{factory.__name__}" if factory else "defaultdict:"
    elif kind is not dict:
        form["is"] = _text(kind)
        taken.classes[form["is"]] = kind
    if getattr(value, "__dict__", None) is value:
        form["attributes"] = "items"
    return form


def _text(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_torchs(kind: type) -> bool:
    return issubclass(kind, tuple) and kind.__module__ == "torch.return_types"


def _fields(value: object) -> list[tuple[Any, object]] | None:
    """Return the named parts of a value that can be made again from them; None for any other."""
    if isinstance(value, dict):  # a ModelOutput is an OrderedDict first
        return list(value.items()) if _is_made_of_items(value) else None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, list, set, str)):
        named = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [(name, getattr(value, name)) for name in dict.fromkeys([*named, *getattr(value, "__dict__", ())])]
    return None


def _is_made_of_items(value: dict[Any, Any]) -> bool:
    """Tell whether a dict, of whatever class, is its items and nothing else that would be lost with it."""
    kind = type(value)
    if kind is defaultdict:
        return value.default_factory in (None, *_FACTORIES.values())  # type: ignore[attr-defined]
    beside = getattr(value, "__dict__", {})
    return not issubclass(kind, defaultdict) and (beside is value or not beside.keys() - _declared(kind))


def _rebuilt(form: Form, tensors: Sequence[torch.Tensor], classes: Mapping[str, type]) -> Any:
    if "tensor" in form:
        return tensors[form["tensor"]]
    if "parts" in form:
        return _sequence(form["is"], [_rebuilt(part, tensors, classes) for part in form["parts"]])
    if "opaque" in form:
        return LeftOut(str(form["opaque"]))
    if "fields" not in form:
        return form.get("value")
    fields = {key: _rebuilt(part, tensors, classes) for key, part in form["fields"]}
    name, _, factory = form["is"].partition(":")
    if name == "dict":
        return fields
    if name == "defaultdict":
        return defaultdict(_FACTORIES.get(factory), fields)
    kind = classes.get(form["is"]) or _imported(form["is"])
    if kind is None:
        return Fields(fields)
    made = _made(kind, fields)
    if form.get("attributes") == "items" and isinstance(made, dict):
        object.__setattr__(made, "__dict__", made)
    return made


def _sequence(name: str, parts: list[Any]) -> Any:
    if name in ("tuple", "list"):
        return tuple(parts) if name == "tuple" else parts
    kind = getattr(torch.return_types, name.partition(":")[2], None)
    return kind(parts) if isinstance(kind, type) and _is_torchs(kind) else tuple(parts)


def _made(kind: type, fields: dict[Any, Any]) -> Any:
    """Make an object of its parts, and run none of its class's code: what that did is in the parts already."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, fields.values())
    if not issubclass(kind, dict):
        made: Any = object.__new__(kind)
        for name, value in fields.items():
            if name in _declared(kind):
                object.__setattr__(made, name, value)  # it may be frozen, or in a slot
            else:
                vars(made)[name] = value
        return made
    own: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
    made = own.__new__(kind)
    for key, value in fields.items():
        own.__setitem__(made, key, value)
    for name in _declared(kind):  # a ModelOutput has None under the names that are no items
        object.__setattr__(made, name, fields.get(name))
    return made


def _declared(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


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
