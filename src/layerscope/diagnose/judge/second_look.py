"""A second look at the suspects: the values that decided, and what each makes of the reference's input as a whole.

look = look_again(suspects, passes, floor)
look.got[place]; look.outputs["model.layers.2.mlp", 0]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from layerscope.diagnose.judge.suspects import Suspect
from layerscope.diagnose.replay.module_hooks import Key
from layerscope.diagnose.replay.passes import Outputs, Passes
from layerscope.diagnose.replay.replay import Guidance, Guided, Place

MOST = 16  # suspects that are looked at


class Look(NamedTuple):
    """What was got at the places that decided: by the candidate, by the floor, by the candidate with another seed.

    `outputs` are those of the suspects' calls on the reference's input, with nothing inside them put right.
    """

    got: dict[Place, torch.Tensor]
    floor: dict[Place, torch.Tensor]
    again: dict[Place, torch.Tensor]
    outputs: Outputs


def look_again(suspects: Sequence[Suspect], passes: Passes, floor: Guided) -> Look:
    """Run the candidate once more, and a second time where a parent's own code is suspected.

    Its inside is put right while its values are looked at, and left alone for its output.
    """
    suspects = suspects[:MOST]
    places = frozenset(suspect.row.place for suspect in suspects if suspect.row.place is not None)
    leaves = frozenset(suspect.name for suspect in suspects if suspect.row.judged.leaf)
    parents = frozenset(suspect.place for suspect in suspects) - leaves
    guidance = Guidance(whole=leaves, keep=places, only=(), until=_calls({s.place for s in suspects}, passes))
    first = passes.candidate(guidance)
    outputs = dict(first.outputs)
    if parents:
        outputs |= passes.candidate(Guidance(whole=parents, only=(), until=_calls(parents, passes))).outputs
    again = {}
    if passes.seed is not None:
        again = passes.candidate(replace(guidance, seed=passes.seed + 1)).kept
    return Look(first.kept, floor.kept, again, outputs)


def _calls(names: Collection[str], passes: Passes) -> frozenset[Key]:
    """Return every call of these modules: after the last of them there is nothing left to see.

    With a backward pass there is, so that the run must go to its end.
    """
    if passes.theirs.backward:
        return frozenset()
    return frozenset(key for key in passes.captured.calls if key[0] in names)
