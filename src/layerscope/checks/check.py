"""Freivalds' check of one module: a few rows of its weights tell what its output must be, given its input.

    check = check_of(module, x, y)          # None where nothing can be checked
    check.residual(x, y)                    # about the rounding of y's dtype, unless something is wrong

Of a Linear `S.W` and `S.b` are kept, S being eight rows of seeded signs over the outputs. What is inherited from before
is in `x`, so the residual is the module's own error, at any depth.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerscope.checks.forms import ACTIVATIONS, computed, fitting

ROWS = 8
_WHOLE = 1 << 16  # parameters of so few values are kept whole, where they are the module's own
_WITHIN = 2e-2  # a form is the module's when it gives the output this nearly; the nearest is taken
_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0)
_EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")
_PART = 1 << 22


@dataclass(frozen=True, slots=True)
class Check:
    """What is kept of one module: its kind, how long its sums are, small settings, and tensors in float32."""

    kind: str  # linear, conv, embedding, or the name of a form
    terms: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_activation(self) -> bool:
        """Whether the module is a function without parameters."""
        return self.kind in ACTIVATIONS

    def residual(self, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor | None = None) -> float:
        """Return how far `y` is from what the module gives for `x`, relatively; NaN when the two do not fit."""
        try:
            return self._residual(x.detach(), y.detach(), kept)
        except (RuntimeError, IndexError, ValueError):
            return math.nan

    def _residual(self, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor | None) -> float:
        if self.kind == "conv":
            due, is_ = self._convolved(x), _signed(y.movedim(self._channel(y), -1), self._signs(y))
            return _relative(is_ - due, y, math.sqrt(ROWS))
        if self.kind in ("linear", "embedding"):
            one = x.reshape(-1, x.shape[-1]) if self.kind == "linear" else x.reshape(-1)
            two = y.reshape(-1, y.shape[-1])
            if kept is not None and len(kept) == len(two):
                one, two = one[kept.to(one.device)], two[kept.to(two.device)]
            return _relative(_signed(two, self._signs(y)) - self._due(one), two, math.sqrt(ROWS))
        if x.shape != y.shape:
            return math.nan
        made = computed(self.kind, x, self.tensors, float(self.settings.get("eps", 0.0)))
        one, two = made, y.double()
        if kept is not None and len(kept) == two.numel() // max(1, two.shape[-1]):
            keep = kept.to(two.device)
            one, two = one.reshape(-1, one.shape[-1])[keep], two.reshape(-1, two.shape[-1])[keep]
        return _relative(two - one, two, 1.0)

    def _due(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.tensors["rows"].to(x.device)
        if self.kind == "embedding":
            return rows[x.long()].double()
        due = torch.cat([part.double() @ rows.double().T for part in torch.split(x, max(1, _PART // x.shape[-1]))])
        return due + self.tensors["bias"].to(x.device).double() if "bias" in self.tensors else due

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        s = self.settings
        run = (functional.conv1d, functional.conv2d, functional.conv3d)[int(s["axes"]) - 1]
        rows, bias = self.tensors["rows"].to(x.device).double(), self.tensors.get("bias")
        bias = None if bias is None else bias.to(x.device).double()
        padding = s["padding"] if isinstance(s["padding"], str) else tuple(s["padding"])
        made: torch.Tensor = run(x.double(), rows, bias, tuple(s["stride"]), padding, tuple(s["dilation"]))
        return made.movedim(self._channel(made), -1)

    def _channel(self, y: torch.Tensor) -> int:
        return y.ndim - 1 - int(self.settings["axes"])

    def _signs(self, y: torch.Tensor) -> torch.Tensor:
        return signs(int(self.settings["seed"]), int(self.settings["out"])).to(y.device)


def signs(seed: int, out: int) -> torch.Tensor:
    """Return eight rows of seeded signs."""
    drawn = torch.randint(0, 2, (ROWS, out), generator=torch.Generator().manual_seed(seed))
    return drawn.double() * 2 - 1


def check_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor, *, name: str = "") -> Check | None:
    """Return what is to be kept of a module, told by its class and by what it gave; None when it cannot be checked."""
    if not y.is_floating_point() or not y.numel() or x.is_complex():
        return None
    weight = getattr(module, "weight", None)
    made: Check | None = None
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and type(weight) in (nn.Parameter, torch.Tensor):
        seed = zlib.crc32(name.encode("utf-8", "surrogatepass"))
        made = _weighted(module, weight.detach(), seed, x, y)
    if made is None and not any(True for _ in module.children()) and x.is_floating_point() and x.shape == y.shape:
        made = _formed(module, x, y)
    if made is None:
        return None
    off = made.residual(x, y)
    return made if off < _WITHIN else None


def _weighted(module: nn.Module, weight: torch.Tensor, seed: int, x: torch.Tensor, y: torch.Tensor) -> Check | None:
    bias = getattr(module, "bias", None)
    bias = bias.detach() if isinstance(bias, torch.Tensor) else None
    kind = type(module).__name__
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if module.padding_mode != "zeros" or module.transposed:
            return None
        out, fan_in = weight.shape[0], weight[0].numel()
        s = signs(seed, out).to(weight.device)
        each = out // module.groups
        parts = [
            torch.einsum("so,oi...->si...", s[:, at : at + each], weight[at : at + each].double())
            for at in range(0, out, each)
        ]
        axes = weight.ndim - 2
        settings = {"out": out, "seed": seed, "axes": axes, "stride": [*module.stride], "dilation": [*module.dilation]}
        settings["padding"] = module.padding if isinstance(module.padding, str) else [*module.padding]
        return Check("conv", fan_in, settings, _kept(torch.cat(parts, 1), s, bias))
    if weight.ndim != 2:
        return None
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or x.is_floating_point():
            return None
        s = signs(seed, weight.shape[1]).to(weight.device)
        return Check("embedding", 1, {"out": weight.shape[1], "seed": seed}, _kept(_signed(weight, s), s, None))
    if not x.is_floating_point() or not x.ndim or not y.ndim:
        return None
    flipped = kind == "Conv1D"
    out, inside = weight.shape[::-1] if flipped else weight.shape
    if (x.shape[-1], y.shape[-1]) != (inside, out):
        return None
    s = signs(seed, out).to(weight.device)
    rows = _signed(weight, s).T if flipped else _signed(weight.T, s).T
    return Check("linear", inside, {"out": out, "seed": seed}, _kept(rows, s, bias))


def _formed(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Check | None:
    """Tell a norm or an activation by which of the forms gives what it gave."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    own.pop("num_batches_tracked", None)
    if sum(value.numel() for value in own.values()) > max(_WHOLE, 8 * (x.shape[-1] if x.ndim else 1)):
        return None
    said = [getattr(module, n, None) for n in _EPSILON_NAMES]
    epsilons = [float(e) for e in said if isinstance(e, float)] or [*_EPSILONS]
    tensors = {name: value.detach().float().cpu().clone() for name, value in own.items()}
    within = min(_WITHIN, 64 * torch.finfo(y.dtype).eps)
    found = fitting(x.detach(), y.detach(), tensors, epsilons, within=within)
    if found is None:
        return None
    form, eps, _ = found
    return Check(form, x.shape[-1] if tensors and x.ndim else 1, {"eps": eps}, tensors)


def _kept(rows: torch.Tensor, s: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    kept = {"rows": rows.float().cpu().contiguous()}
    if bias is not None:
        kept["bias"] = (s @ bias.double()).float().cpu()
    return kept


def _signed(values: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Return `values @ s.T` in float64, a part at a time."""
    flat = values.reshape(-1, values.shape[-1])
    parts = [part.double() @ s.T for part in torch.split(flat, max(1, _PART // max(1, flat.shape[-1])))]
    return torch.cat(parts).reshape(*values.shape[:-1], ROWS)


def _relative(off: torch.Tensor, y: torch.Tensor, by: float) -> float:
    norm = float(y.double().norm())
    return float(off.norm()) / (norm * by) if norm else (0.0 if not bool(off.any()) else math.nan)
