"""A judgement for every call of the reference, from the measures of its places.

rows = judged_rows(passes, candidate, floor, nudged)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from layerscope.diagnose.finding import Judged
from layerscope.diagnose.judge.judging import Code, Judgement, judge, worse
from layerscope.diagnose.judge.measuring import Measured
from layerscope.diagnose.replay.module_hooks import Key
from layerscope.diagnose.replay.passes import Passes, told
from layerscope.diagnose.replay.replay import Guided, Place


@dataclass(frozen=True, slots=True)
class Row:
    """A judged call with the place that decided it, and its measure; None where nothing was measured.

    `odd` tells that both models run the same code there and yet do not give the same bits.
    """

    judged: Judged
    place: Place | None = None
    measure: Measured | None = None
    odd: bool = False

    @property
    def key(self) -> Key:
        """The call, in the reference's names."""
        return self.judged.name, self.judged.call


def judged_rows(
    passes: Passes,
    candidate: Guided,
    floor: Mapping[Place, Measured],
    nudged: Mapping[Place, Measured],
    *,
    leniency: float = 1.0,
) -> list[Row]:
    """Judge every call of the reference, in the order they began: by the worst value that its own code makes."""
    owned: dict[Key, list[Place]] = defaultdict(list)
    for place in candidate.measured:
        owned[place.owner].append(place)
    parents = {call.above for call in passes.captured.calls.values()}
    alone = dict(passes.pairing.alone)
    coarser = {
        place.into
        for place, measure in candidate.measured.items()
        if place.into is not None and place in floor and measure.rounding > floor[place].rounding
    }
    rows: list[Row] = []
    for key in passes.captured.calls:
        name, number = key
        counterpart = passes.pairing.names.get(name)
        base = Judged(name, number, counterpart, "unpaired", alone.get(name, ""), leaf=key not in parents)
        if name not in passes.pairing.reference:
            because = alone.get(name, "it cannot be run on the reference's values")
            rows.append(Row(replace(base, kind="unpaired" if name in alone else "unplayed", because=because)))
        elif candidate.raised is not None and candidate.at == key:
            because = f"it raises {told(candidate.raised)}"
            rows.append(Row(replace(base, kind="root", because=because, where="output")))
        elif not owned[key]:
            rows.append(Row(replace(base, kind="unplayed", because=_silent(candidate, key))))
        else:
            code = code_of(name, passes)
            judgements = {
                place: judge(
                    candidate.measured[place],
                    floor=floor.get(place),
                    nudged=nudged.get(place),
                    code=code,
                    leniency=leniency * (COARSER if key in coarser else 1.0),
                )
                for place in owned[key]
            }
            rows.append(_row(base, _without_flips(judgements, candidate.measured), candidate.measured, code=code))
    return rows


def _row(base: Judged, judgements: Mapping[Place, Judgement], measures: Mapping[Place, Measured], *, code: Code) -> Row:
    place, worst = max(judgements.items(), key=lambda item: worse(item[1]))
    kind = worst.kind
    if kind == "same" and any(j.kind == "noise" for j in judgements.values()):
        kind = "noise"
    judged = replace(
        base,
        kind=kind,
        because=worst.because,
        where=str(place),
        error=worst.error,
        floor=worst.floor,
        ratio=worst.ratio,
    )
    return Row(judged, place, measures[place], odd=code != "other" and any(not j.certain for j in judgements.values()))


def _without_flips(
    judgements: Mapping[Place, Judgement], measures: Mapping[Place, Measured]
) -> Mapping[Place, Judgement]:
    """Let indices pass that flipped between scores which are themselves off by rounding."""
    floats = [j for place, j in judgements.items() if measures[place].dtype.is_floating_point and place.into is None]
    if not floats or any(j.guilty or j.certain for j in floats):
        return judgements
    return {
        place: replace(
            j, kind="noise", because=f"{measures[place].changed:.1%} of its elements flipped with the scores"
        )
        if j.guilty and not measures[place].dtype.is_floating_point and measures[place].changed < FLIPS
        else j
        for place, j in judgements.items()
    }


# A fault before it may hand a module its input in a coarser dtype than the floor had it in, which is not its doing.
COARSER = 2.5
FLIPS = 0.2  # of all choices: more than that is no near-tie


def _silent(candidate: Guided, key: Key) -> str:
    if key not in candidate.entered:
        return "the candidate never called it" if candidate.raised is None else "the candidate raised before"
    return "it gave no tensor that could be compared"


def code_of(name: str, passes: Passes) -> Code:
    """Tell what is known of the code of a module and its partner."""
    ours = passes.ours.modules.by_name[name]
    theirs = passes.theirs.modules.by_name[passes.pairing.names[name]]
    kinds = type(ours), type(theirs)
    if _kernel(ours) != _kernel(theirs) or not (issubclass(kinds[0], kinds[1]) or issubclass(kinds[1], kinds[0])):
        return "other"
    rewritten = kinds[0] is not kinds[1] or "forward" in vars(ours) or "forward" in vars(theirs)
    return "patched" if rewritten else "same"


def _kernel(module: nn.Module) -> object:
    """Return which of transformers' attention kernels a module runs."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)
