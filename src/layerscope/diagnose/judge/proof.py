"""Prove a suspicion by intervention, and rank layers by the damage that each makes alone.

    confirm(suspects, passes, final)
    ranked(rows, passes)        # (("model.layers.7", 0.031), ...)

The reference's output is put in the suspect's place and the candidate runs again: what of the final error goes? And the
other way round: the suspect's output, on the reference's input, goes into the reference: what error does that make?
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from layerscope.diagnose.finding import Blame, Final
from layerscope.diagnose.judge.rows import Row
from layerscope.diagnose.judge.second_look import Look
from layerscope.diagnose.judge.suspects import Suspect, blocks_of
from layerscope.diagnose.replay.passes import Outputs, Passes
from layerscope.diagnose.replay.replay import Guidance

MOST = 8  # suspects that are worth two runs each
VISIBLE = 1.1  # times its floor: a final error below that has nothing to remove


class Confirmation(NamedTuple):
    """The share of the final error that goes, and the final error that is made; None where that could not be tried."""

    removed: float | None = None
    made: float | None = None


def confirm(suspects: Sequence[Suspect], passes: Passes, final: Final, look: Look) -> tuple[list[Confirmation], Final]:
    """Try each suspect, the first few of them, and all of them together."""
    names = [suspect.place for suspect in suspects]
    proofs: list[Confirmation] = []
    for name in names[:MOST]:
        theirs: Outputs = {key: outputs for key, outputs in look.outputs.items() if key[0] == name}
        made = passes.final(passes.ours, theirs) if theirs else None
        proofs.append(Confirmation(_removed([name], passes, final), made))
    together = proofs[0].removed if len(names) == 1 else _removed(names, passes, final)
    return proofs + [Confirmation()] * (len(names) - len(proofs)), replace(final, removed=together)


def _removed(names: Collection[str], passes: Passes, final: Final) -> float | None:
    """Return what share of the final error goes with the reference's outputs in these places."""
    before, floor = final.error, final.floor or 0.0
    if before is None or before <= VISIBLE * floor:
        return None
    after = passes.final(
        passes.theirs,
        {
            key: {leaf: held.tensor for leaf, held in call.outputs.items()}
            for key, call in passes.captured.calls.items()
            if key[0] in names
        },
    )
    if after is None:
        return None
    if math.isinf(before):
        return 0.0 if math.isinf(after) else 1.0
    return min(1.0, max(0.0, (before - after) / (before - floor)))


def demoted(blames: Sequence[Blame]) -> tuple[list[Blame], list[Blame]]:
    """Part the modules that explain something of the final error from those that explain nothing of it.

    Where none explains anything they all stay: the difference is made there, and does not reach the output.
    """
    idle = [blame for blame in blames if blame.made == 0 and not blame.removed]
    if len(idle) == len(blames):
        return list(blames), []
    return [blame for blame in blames if blame not in idle], idle


RANKED = 128  # blocks that are tried alone


def ranked(rows: Sequence[Row], passes: Passes) -> tuple[tuple[str, float], ...]:
    """Return each block with the final error that it makes alone in the reference, worst first."""
    off = [row.judged.name for row in rows if row.judged.kind == "quantised" or row.judged.guilty]
    names = list(dict.fromkeys(next(blocks_of(name), name) for name in off))
    names = [name for name in names if name in passes.pairing.reference][:RANKED]
    outputs = passes.candidate(Guidance(whole=frozenset(names), only=())).outputs
    damage: dict[str, float] = {}
    for name in names:
        made = passes.final(passes.ours, {key: each for key, each in outputs.items() if key[0] == name})
        if made is not None:
            damage[name] = made
    return tuple(sorted(damage.items(), key=lambda item: -item[1]))
