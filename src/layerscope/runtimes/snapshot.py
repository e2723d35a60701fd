"""Run a model on the side, and leave no trace of it: random state, buffers and what modules remember are put back.

    args, kwargs = copied(args, kwargs, model)
    with kept(model):
        model(*args, **kwargs)

Parameters are left as they are: a forward does not change them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from layerscope.runtimes.values import argument_leaves

__all__ = ["copied", "kept", "why_not_again"]


@contextmanager
def kept(model: torch.nn.Module | None, *, beside: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Put everything back when the block ends; `beside` are tensors whose devices have random state to keep as well.

    Of a module that is what it holds: buffers and other tensors, by their values, and what its attributes, its lists
    and its dicts refer to. What objects of other kinds hold inside is not known.
    """
    modules = [] if model is None else [_Module.of(module) for module in model.modules()]
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        for kind, devices in _accelerators([*tensors, *beside]).items():
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        try:
            yield
        finally:
            for module in modules:
                module.put_back()
            random.setstate(python)
            np.random.set_state(numpy)


def why_not_again(model: torch.nn.Module) -> str:
    """Say why a model must not be run once more than its user does; nothing where it may."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "one more forward of this rank could wait for the others for ever"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "one more forward would be part of the CUDA graph that is captured"
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        return "the first forward is what gives the model its weights"
    return ""


def copied(args: tuple[Any, ...], kwargs: Mapping[str, Any], model: torch.nn.Module) -> tuple[Any, Any]:
    """Copy what a model is called with, for it may change it in place: tensors, and objects such as caches.

    What is the model's own is no part of that.
    """
    own = [*model.modules(), *model.parameters(), *model.buffers()]
    known = {id(each): each for each in own}
    for _, tensor in argument_leaves(args, kwargs):
        if id(tensor) not in known:
            known[id(tensor)] = _copy_of(tensor)
    return copy.deepcopy((args, dict(kwargs)), known)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor so that compiled code takes it for the same: strides, marks, gradient and inference mode."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        made = _cloned(tensor.detach())
    if tensor.requires_grad:
        made.requires_grad_()
    if not tensor.is_leaf:
        with torch.enable_grad():
            made = made.clone()  # a leaf could not be changed in place
    if type(tensor) is torch.Tensor:  # the attributes of other kinds can be what they are made of
        made.__dict__.update(tensor.__dict__)
    return made


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    clone = tensor.clone()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or clone.stride() == tensor.stride():
        return clone
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _accelerators(tensors: Iterable[torch.Tensor]) -> dict[str, list[torch.device]]:
    """Return the devices that these tensors are on by their kind; the processor's own random state comes with each."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    kinds: dict[str, list[torch.device]] = {} if devices else {"cuda": []}
    for device in devices:
        kinds.setdefault(device.type, []).append(device)
    return kinds


class _Value(NamedTuple):
    """A tensor, and what was in it."""

    tensor: torch.Tensor
    version: int | None
    before: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Value:
        return cls(tensor, None if tensor.is_inference() else tensor._version, tensor.detach().clone())

    def put_back(self) -> None:
        if self._changed():
            with torch.no_grad():
                self.tensor.copy_(self.before)

    def _changed(self) -> bool:
        """Tell whether to write; what need not be written keeps its version, which a graph may have noted."""
        if self.version is not None and self.tensor._version != self.version:
            return True
        usual = type(self.tensor) is torch.Tensor and self.tensor.layout is torch.strided
        return usual and not torch.equal(self.tensor, self.before)


class _Module(NamedTuple):
    """A module, and what it held."""

    module: torch.nn.Module
    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]]
    values: list[_Value]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Module:
        attributes = dict(module.__dict__)
        containers = [(held, held.copy()) for held in attributes.values() if isinstance(held, (list, dict))]
        inside = [part for _, held in containers for part in (held.values() if isinstance(held, dict) else held)]
        values = [
            _Value.of(held)
            for held in (*attributes.values(), *inside)
            if isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.Parameter) and _has_values(held)
        ]
        return cls(module, attributes, containers, values)

    def put_back(self) -> None:
        for held, before in self.containers:
            if isinstance(held, dict):
                _put_back(held, before)
            elif list(map(id, held)) != list(map(id, before)):
                held[:] = before
        _put_back(self.module.__dict__, self.attributes)
        for value in self.values:
            value.put_back()


def _has_values(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta


def _put_back(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in held if key not in before]:
        del held[key]
    held.update({key: value for key, value in before.items() if key not in held or held[key] is not value})
