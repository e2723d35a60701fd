"""How far long work is: what every function's `progress=` is called with.

compare(reference, candidate, progress=lambda what, done, total: print(f"{what}: {done} of {total}"))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]  # what is worked on, how much is done, of how much (0: not known)


def no_progress(what: str, done: int, total: int) -> None:
    """Report to no one."""
