"""The pass over a pair made on the GPU that holds both tensors: one read, and one copy of a few numbers (Triton).

    if takes(reference, candidate):
        found = sweep(reference, candidate)         # every sum of `measure`
        near(reference, candidate, masked=-6e4)     # the few numbers of a diagnosis

Counts, extremes, the worst element and the buckets of |d| are those of the CPU to the last bit; sums are in float64,
within 1e-9.
"""

from layerscope.compare.device.nearness import Near, near
from layerscope.compare.device.pairs import Found, sweep, takes

__all__ = ["Found", "Near", "near", "sweep", "takes"]
