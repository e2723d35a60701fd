"""Two live models that should agree: the module where the difference is made, the proof, and the cause.

    finding = diagnose(reference, candidate, inputs)

`diagnosing.py` tells the story; the README says how a module is judged.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from layerscope.diagnose.causes import Cause
from layerscope.diagnose.diagnosing import diagnose
from layerscope.diagnose.finding import Blame, Final, Finding, Judged

__all__ = ["Blame", "Cause", "Final", "Finding", "Judged", "diagnose"]


class _DiagnosePackage(ModuleType):
    """The package, which is called like its function, as `layerscope.compare` is and for the same reason."""

    def __call__(self, *models: Any, **options: Any) -> Finding:
        return diagnose(*models, **options)


sys.modules[__name__].__class__ = _DiagnosePackage
