"""Log the operations that a module's own code executes, with their tensors and numbers.

    calls = traced(lambda: module(x), inside=lambda: running[-1] is module)

What modules inside it execute is theirs and left out, as `inside` tells. The log is made below autograd, where every
kernel call passes, however the code above it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They give the same values back: whether they run depends on dtypes and devices, not on what the code says.
_SILENT = frozenset(
    {"detach", "alias", "lift_fresh", "clone", "contiguous", "_unsafe_view", "expand", "is_same_size", "empty_like"}
)
_IDLE = frozenset({"device", "layout", "pin_memory", "non_blocking", "memory_format", "generator", "half_to_float"})
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses come again as what they are made of
_NAMES = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_to_copy": "to",
    "t": "transpose",
    "_reshape_alias": "view",
}


@dataclass(frozen=True, slots=True)
class Called:
    """One executed operation: its name, the tensors that went in and came out, and its other arguments by name."""

    index: int
    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    scalars: Mapping[str, object]
    sources: tuple[int | None, ...]  # which call made each input; None: the module's input, a weight, another module

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return tuple(self.outputs[0].shape) if self.outputs else ()

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What the counterpart in another log is found by."""
        return self.name, self.shape


def traced(call: Callable[[], object], *, inside: Callable[[], bool] = lambda: True) -> list[Called]:
    """Run `call` and return what was executed while `inside()` holds."""
    log = _Log(inside)
    with log:
        call()
    return log.calls


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inside: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Called] = []
        self._inside = inside
        # By id, the call that made a tensor; the tensor is kept alive, so that no other comes back under its id.
        self._made: dict[int, tuple[torch.Tensor, int | None]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        own = self._inside()
        sources = tuple(self._made[id(tensor)][1] if id(tensor) in self._made else None for tensor in inputs)
        if func._schema.is_mutable:
            self._save(inputs[:1] + _tensors(kwargs.get("out")))
            inputs = tuple(tensor.clone() for tensor in inputs) if own else inputs
        result = func(*args, **kwargs)
        if own:
            outputs, name = _tensors(result), _name(func)
            made: int | None = len(self.calls)
            if name in _SILENT:
                made = sources[0] if sources else None
            else:
                self.calls.append(Called(len(self.calls), name, inputs, outputs, _scalars(func, args, kwargs), sources))
            self._made |= {id(tensor): (tensor, made) for tensor in outputs}
        return result

    def _save(self, written: tuple[torch.Tensor, ...]) -> None:
        """Copy what the log holds of memory that is about to be written to."""
        places = {_place(tensor) for tensor in written}
        for at, call in enumerate(self.calls):
            if places & {_place(tensor) for tensor in (*call.inputs, *call.outputs)}:
                copied = [
                    tuple(tensor.clone() if _place(tensor) in places else tensor for tensor in side)
                    for side in (call.inputs, call.outputs)
                ]
                self.calls[at] = replace(call, inputs=copied[0], outputs=copied[1])


def _name(func: torch._ops.OpOverload) -> str:
    name = func.overloadpacket.__name__.rstrip("_")
    return "attention" if "scaled_dot_product" in name else _NAMES.get(name, name)


def _tensors(tree: object) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if type(leaf) in _PLAIN)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _scalars(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments that hold no tensor, by the names of the schema; devices and layouts say nothing."""
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given = defaults | dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if not _tensors(value) and name not in _IDLE
    }
