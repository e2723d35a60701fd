"""Which layers to keep in high precision: what each does to the final error, put in alone and kept out alone.

    found = sensitivity(model, "int8-dynamic", batches)
    found.ranking[0].name               # the layer to keep in float first
    print(found)

Layers change places between the float model and its variant, one at a time, and the model's output is measured against
the float model's: relative L2 error, over all batches. Two questions, because errors do not add up: a layer that does
much harm alone may be drowned by others, and one that does little may be what others feed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from layerscope.errors import Unsupported
from layerscope.models import Inputs
from layerscope.modes.feeding import fitted
from layerscope.modes.mixing import OUTSIDE, Mixture
from layerscope.modes.mode_runs import plain_forward
from layerscope.modes.registry import Mode, Setting
from layerscope.progress import Progress
from layerscope.runtimes.values import leaves

# How far a model is from the one that the measure was made of; it takes its inputs in the dtype that comes with it.
Measure: TypeAlias = Callable[[nn.Module, "torch.dtype | None"], float]


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
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure what each decoder layer of `model` does to the final error of `mode`; the model is as before afterwards.

    `keep` is how many of the first are also tried together. Raises Unsupported where the variant has other layers than
    the model, or gives the same output.
    """
    mixture = Mixture(model, mode, setting)
    total, done = 2 * len(mixture.parts) + 2, 0

    def error(kept: Collection[str], what: str) -> float:
        nonlocal done
        if progress is not None:
            progress(f"{mixture.mode.name}: {what}", done, total)
        done += 1
        with mixture.keeping(kept) as host:
            return measure(host, mixture.dtype(kept))

    measure = _output_error(model, batches)
    whole = error((), "all layers")
    if whole == 0:
        raise Unsupported(
            f"mode {mixture.mode.name!r} gives the very output of the model: there is no error to find a home for."
        )
    found = Sensitivity(mixture.mode.name, whole, sensitivities(mixture, whole, error), (), 0.0)
    kept = tuple(share.name for share in found.layers[:keep])
    together = 1 - error(kept, f"without {len(kept)} of them") / whole
    return replace(found, kept=kept, together=together)


def sensitivities(mixture: Mixture, whole: float, error: Callable[[Collection[str], str], float]) -> tuple[Share, ...]:
    """Put each part into the model alone, and keep it out of the variant alone; `error` measures what is kept."""
    shares = []
    for name in mixture.parts:
        alone = error([other for other in mixture.parts if other != name], f"{name} alone")
        without = error([name], f"without {name}")
        shares.append(Share(name, alone, without, 1 - without / whole))
    return tuple(shares)


# Running ----------------------------------------------------------------------------------------


def _output_error(model: nn.Module, batches: Sequence[Inputs]) -> Measure:
    """Run the model, and return what measures the output of another against its own."""
    wanted = _outputs(model, [fitted(batch, model) for batch in batches])

    def measure(host: nn.Module, dtype: torch.dtype | None) -> float:
        return relative_l2(_outputs(host, [fitted(batch, host, dtype=dtype) for batch in batches]), wanted)

    return measure


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


def relative_l2(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the relative L2 error over all tensors."""
    pairs = list(zip(got, wanted, strict=True))
    off = sum(float((g.double() - w.double()).square().sum()) for g, w in pairs)
    size = sum(float(w.double().square().sum()) for _, w in pairs)
    return float((off / size) ** 0.5) if size else float(off > 0)
