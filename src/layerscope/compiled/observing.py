"""What tapping does to what is tapped: a compiler fuses otherwise, and so may round otherwise.

effect = ObserverEffect.between(untapped, tapped)
str(effect)             # "the taps change the output: max abs 3.1e-03, 34.2 dB"
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerscope.runtimes.values import leaves

__all__ = ["ObserverEffect"]


@dataclass(frozen=True, slots=True)
class ObserverEffect:
    """How the output of the tapped graph differs from that of the untapped one on the same inputs.

    `sqnr_db` is of the untapped output over the difference; infinite when they are the same. `reason` says why it was
    not measured, where it was not.
    """

    max_abs: float | None = None
    sqnr_db: float | None = None
    reason: str = ""

    @classmethod
    def between(cls, untapped: object, tapped: object) -> ObserverEffect:
        """Compare two outputs, all their floating tensors together, in float64."""
        pairs = [
            (a.detach().double().cpu(), b.detach().double().cpu())
            for (_, a), (_, b) in zip(leaves(untapped), leaves(tapped), strict=True)
            if a.is_floating_point() and a.shape == b.shape
        ]
        pairs = [(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if a.numel()]
        if not pairs:
            return cls(reason="not measured: the model returns no floating tensor")
        signal = sum(float(a.square().sum()) for a, _ in pairs)
        noise = sum(float((a - b).square().sum()) for a, b in pairs)
        worst = max(float((a - b).abs().max()) for a, b in pairs)
        if noise == 0:
            return cls(worst, math.inf)
        return cls(worst, 10 * math.log10(signal / noise) if signal else -math.inf)

    @property
    def identical(self) -> bool:
        """Whether it was measured, and the taps change nothing."""
        return self.max_abs == 0

    def __str__(self) -> str:
        if self.max_abs is None:
            return self.reason
        if self.identical:
            return "the taps change nothing in the output"
        return f"the taps change the output: max abs {self.max_abs:.2e}, {self.sqnr_db:.1f} dB"
