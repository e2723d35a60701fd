"""The inputs and the state that a model's first forward began with, copied.

begun = Begun(model)
with begun.watching():
    model(**inputs)
begun.args, begun.kwargs, begun.buffers
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from layerscope.runtimes.snapshot import RandomState
from layerscope.runtimes.values import replaced


class Begun:
    """What the first forward of a model was given, as copies of our own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = original(model)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.random: RandomState | None = None
        self.autocast: torch.dtype | None = None
        self.failed: str = ""

    @property
    def happened(self) -> bool:
        """Whether a forward began, and its inputs could be copied."""
        return self.random is not None and not self.failed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the first forward of the block."""
        handle = self.model.register_forward_pre_hook(self._look, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is to be called in place of a program that has no hooks."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.random is None:
                self.take(args, kwargs)
            return call(*args, **kwargs)

        return called

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.random is None and module is self.model and not torch.compiler.is_compiling():
            self.take(args, kwargs)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what a forward is given; what cannot be copied is remembered as the reason."""
        self.random = RandomState()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        try:
            with torch.no_grad():
                self.args, self.kwargs = copied(args), copied(kwargs)
                self.buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
            if torch.is_autocast_enabled(device):
                self.autocast = torch.get_autocast_dtype(device)
        except Exception as error:
            self.failed = f"the inputs of the first forward cannot be copied ({type(error).__name__}: {error})"

    def inputs(self, dtype: torch.dtype | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs once more, for one twin; floating-point ones in another dtype where one is given."""

        def cast(leaf: object, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        return replaced(copied(self.args), cast), replaced(copied(self.kwargs), cast)

    def arithmetic(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """Run as the first forward ran; a twin in a dtype of its own runs in that."""
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device, self.autocast, enabled=dtype is None)


@contextmanager
def beginning(model: Any) -> Iterator[Begun | None]:
    """Look at the first forward of the block; hand out None for what is no eager module."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        yield None
        return
    begun = Begun(model)
    with begun.watching():
        yield begun


def copied(value: Any) -> Any:
    """Return a copy of a nested value: tensors detached, other objects (a cache) copied whole."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(copied(one) for one in value)
    if type(value) is dict:
        return {name: copied(one) for name, one in value.items()}
    return copy.deepcopy(value)


def original(model: nn.Module) -> nn.Module:
    """Return the eager module inside what torch.compile or a data-parallel wrapper made of it."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model._modules.get("module")
        if inner is None:
            return model
        model = inner


def why_not(model: nn.Module) -> str:
    """Say why no twin of a model can stand for it; nothing when one can."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("FullyShardedDataParallel", "FSDPModule"):
            return f"{name or 'the model'} is sharded ({kind}), and a twin runs on all ranks or on none"
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"dropout is active at {name or 'the model'}: record in eval mode, model.eval()"
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            return f"statistics are updated at {name or 'the model'}: record in eval mode, model.eval()"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "several ranks run, and whether a twin runs is for all of them to decide together"
    return ""
