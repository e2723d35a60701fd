"""INT8 modes of the built-in Mamba: `0 2-0 2-1 2-2 2-3 2-4 3`, and the upper bound `1`.

    calibration = calibrate(model, batches, percentile_alpha=0.9999)
    variant = quantised(model, "0", calibration)

To import this package loads torch.
"""

from __future__ import annotations

from layerscope.modes.quamba.calibration import Calibration, Scales, calibrate, stored_calibration
from layerscope.modes.quamba.int8 import Codes, quantise
from layerscope.modes.quamba.variants import QUAMBA_MODES, quantised, why_not

__all__ = [
    "QUAMBA_MODES",
    "Calibration",
    "Codes",
    "Scales",
    "calibrate",
    "quantise",
    "quantised",
    "stored_calibration",
    "why_not",
]
