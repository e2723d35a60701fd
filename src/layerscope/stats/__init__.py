"""Numbers about tensors that add up: counts, moments, extremes, a quantile sketch, fingerprints.

    both = summarize(one) + summarize(other)
    both.mean, both.percentile(95), both.has_nan

Importing this imports neither torch nor numba.
"""

from __future__ import annotations

from layerscope.stats.channels import Channels
from layerscope.stats.engine import backend
from layerscope.stats.sketch import Histogram, Sketch, quantiles
from layerscope.stats.summary import PERCENTILES, Summary
from layerscope.stats.sweeps import fingerprint, prepare, summarize

__all__ = [
    "PERCENTILES",
    "Channels",
    "Histogram",
    "Sketch",
    "Summary",
    "backend",
    "fingerprint",
    "prepare",
    "quantiles",
    "summarize",
]
