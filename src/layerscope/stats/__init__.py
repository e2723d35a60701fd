"""Numbers about tensors that add up: counts, moments, extremes, a quantile sketch, fingerprints.

    both = summarize(one) + summarize(other)
    both.mean, both.percentile(95), both.has_nan

Importing this imports neither torch nor numba.
"""

from __future__ import annotations

from layerscope.stats.engine import backend
from layerscope.stats.measure import Later, fingerprint, prepare, summarize
from layerscope.stats.sketch import Histogram, Sketch
from layerscope.stats.summary import PERCENTILES, Summary

__all__ = [
    "PERCENTILES",
    "Histogram",
    "Later",
    "Sketch",
    "Summary",
    "backend",
    "fingerprint",
    "prepare",
    "summarize",
]
