"""Leave a model as it was, whatever runs in between.

    with kept(model) as restore:
        model(x)
        restore()              # as it was, for another run

Buffers and tensors that hang on modules are copied, because a forward may write into them; parameters are not, because
it must not. Random states of the CPU and of the devices in use are kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["RandomState", "kept"]


@contextmanager
def kept(*models: nn.Module) -> Iterator[Callable[[], None]]:
    """Hand out a call that puts the models back for another run; the end puts back all there is, come what may."""
    saved = [_Module.of(module) for model in models for module in model.modules()]
    grads = [(p, p.grad) for model in models for p in model.parameters()]
    random = RandomState()

    def restore(*, wholly: bool = False) -> None:
        for module in saved:
            module.restore(wholly=wholly)
        for parameter, grad in grads:
            parameter.grad = grad
        random.restore()

    try:
        yield restore
    finally:
        restore(wholly=True)


class _Module(NamedTuple):
    """What one module holds: its attributes, the contents of those that are containers, and of tensors."""

    module: nn.Module
    attributes: dict[str, Any]
    containers: list[tuple[Any, Any]]
    inner: list[tuple[Any, Any]]
    contents: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        attributes = dict(module.__dict__)
        held = {key: value for key, value in attributes.items() if isinstance(value, (dict, list, set))}
        containers = [(v, v.copy()) for key, v in held.items() if key not in _TORCHS]
        inner = [(v, v.copy()) for key, v in held.items() if key in _TORCHS]
        loose = (v for v in attributes.values() if isinstance(v, torch.Tensor))
        tensors = [t for t in (*module._buffers.values(), *loose) if t is not None]
        return cls(module, attributes, containers, inner, [(t, t.detach().clone()) for t in tensors])

    def restore(self, *, wholly: bool) -> None:
        now = self.module.__dict__
        for key in [key for key in now if key not in self.attributes]:
            del now[key]
        now.update(self.attributes)
        for live, content in (*self.containers, *(self.inner if wholly else ())):
            if isinstance(live, list):
                live[:] = content
            elif isinstance(live, dict):
                if list(map(id, live.values())) != list(map(id, content.values())) or list(live) != list(content):
                    live.clear()
                    live.update(content)
            else:
                live.clear()
                live.update(content)
        with torch.no_grad():
            for tensor, content in self.contents:
                # Batch norm writes its running statistics without a trace in the tensor's version.
                if not torch.equal(tensor, content):
                    tensor.copy_(content)


# What torch keeps in every module: hooks, parameters, children. A forward that changes those is rare, and to look at
# them after every run is not for free.
_TORCHS = frozenset(nn.Module().__dict__)


class RandomState:
    """The random state of the CPU, and of CUDA where it is in use."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def moved(self) -> bool:
        """Tell whether anything was drawn since."""
        now = RandomState()
        both = zip(self.cuda, now.cuda, strict=False)
        return not torch.equal(self.cpu, now.cpu) or any(not torch.equal(a, b) for a, b in both)
