"""What tapping does to what is tapped: a compiler fuses otherwise, and so may round otherwise.

    observer = Observer()
    value, taps = observer.run(tapped, untapped, args, kwargs, model=model)     # the first call: untapped as well
    str(observer.effect)            # "the taps change the output: max abs 3.1e-03, 34.2 dB"

The untapped forward is given copies, and leaves nothing behind: the model, its inputs and all random state are as if it
had not been. It runs in the caller's own gradient mode, for a compiler makes other code for another one; what it
computed for a backward pass is dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from layerscope.errors import Unsupported
from layerscope.runtimes.snapshot import copied, restored, why_not_again
from layerscope.runtimes.values import leaves, replaced

T = TypeVar("T")
_AT_ONCE = 1 << 20  # elements that are compared in float64 at a time: logits can be gigabytes


@dataclass(frozen=True, slots=True)
class ObserverEffect:
    """How the output of the tapped graph differs from that of the untapped one on the same inputs.

    `sqnr_db` is of the untapped output over the difference; infinite when they are the same. `reason` says why it was
    not measured, where it was not.
    """

    max_abs: float | None = None
    sqnr_db: float | None = None
    reason: str = ""
    by: str = "the taps"

    @classmethod
    def between(cls, untapped: object, tapped: object, *, by: str = "the taps") -> ObserverEffect:
        """Compare two outputs, all their floating tensors together, in float64; `by` is what changed them."""
        ours, theirs = dict(leaves(tapped)), dict(leaves(untapped))
        if {at: tensor.shape for at, tensor in ours.items()} != {at: tensor.shape for at, tensor in theirs.items()}:
            return cls(reason="not measured: tapped and untapped, the model returns tensors of other shapes")
        pairs = [(a, ours[at]) for at, a in theirs.items() if a.is_floating_point() and a.numel()]
        if not pairs:
            return cls(reason="not measured: the model returns no floating tensor")
        signal = noise = worst = 0.0
        for a, b in pairs:
            a, b = a.detach().reshape(-1), b.detach().reshape(-1)
            for at in range(0, a.numel(), _AT_ONCE):
                sums = _sums(a[at : at + _AT_ONCE], b[at : at + _AT_ONCE])
                signal, noise, worst = signal + sums[0], noise + sums[1], max(worst, sums[2])
        if noise == 0:
            return cls(worst, math.inf, by=by)
        decibels = 10 * math.log10(signal / noise) if signal and math.isfinite(noise) else -math.inf
        return cls(worst, decibels, by=by)

    @property
    def identical(self) -> bool:
        """Whether it was measured, and the taps change nothing."""
        return self.max_abs == 0

    def __str__(self) -> str:
        if self.max_abs is None:
            return self.reason
        if self.identical:
            return f"{self.by} change nothing in the output"
        return f"{self.by} change the output: max abs {self.max_abs:.2e}, {self.sqnr_db:.1f} dB"


SKIPPED = ObserverEffect(reason="not measured: observer='skip'")
NO_TAPS = ObserverEffect(reason="not measured: there are no taps")
NOT_CALLED = ObserverEffect(reason="not measured: the model was not called")


class Observer:
    """Has the first call run untapped as well, and knows what the taps changed; given an effect, it measures nothing.

    A call that fails is not the first one: the next is.
    """

    def __init__(self, effect: ObserverEffect | None = None, *, by: str = "the taps") -> None:
        self.effect = effect
        self._by = by
        self._lock = threading.Lock()

    def run(
        self,
        tapped: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, T]],
        untapped: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        model: torch.nn.Module,
    ) -> tuple[Any, T]:
        """Return what `tapped` gives: the model's value, and what the taps took."""
        if self.effect is not None:
            return tapped(args, kwargs)
        with self._lock:
            plain = self.effect or _left_no_trace(untapped, args, kwargs, model)  # another thread may have been first
            value, taken = tapped(args, kwargs)
            self.effect = self._between(plain, value)
            return value, taken

    def _between(self, untapped: object, tapped: object) -> ObserverEffect:
        if isinstance(untapped, ObserverEffect):
            return untapped
        try:
            return ObserverEffect.between(untapped, tapped, by=self._by)
        except Exception as error:
            return ObserverEffect(reason=f"not measured: the outputs cannot be compared ({_said(error)})")


def measures(observer: str) -> bool:
    """Read the option `observer`: whether the first call is to run untapped as well."""
    if observer not in ("measure", "skip"):
        raise Unsupported(f"observer={observer!r} is not known; give 'measure' or 'skip'.")
    return observer == "measure"


def _left_no_trace(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], model: torch.nn.Module
) -> Any:
    """Return what the untapped model gives, its tensors copied; where it cannot be run, why nothing is measured."""
    if why := why_not_again(model):
        return ObserverEffect(reason=f"not measured: {why}")
    try:
        given, named = copied(args, kwargs, model)
        with restored(model):
            return replaced(call(*given, **named), lambda _, tensor: tensor.detach().clone())
    except Exception as error:
        return ObserverEffect(reason=f"not measured: the untapped model failed ({_said(error)})")


def _said(error: BaseException) -> str:
    """Return the first line of what was wrong."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _sums(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    """Return the sum of squares of a piece, of its difference from another, and the largest of that."""
    a, b = a.double(), b.double()
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))
    signal = a[a.isfinite()].square().sum()
    return float(signal), float(off.square().sum()), float(off.max())
