"""Watch a plain PyTorch model through hooks that leave no trace.

    with watch(model, {"layers.3": {"input", "output"}}, sink):
        model(x)

The hooks return None, hold no state on the user's modules, stay silent in deep copies and forked children, and turn
into nothing when the model is pickled. Gradients are seen through hooks on the autograd graph rather than through
`register_full_backward_hook`, which passes tensors through an identity that forbids in-place operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.points import unwrapped
from layerscope.runtimes.eager.operations import OpWatch
from layerscope.runtimes.eager.watcher import Watcher
from layerscope.runtimes.runtime import Wanted, Weights
from layerscope.runtimes.sink import Sink

__all__ = [
    "NAME",
    "ModuleTree",
    "Modules",
    "check",
    "compiled_parts",
    "is_compiled",
    "modules_of",
    "notes",
    "parameters",
    "points",
    "remark",
    "shared",
    "watch",
    "weights",
    "why_silent",
]

NAME = "eager"

# The model as it was given, where that is a wrapper and its name belongs to what it wraps.
_WRAPPER = "<wrapper>"


class Modules(NamedTuple):
    """The modules of a model by their unwrapped names, and the other names of shared ones."""

    by_name: dict[str, torch.nn.Module]
    shared: dict[str, str]


def modules_of(model: torch.nn.Module) -> Modules:
    """List a model's modules under names that wrappers have not touched.

    A wrapper and what it wraps end up with one name, which is then the wrapped module's. A module found again under
    another name is the same module: it keeps its first name, and the other one is listed in `shared`.
    """
    found = Modules({}, {})
    _walk(model, "", found, {}, frozenset())
    return found


class ModuleTree:
    """Where the modules of a model hang, to see at a glance whether one was put in another's place."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._held = self._now()

    def changed(self) -> dict[str, torch.nn.Module] | None:
        """Return the modules by their names when they are not those of the last time; None while they are."""
        for held, key, child in self._held:
            if held.get(key) is not child:
                self._held = self._now()
                return {**modules_of(self._model).by_name, _WRAPPER: self._model}
        return None

    def _now(self) -> list[tuple[dict[str, Any], str, Any]]:
        modules = self._model.modules()
        return [(above._modules, key, child) for above in modules for key, child in above._modules.items()]


def _walk(module: torch.nn.Module, raw: str, found: Modules, first_name: dict[int, str], above: frozenset[int]) -> None:
    name = unwrapped(raw)
    known = first_name.get(id(module))
    if known is not None and known != name:
        found.shared[name] = known
    else:
        first_name[id(module)] = name
        found.by_name[name] = module
    if id(module) in above:  # a module that contains itself
        return
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, f"{raw}.{key}" if raw else key, found, first_name, above | {id(module)})


def points(model: torch.nn.Module) -> list[Place]:
    """Return the places of a model, shared modules under each of their names."""
    by_name, shared = modules_of(model)
    named = [*by_name.items(), *((other, by_name[first]) for other, first in shared.items())]
    return [Place(name, tuple(c.__name__ for c in type(module).__mro__[:-1])) for name, module in named]


def notes(model: torch.nn.Module) -> dict[str, Any]:
    """Return nothing: looking changes nothing here."""
    return {}


def remark(model: torch.nn.Module) -> str:
    """Return nothing: the points are the modules."""
    return ""


def shared(model: torch.nn.Module) -> dict[str, str]:
    """Map the other names of shared modules to their first."""
    return modules_of(model).shared


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters that have values by now."""
    return [parameter for parameter in model.parameters() if not is_lazy(parameter)]


def weights(model: torch.nn.Module) -> Weights:
    """Return each module's own parameters and buffers; those of lazy modules may have no values yet."""
    own = {
        name: [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, module in modules_of(model).by_name.items()
    }
    return {name: tensors for name, tensors in own.items() if tensors}


def check(model: torch.nn.Module, wanted: Wanted, *, ops: bool) -> None:
    """Refuse to watch operations beside compiled modules."""
    compiled = compiled_parts(model) if ops else []
    if compiled:
        raise Unsupported(
            f"operations cannot be watched beside compiled modules ({', '.join(compiled[:3])}): the watch keeps "
            "torch.compile from running them; record the model before it is compiled."
        )


@contextmanager
def watch(
    model: torch.nn.Module,
    wanted: Wanted,
    sink: Sink,
    *,
    ops: Callable[[str], str | None] | None = None,
) -> Iterator[torch.nn.Module]:
    """Tell `sink` what passes the wanted sides of the wanted modules until the block ends.

    `ops` maps an operation's qualified name to the name to record it under, or None to let it pass. Operations are
    watched on the thread that enters the block, inside the model's forward.
    """
    by_name, _ = modules_of(model)
    watcher = Watcher(sink, ops=ops is not None)
    places = {name: frozenset(sides) for name, sides in wanted.items()}
    # An operation is placed by the innermost module under way, a forward begins with the outermost.
    company = list(by_name) if ops is not None else [above for name in wanted for above in _above(name)]
    places |= {name: frozenset() for name in company if name in by_name and name not in places}
    root = next((name for name, module in by_name.items() if module is model), None)
    if root is None:  # the model itself is a wrapper, and carries no name of its own
        by_name = {**by_name, _WRAPPER: model}
        places[_WRAPPER] = frozenset()
    else:
        places.setdefault(root, frozenset())
    with ExitStack() as stack:
        stack.callback(watcher.close)
        for name, sides in places.items():
            watcher.pair(by_name[name], name, sides).on()
        watcher.tree = ModuleTree(model)
        if ops is not None:
            stack.enter_context(OpWatch(ops, watcher.local, sink))
        yield model


def compiled_parts(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile runs: hooks inside them do not fire."""
    return [name or "." for name, module in modules_of(model).by_name.items() if is_compiled(module)]


def is_compiled(module: torch.nn.Module | None) -> bool:
    """Tell whether torch.compile runs this module: hooks that come later do not fire inside it."""
    return bool(getattr(module, "_compiled_call_impl", None)) or type(module).__module__.startswith("torch._dynamo")


def why_silent(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Say why each of these modules never ran, as far as the model's structure tells."""
    by_name = modules_of(model).by_name
    return {name: _why_silent(by_name, name, model) for name in names}


def _why_silent(by_name: Mapping[str, torch.nn.Module], name: str, model: torch.nn.Module) -> str:
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        above = by_name.get(".".join(parts[:depth]))
        if above is not model and is_compiled(above):
            return "compiled before the tap: hooks do not fire inside a compiled module"
    parent = by_name.get(".".join(parts[:-1]))
    if isinstance(parent, torch.nn.MultiheadAttention) and parts[-1] == "out_proj":
        return "called functionally: MultiheadAttention uses out_proj's weights without calling it"
    if isinstance(by_name[name], (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)):
        return f"never called: a {type(by_name[name]).__name__} only holds other modules"
    return "never called"


def _above(name: str) -> list[str]:
    """Return the names of the modules that contain a module, the whole model first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))] if name else []
