"""Run a model on the side, and put back all that it touched: random state, buffers, what modules remember.

    args, kwargs = copied(args, kwargs, model)
    with restored(model) as restore:
        model(*args, **kwargs)
        restore()                   # as it was, for another run

Buffers and tensors that hang on modules are copied, because a forward may write into them; the values of parameters are
not, because it must not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from layerscope.runtimes.values import argument_leaves


@contextmanager
def restored(*models: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Put the models back when the block ends, come what may; what the block is given does so in its middle.

    Of a module that is what it holds: buffers and other tensors, by their values, and what its attributes, its lists,
    dicts and sets refer to. What objects of other kinds hold inside is not known.
    """
    snapshots = [_ModuleSnapshot.of(module) for model in models for module in model.modules()]
    grads = [(p, p.grad) for model in models for p in model.parameters() if p.is_leaf]
    drawn = RandomState()

    def restore() -> None:
        for snapshot in snapshots:
            snapshot.restore()
        for parameter, grad in grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        drawn.restore()

    try:
        yield restore
    finally:
        restore()


class RandomState:
    """The random state of Python, numpy, torch's CPU and, where it is in use, the accelerator."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.cpu = torch.get_rng_state()
        module: Any = torch.get_device_module()
        self._accelerator = module if hasattr(module, "get_rng_state_all") and module.is_initialized() else None
        self.devices = self._accelerator.get_rng_state_all() if self._accelerator else []

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self._accelerator:
            self._accelerator.set_rng_state_all(self.devices)

    def moved(self) -> bool:
        """Tell whether torch drew anything since."""
        now = RandomState()
        both = zip(self.devices, now.devices, strict=False)
        return not torch.equal(self.cpu, now.cpu) or any(not torch.equal(a, b) for a, b in both)


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


class _TensorSnapshot(NamedTuple):
    """A tensor, and what was in it."""

    tensor: torch.Tensor
    version: int | None
    before: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorSnapshot:
        return cls(tensor, None if tensor.is_inference() else tensor._version, tensor.detach().clone())

    def restore(self) -> None:
        if self._changed():
            with torch.no_grad():
                self.tensor.copy_(self.before)

    def _changed(self) -> bool:
        """Tell whether to write; what need not be written keeps its version, which a graph may have noted."""
        if self.version is not None and self.tensor._version != self.version:
            return True
        usual = type(self.tensor) is torch.Tensor and self.tensor.layout is torch.strided
        return usual and not torch.equal(self.tensor, self.before)  # batch norm writes without a new version


class _ModuleSnapshot(NamedTuple):
    """What one module holds: its attributes, the contents of those that are containers, the values of tensors."""

    module: torch.nn.Module
    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]]
    tensors: list[_TensorSnapshot]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _ModuleSnapshot:
        attributes = dict(module.__dict__)
        containers = [(held, held.copy()) for held in attributes.values() if isinstance(held, (list, dict, set))]
        inside = [part for _, held in containers for part in (held.values() if isinstance(held, dict) else held)]
        tensors = [_TensorSnapshot.of(held) for held in (*attributes.values(), *inside) if _is_written(held)]
        return cls(module, attributes, containers, tensors)

    def restore(self) -> None:
        for held, before in self.containers:
            if isinstance(held, list):
                held[:] = before
            elif isinstance(held, set):
                held &= before
                held |= before
            elif list(held) != list(before) or any(held[key] is not value for key, value in before.items()):
                held.clear()
                held.update(before)
        own = self.module.__dict__
        for key in [key for key in own if key not in self.attributes]:
            del own[key]
        own.update(self.attributes)
        for tensor in self.tensors:
            tensor.restore()


def _is_written(held: object) -> bool:
    """Tell whether a forward may write into a thing, and it has values to be written."""
    if not isinstance(held, torch.Tensor) or isinstance(held, torch.nn.Parameter):
        return False
    return not is_lazy(held) and not held.is_meta
