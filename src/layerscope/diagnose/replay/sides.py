"""The two models, each with its inputs in its own dtype and on its own device, and the reference in the other's dtypes.

side = Side.of(model, inputs)
side.run()
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.diagnose.judge.measuring import rounding
from layerscope.errors import BadModel
from layerscope.models.inputs import Inputs
from layerscope.runtimes.eager import Modules, modules_of
from layerscope.runtimes.values import leaves, replaced


@dataclass(frozen=True, slots=True)
class Side:
    """One model and how to run it: as it was given, with its own inputs, with or without a backward pass."""

    model: nn.Module
    inputs: Inputs
    modules: Modules
    backward: bool

    @classmethod
    def of(cls, model: nn.Module, inputs: object, *, backward: bool = False) -> Side:
        """Take a model with a dict of keyword arguments, a tuple of positional ones, or one tensor."""
        return cls(model, Inputs.of(inputs), modules_of(model), backward)

    def run(self, *, dtype: torch.dtype | None = None, lowered: torch.dtype | None = None) -> Any:
        """Run a forward on a fresh copy of the inputs, floating ones in the model's dtype or the one that is given.

        With `lowered` it runs under autocast to that dtype.
        """
        wanted, device = dtype or main_dtype(self.model), _device(self.model)

        def own(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().to(device=device, copy=True)
            return made.to(wanted) if made.is_floating_point() and wanted is not None else made

        args = tuple(_fresh(value, own) for value in self.inputs.args)
        kwargs = {name: _fresh(value, own) for name, value in self.inputs.kwargs.items()}
        with torch.enable_grad() if self.backward else torch.no_grad():
            with nullcontext() if lowered is None else torch.autocast((device or torch.device("cpu")).type, lowered):
                output = self.model(*args, **kwargs)
            if self.backward:
                for parameter in self.model.parameters():
                    parameter.grad = None
                loss_of(output).backward()  # type: ignore[no-untyped-call]
        return output


def _fresh(value: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of an argument with tensors of one's own; a key-value cache is copied with what it holds."""
    made = replaced(value, lambda _, tensor: own(tensor))
    if made is not value or isinstance(value, _PLAIN) or not hasattr(value, "__dict__"):
        return made
    made = copy.deepcopy(value)
    _refill(made, own, set())
    return made


_PLAIN = (nn.Module, type, ModuleType, FunctionType)


def _refill(value: Any, own: Callable[[torch.Tensor], torch.Tensor], seen: set[int]) -> None:
    """Put tensors of one's own in the place of those that an object holds, however deep."""
    if id(value) in seen or isinstance(value, _PLAIN):
        return
    seen.add(id(value))
    held = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", {})
    for key, inner in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(inner, torch.Tensor):
            held[key] = own(inner)
        else:
            _refill(inner, own, seen)


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss, or a fixed random projection of its first floating-point output.

    A mean square would not do: behind a layer norm it hardly depends on anything. Both are scaled so that gradients
    stay far from where float16 ends.
    """
    found = {path: t for path, t in leaves(output) if t.requires_grad and t.is_floating_point()}
    if not found:
        raise BadModel("backward=True, and nothing the model returns depends on anything that has a gradient.")
    loss = found.get(("loss",))
    if loss is not None:
        return loss.sum() * LOSS_SCALE
    first = next(iter(found.values()))
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(first.device)
    return (first.float() * weights).sum()


LOSS_SCALE = 1024.0


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the floating dtype that most of a model's parameters have, or of its buffers where it has none."""
    for tensors in (model.parameters(), model.buffers()):
        counts: Counter[torch.dtype] = Counter()
        for tensor in tensors:
            if tensor.is_floating_point():
                counts[tensor.dtype] += tensor.numel()
        if counts:
            return counts.most_common(1)[0][0]
    return None


def _device(model: nn.Module) -> torch.device | None:
    first = next(iter((*model.parameters(), *model.buffers())), None)
    return None if first is None else first.device


class Casting(NamedTuple):
    """A tensor of the reference that has another dtype in the candidate."""

    module: nn.Module
    key: str
    tensor: torch.Tensor
    dtype: torch.dtype


def castings(
    reference: Modules, candidate: Modules, *, names: Mapping[str, str], default: torch.dtype | None
) -> list[Casting]:
    """Return the parameters and buffers of the reference that have another dtype in the candidate.

    `names` are those of its modules there; what has no counterpart gets the default.
    """
    found: list[Casting] = []
    for name, module in reference.by_name.items():
        partner = candidate.by_name.get(names.get(name, name))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point():
                other = getattr(partner, key, None)
                dtype = other.dtype if isinstance(other, torch.Tensor) and other.is_floating_point() else default
                if dtype is not None and dtype != tensor.dtype:
                    found.append(Casting(module, key, tensor, dtype))
    return found


def casting_of(model: Modules, dtype: torch.dtype) -> list[Casting]:
    """Return every floating parameter and buffer of a model, to be cast to one dtype."""
    return castings(model, Modules({}, {}), names={}, default=dtype)


@contextmanager
def cast_weights(
    which: Sequence[Casting], *, nudge: Callable[[torch.Tensor, float], torch.Tensor] | None = None
) -> Iterator[None]:
    """Let modules hold their tensors in other dtypes for a while; their own are not touched, and come back at the end.

    `nudge` moves those that become more exact than they were, by as much as they had been rounded.
    """
    made: dict[int, torch.Tensor] = {}
    for _, _, tensor, dtype in which:
        if id(tensor) not in made:
            made[id(tensor)] = _cast(tensor, dtype, nudge)
    with lent_weights([Lent(module, key, made[id(tensor)]) for module, key, tensor, _ in which]):
        yield


class Lent(NamedTuple):
    """A tensor for a module to hold in the place of its own."""

    module: nn.Module
    key: str
    tensor: torch.Tensor


@contextmanager
def lent_weights(which: Sequence[Lent]) -> Iterator[None]:
    """Let modules hold other tensors for a while; their own come back at the end."""
    made: dict[int, torch.Tensor] = {}
    with ExitStack() as stack:
        for module, key, tensor in which:
            own = getattr(module, key)
            if id(tensor) not in made:  # what is tied stays tied
                made[id(tensor)] = (
                    nn.Parameter(tensor, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else tensor
                )
            stack.callback(setattr, module, key, own)
            setattr(module, key, made[id(tensor)])
        yield


# What autocast runs in the lower precision.
LOWERED = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase)


def _cast(
    tensor: torch.Tensor, dtype: torch.dtype, nudge: Callable[[torch.Tensor, float], torch.Tensor] | None
) -> torch.Tensor:
    cast = tensor.detach().to(dtype)
    if nudge is not None and rounding(dtype) < rounding(tensor.dtype):
        cast = nudge(cast, torch.finfo(tensor.dtype).eps)
    return cast
