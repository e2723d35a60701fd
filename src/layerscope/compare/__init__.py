"""The right wing: read runs, pair them, measure the pairs, judge them.

    compare("runs/fp32", "runs/int8", noise="runs/bf16")

The README beside this file says how a verdict is reached.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from layerscope.compare.align.pairing import PairingRule, parse_rules
from layerscope.compare.asserting import assert_runs_match
from layerscope.compare.comparing import compare
from layerscope.compare.measure import measure
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.outlier_channels import Outliers, outliers
from layerscope.compare.page.bands import PUBLISHED, Band, Bands
from layerscope.compare.result import Against, Comparison, Row, Verdict

__all__ = [
    "PUBLISHED",
    "Against",
    "Band",
    "Bands",
    "Comparison",
    "Metrics",
    "Outliers",
    "PairingRule",
    "Row",
    "Verdict",
    "assert_runs_match",
    "compare",
    "measure",
    "outliers",
    "parse_rules",
]


class _Package(ModuleType):
    """The package, which is called like its function.

    Python binds `layerscope.compare` to the package as soon as any part of it is imported, and users call
    `layerscope.compare(...)` whatever was imported before.
    """

    def __call__(self, *runs: Any, **options: Any) -> Comparison:
        return compare(*runs, **options)


sys.modules[__name__].__class__ = _Package
