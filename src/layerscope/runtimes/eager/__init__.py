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

import torch
from torch.nn.parameter import is_lazy

from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.runtimes.eager.modules import WRAPPER, Modules, ModuleTree, compiled_parts, is_compiled, modules_of
from layerscope.runtimes.eager.operations import OpWatch
from layerscope.runtimes.eager.watcher import Watcher
from layerscope.runtimes.runtime import Wanted, Weights, no_notes, no_remark
from layerscope.runtimes.sink import RuntimeSink

__all__ = [
    "NAME",
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
notes, remark = no_notes, no_remark


def points(model: torch.nn.Module) -> list[Place]:
    """Return the places of a model, shared modules under each of their names."""
    by_name, shared = modules_of(model)
    named = [*by_name.items(), *((other, by_name[first]) for other, first in shared.items())]
    return [Place(name, tuple(c.__name__ for c in type(module).__mro__[:-1])) for name, module in named]


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
    sink: RuntimeSink,
    *,
    ops: Callable[[str], str | None] | None = None,
) -> Iterator[torch.nn.Module]:
    """Tell `sink` what passes the wanted sides of the wanted modules until the block ends.

    `ops` maps an operation's qualified name to the name to record it under, or None to let it pass. Operations are
    watched on the thread that enters the block, inside the model's forward.
    """
    by_name, _ = modules_of(model)
    watcher = Watcher(sink)
    places = {name: frozenset(sides) for name, sides in wanted.items()}
    # An operation is placed by the innermost module under way, a forward begins with the outermost.
    company = list(by_name) if ops is not None else [above for name in wanted for above in _above(name)]
    places |= {name: frozenset() for name in company if name in by_name and name not in places}
    root = next((name for name, module in by_name.items() if module is model), None)
    if root is None:  # the model itself is a wrapper, and carries no name of its own
        by_name = {**by_name, WRAPPER: model}
        places[WRAPPER] = frozenset()
    else:
        places.setdefault(root, frozenset())
    with ExitStack() as stack:
        stack.callback(watcher.close)
        for name, sides in places.items():
            watcher.hook(by_name[name], name, sides)
        watcher.tree = ModuleTree(model)
        if ops is not None:
            stack.enter_context(OpWatch(ops, watcher.local, sink))
        yield model


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
