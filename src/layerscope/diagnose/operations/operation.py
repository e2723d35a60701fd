"""One operation of a module's own code that makes a difference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, what people call it there (mask, rope, residual, ...), and a clause that follows the module's name.

    `error` is its result's relative L2 error, `floor` what rounding explains of it; None where it has no counterpart.
    `index` is its place among the operations of the candidate's own code, or of the reference's where only that has it.
    """

    name: str
    what: str
    because: str
    error: float | None
    floor: float | None
    index: int

    def __str__(self) -> str:
        return self.because
