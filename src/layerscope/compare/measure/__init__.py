"""Every metric of a pair of tensors, in one pass over both.

metrics = measure(reference, candidate)
"""

from __future__ import annotations

from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.measure.pair import EPSILON, PERCENTILE_BOUND, measure

__all__ = ["EPSILON", "PERCENTILE_BOUND", "Metrics", "measure"]
