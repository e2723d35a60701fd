"""Which modules are used without being called: another one takes their weights and computes with them.

used_without_a_call(model, {"layers.0.conv1d"}, args, kwargs)       # {"layers.0.conv1d"}: HF's Mamba does
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from layerscope.runtimes.eager import modules_of
from layerscope.runtimes.values import argument_leaves


class _Uses(TorchFunctionMode):
    """Notes the owners of the weights that operations are given."""

    def __init__(self, owners: dict[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "__name__", "").startswith("__get__"):  # reading an attribute computes nothing
            given = (id(tensor) for _, tensor in argument_leaves(args, kwargs or {}))
            self.used.update(self.owners[each] for each in given if each in self.owners)
        return func(*args, **(kwargs or {}))


def used_without_a_call(
    model: nn.Module, silent: Collection[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> set[str]:
    """Run the model, and tell which of the modules that are never called have weights that something uses."""
    by_name = modules_of(model).by_name
    owners = {id(weight): name for name in silent for weight in by_name[name].parameters(recurse=False)}
    if not owners:
        return set()
    uses = _Uses(owners)
    with uses:
        model(*args, **kwargs)
    return uses.used
