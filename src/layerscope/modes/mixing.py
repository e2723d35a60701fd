"""A model of which some layers are in a mode and the rest as they were: changing places for a run, or for good.

    mixture = Mixture(model, "int8-dynamic")
    with mixture.keeping(["model.layers.0"]) as host:
        host(input_ids)                         # int8-dynamic, the first layer in the model's own precision

    mixed(model, "int8-dynamic", keep=["model.layers.0"])       # the same, as a model of its own

Everything that is in no layer (embedding, last norm, head) is one part, `OUTSIDE`, and is kept under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layerscope.errors import NoSuchPoint, Unsupported
from layerscope.modes.feeding import dtype_of
from layerscope.modes.layer_taps import stack_of
from layerscope.modes.registry import Mode, Setting, choose, copied, variant
from layerscope.runtimes.values import replaced

OUTSIDE = "(outside the layers)"  # embedding, last norm, head: everything that is in no layer


class Mixture:
    """A model and its variant, with the same layers.

    `parts` are the names of the layers by depth, and `OUTSIDE`. Raises Unsupported where the variant lacks a layer.
    """

    def __init__(self, model: nn.Module, mode: Mode | str, setting: Setting | None = None) -> None:
        self.mode = choose([mode], model).modes[0] if isinstance(mode, str) else mode
        self.model = model
        self.layers = tuple(stack_of(model))
        self.parts = (*self.layers, OUTSIDE)
        self.other = variant(model, self.mode, setting)
        there = dict(self.other.named_modules())
        missing = [name for name in self.layers if name not in there]
        if missing:
            raise Unsupported(
                f"mode {self.mode.name!r} has no layer {missing[0]}: only layers that both have change places."
            )
        self._dtypes = {id(one): dtype_of(one) for one in (model, self.other)}  # before a layer of another one moves in
        self._own, self._narrow = self._sizes(model), self._sizes(self.other)

    @contextmanager
    def keeping(self, parts: Collection[str]) -> Iterator[nn.Module]:
        """Give the variant with these parts as they are in the model, until the block ends."""
        host, source = (self.model, self.other) if OUTSIDE in parts else (self.other, self.model)
        guests = [name for name in self.layers if (name in parts) != (OUTSIDE in parts)]
        with _swapped(host, source, guests, around=self._dtypes[id(host)]):
            yield host

    def dtype(self, parts: Collection[str]) -> torch.dtype | None:
        """Return the dtype that the variant with these parts kept is given its inputs in."""
        return self._dtypes[id(self.model if OUTSIDE in parts else self.other)]

    def bits(self, parts: Collection[str] = ()) -> int:
        """Return how many bits the weights take with these parts kept."""
        return sum((self._own if part in parts else self._narrow)[part] for part in self.parts)

    def _sizes(self, model: nn.Module) -> dict[str, int]:
        sizes = {name: stored_bits(model.get_submodule(name)) for name in self.layers}
        return {**sizes, OUTSIDE: stored_bits(model) - sum(sizes.values())}


def mixed(model: nn.Module, mode: Mode | str, *, keep: Sequence[str], setting: Setting | None = None) -> nn.Module:
    """Make the variant of a model whose layers `keep` (and, by its name, `OUTSIDE`) stay as they are in the model.

    The given model stays as it is, and shares nothing with the variant.
    """
    mixture = Mixture(copied(model), mode, setting)
    unknown = [name for name in keep if name not in mixture.parts]
    if unknown:
        raise NoSuchPoint(
            f"there is no layer {unknown[0]!r} to keep; the layers of {type(model).__name__} are "
            f"{mixture.layers[0]} to {mixture.layers[-1]}, and {OUTSIDE!r} is what is in none of them."
        )
    with mixture.keeping(keep) as host:
        return copied(host)


# What is stored ---------------------------------------------------------------------------------


def stored_bits(model: nn.Module) -> int:
    """Return how many bits the parameters and buffers of a model take: codes in the type they stand for, and scales.

    Tensors that two names share count once. Codes of INT4 that lie in bytes count four bits each.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(map(_bits, tensors.values()))


def _bits(tensor: torch.Tensor) -> int:
    inside = getattr(tensor, "__tensor_flatten__", None)
    if inside is None:
        return tensor.numel() * tensor.itemsize * 8
    names, said = inside()
    # torch has no size for types narrower than a byte but the number in their names: torch.int4.
    narrow = str(said.get("target_dtype", "")) if isinstance(said, Mapping) else ""
    width = int(narrow.removeprefix("torch.int")) if narrow.removeprefix("torch.int").isdigit() else None
    parts = {name: getattr(tensor, name) for name in names}
    return sum(
        part.numel() * width if width is not None and name in ("qdata", "zero_point") else _bits(part)
        for name, part in parts.items()
        if isinstance(part, torch.Tensor)
    )


# Changing places --------------------------------------------------------------------------------


@contextmanager
def _swapped(host: nn.Module, source: nn.Module, names: Sequence[str], *, around: torch.dtype | None) -> Iterator[None]:
    """Put layers of `source` in the place of the host's, which computes in the dtype `around`, until the block ends."""
    guests = dict(source.named_modules())
    with ExitStack() as stack:
        for name in names:
            above, _, last = name.rpartition(".")
            parent = host.get_submodule(above)
            stack.callback(parent._modules.__setitem__, last, parent._modules[last])
            parent._modules[last] = _guest(guests[name], around)
        yield


def _guest(layer: nn.Module, around: torch.dtype | None) -> nn.Module:
    own = dtype_of(layer)
    return layer if own is None or around is None or own == around else _Translated(layer, own, around)


class _Translated(nn.Module):
    """A layer of another dtype than the model around it: floating-point values are cast on the way in and out."""

    def __init__(self, layer: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
        super().__init__()
        self._orig_mod = layer  # the name of a wrapper, which points leave out: what is inside is called as before
        self._inside, self._outside = inside, outside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given: tuple[Sequence[Any], Mapping[str, Any]] = replaced((args, kwargs), _casting(self._inside))
        return replaced(self._orig_mod(*given[0], **given[1]), _casting(self._outside))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)  # models ask their layers for their kind


def _casting(dtype: torch.dtype) -> Callable[[object, torch.Tensor], torch.Tensor]:
    return lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
