"""Which layers to keep in high precision: what each does to the final error, put in alone and kept out alone.

    found = sensitivity(model, "int8-dynamic", batches)
    found.ranking[0].name               # the layer to keep in float first
    print(found)

Layers change places between the float model and its variant, one at a time, and the model's output is measured against
the float model's: relative L2 error, over all batches. Two questions, because errors do not add up: a layer that does
much harm alone may be drowned by others, and one that does little may be what others feed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from layerscope.errors import Unsupported
from layerscope.models import Inputs
from layerscope.modes.feeding import dtype_of, fitted
from layerscope.modes.layers import stack_of
from layerscope.modes.recording import Tell, plain_forward
from layerscope.modes.registry import Mode, Setting, choose, variant
from layerscope.runtimes.values import leaves, replaced

__all__ = ["OUTSIDE", "Sensitivity", "Share", "sensitivity"]

OUTSIDE = "(outside the layers)"  # embedding, last norm, head: everything that is in no layer


@dataclass(frozen=True, slots=True)
class Share:
    """What one layer does to the final error.

    `alone` is the error of the float model with this layer alone in the mode, `without` that of the variant with this
    layer alone in float; `returned` is the share of the variant's error that is gone then.
    """

    name: str
    alone: float
    without: float
    returned: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The final error of a mode, and what each layer has to do with it, by depth; what is in no layer comes last.

    `kept` are the first layers of the ranking; `together` is the share of the error that is gone without all of them.
    """

    mode: str
    error: float
    shares: tuple[Share, ...]
    kept: tuple[str, ...]
    together: float

    @property
    def ranking(self) -> tuple[Share, ...]:
        """The shares, by what returns when the layer is kept in float, the most first."""
        return tuple(sorted(self.shares, key=lambda share: (-share.returned, -share.alone)))

    @property
    def layers(self) -> tuple[Share, ...]:
        """The ranking of the layers alone."""
        return tuple(share for share in self.ranking if share.name != OUTSIDE)

    @property
    def outside(self) -> Share:
        """What everything that is in no layer does."""
        return self.shares[-1]


def sensitivity(
    model: nn.Module,
    mode: Mode | str,
    batches: Sequence[Inputs],
    *,
    setting: Setting | None = None,
    keep: int = 3,
    tell: Tell | None = None,
) -> Sensitivity:
    """Measure what each decoder layer of `model` does to the final error of `mode`; the model is as before afterwards.

    `keep` is how many of the first are also tried together. Raises Unsupported where the variant has other layers than
    the model, or gives the same output.
    """
    one = choose([mode], model).modes[0] if isinstance(mode, str) else mode
    stack = stack_of(model)
    other = variant(model, one, setting)
    missing = [name for name in stack if name not in dict(other.named_modules())]
    if missing:
        raise Unsupported(f"mode {one.name!r} has no layer {missing[0]}: only layers that both have change places.")
    dtypes = {id(model): dtype_of(model), id(other): dtype_of(other)}  # before a layer of another one moves in
    total, done = 2 * (len(stack) + 1) + 3, 0

    def outputs(host: nn.Module, guests: Sequence[str], source: nn.Module, what: str) -> list[torch.Tensor]:
        nonlocal done
        if tell is not None:
            tell(f"{one.name}: {what}", done, total)
        done += 1
        around = dtypes[id(host)]
        with _swapped(host, source, guests, around=around):
            return _outputs(host, [fitted(batch, host, dtype=around) for batch in batches])

    def error(host: nn.Module, guests: Sequence[str], source: nn.Module, what: str) -> float:
        return _error(outputs(host, guests, source, what), wanted)

    wanted = outputs(model, [], other, "in float")
    whole = error(other, [], model, "all layers")
    if whole == 0:
        raise Unsupported(
            f"mode {one.name!r} gives the very output of the model: there is no error to find a home for."
        )
    shares = [
        _share(
            name, error(model, [name], other, f"{name} alone"), error(other, [name], model, f"without {name}"), whole
        )
        for name in stack
    ]
    shares.append(
        _share(
            OUTSIDE,
            error(other, stack, model, f"{OUTSIDE} alone"),
            error(model, stack, other, f"without {OUTSIDE}"),
            whole,
        )
    )
    found = Sensitivity(one.name, whole, tuple(shares), (), 0.0)
    kept = tuple(share.name for share in found.layers[:keep])
    together = 1 - error(other, kept, model, f"without {len(kept)} of them") / whole
    return replace(found, kept=kept, together=together)


def _share(name: str, alone: float, without: float, whole: float) -> Share:
    return Share(name, alone, without, 1 - without / whole)


# Running ----------------------------------------------------------------------------------------


def _outputs(model: nn.Module, batches: Sequence[Inputs]) -> list[torch.Tensor]:
    """Run every batch from the same random state; return the floating-point tensors that come out."""
    found: list[torch.Tensor] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for batch in batches:
            output = plain_forward(model, batch)
            found += [tensor for _, tensor in leaves(output) if tensor.is_floating_point()]
    if not found:
        raise Unsupported(f"{type(model).__name__} returns no floating-point tensor to measure an error of.")
    return found


def _error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the relative L2 error over all tensors."""
    pairs = list(zip(got, wanted, strict=True))
    off = sum(float((g.double() - w.double()).square().sum()) for g, w in pairs)
    size = sum(float(w.double().square().sum()) for _, w in pairs)
    return float((off / size) ** 0.5) if size else float(off > 0)


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
        self.layer = layer
        self._inside, self._outside = inside, outside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given: tuple[Sequence[Any], Mapping[str, Any]] = replaced((args, kwargs), _casting(self._inside))
        return replaced(self.layer(*given[0], **given[1]), _casting(self._outside))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models ask their layers for their kind


def _casting(dtype: torch.dtype) -> Callable[[object, torch.Tensor], torch.Tensor]:
    return lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
