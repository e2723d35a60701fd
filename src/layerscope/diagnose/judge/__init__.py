"""How far off a value is, whether that is a fault, which modules are suspects, and the proof."""

from __future__ import annotations

__all__ = [
    "evidence",
    "judging",
    "measuring",
    "packed",
    "peers",
    "proof",
    "rows",
    "second_look",
    "suspects",
]
