"""Which operation of a module's own code makes the difference: both codes are logged, and the logs compared.

calls = traced(lambda: module(x), inside=own_code_is_running)
differences(reference, candidate, floor)[0].because      # "it multiplies by 0.3 where the reference ... by 0.25"
"""

from __future__ import annotations

from layerscope.diagnose.operations.differences import differences
from layerscope.diagnose.operations.operation import Operation
from layerscope.diagnose.operations.trace import Called, traced

__all__ = ["Called", "Operation", "differences", "traced"]
