"""Measure, on twins of a model, what rounding does at each point; keep what its weights are checked by.

    floors = measure_floors(model, inputs, run)

A twin is the model with other parameters, or in another arithmetic, for one forward: the model itself is left alone.
"""

from __future__ import annotations

from layerscope.twins.begun import Begun, beginning
from layerscope.twins.measuring import measure, measure_floors
from layerscope.twins.programs import measure_program

__all__ = ["Begun", "beginning", "measure", "measure_floors", "measure_program"]
