"""What two values, or a module's input and output, say by themselves: six numbers of a pair, a check by few rows.

    numbers = numbers_of(reference, candidate)     # how far apart
    check = check_of(module, x, y)                 # check.py: what is kept of a module's weights
    check.residual(x, y)                           # how far its output is from what it must be, given its input

Importing this imports no torch; `check.py` and `forms.py` do.
"""

from __future__ import annotations

from layerscope.checks.error_numbers import NAMES, ErrorNumbers, largest_of, numbers_of
from layerscope.checks.tokens import mask_of, rows_kept

__all__ = ["NAMES", "ErrorNumbers", "largest_of", "mask_of", "numbers_of", "rows_kept"]
