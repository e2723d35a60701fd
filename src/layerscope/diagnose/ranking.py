"""Which layers do the most damage to the output, so that they are the ones to keep in high precision.

ranked(rows, passes)        # (("model.layers.7", 0.031), ...)
"""

from __future__ import annotations

from collections.abc import Sequence

from layerscope.diagnose.blaming import blocks_of
from layerscope.diagnose.guiding import Guidance
from layerscope.diagnose.passes import Passes
from layerscope.diagnose.rows import Row

__all__ = ["ranked"]

MOST = 128


def ranked(rows: Sequence[Row], passes: Passes) -> tuple[tuple[str, float], ...]:
    """Return each block with the final error that it makes alone in the reference, worst first."""
    off = [row.judged.name for row in rows if row.judged.kind == "quantised" or row.judged.guilty]
    names = list(dict.fromkeys(next(blocks_of(name), name) for name in off))
    names = [name for name in names if name in passes.pairing.reference][:MOST]
    outputs = passes.candidate(Guidance(whole=frozenset(names), only=())).outputs
    damage: dict[str, float] = {}
    for name in names:
        made = passes.final(passes.ours, {key: each for key, each in outputs.items() if key[0] == name})
        if made is not None:
            damage[name] = made
    return tuple(sorted(damage.items(), key=lambda item: -item[1]))
