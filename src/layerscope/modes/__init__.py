"""Modes: named variants of one model, made, recorded and ranked.

    for mode in modes_of(model):
        print(mode.name, mode.about)
    variant(model, "int8-weight")

To import this package loads torch; torchao is imported when a mode that needs it is made.
"""

from __future__ import annotations

from layerscope.modes.mixing import mixed
from layerscope.modes.mode_runs import Recorded, record_modes
from layerscope.modes.registry import GROUPS, Mode, Setting, choose, mode, modes_of, variant, why_not

__all__ = [
    "GROUPS",
    "Mode",
    "Recorded",
    "Setting",
    "choose",
    "mixed",
    "mode",
    "modes_of",
    "record_modes",
    "variant",
    "why_not",
]
