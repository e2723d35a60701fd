"""A judgement for every call of the reference, from the measures of its places and from a look at both modules.

rows = judged_rows(passes, candidate, floor, nudged)
row = evident(row, passes)      # weights and settings that are seen to differ
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from layerscope.diagnose.causes import Case
from layerscope.diagnose.causes.settings import differing_settings
from layerscope.diagnose.causes.weights import differing_weights, quantised_weights
from layerscope.diagnose.finding import Judged
from layerscope.diagnose.judge.judging import Code, Judgement, judge, worse
from layerscope.diagnose.judge.measurement import Distance, rounding
from layerscope.diagnose.replay.module_hooks import Key
from layerscope.diagnose.replay.passes import Passes, told
from layerscope.diagnose.replay.replay import Guided, Site
from layerscope.diagnose.replay.sides import ModelSide, main_dtype


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A judged call with the place that decided it, and its measure; None where nothing was measured.

    `odd` tells that both models run the same code there and yet do not give the same bits.
    """

    judged: Judged
    place: Site | None = None
    measure: Distance | None = None
    odd: bool = False

    @property
    def key(self) -> Key:
        """The call, in the reference's names."""
        return self.judged.name, self.judged.call


def judged_rows(
    passes: Passes,
    candidate: Guided,
    floor: Mapping[Site, Distance],
    nudged: Mapping[Site, Distance],
    *,
    leniency: float = 1.0,
) -> list[JudgedRow]:
    """Judge every call of the reference, in the order they began: by the worst value that its own code makes."""
    owned: dict[Key, list[Site]] = defaultdict(list)
    for place in candidate.measured:
        owned[place.owner].append(place)
    parents = {call.above for call in passes.captured.calls.values()}
    alone = passes.pairing.alone
    coarser = {
        place.into
        for place, measure in candidate.measured.items()
        if place.into is not None and place in floor and measure.rounding > floor[place].rounding
    }
    rows: list[JudgedRow] = []
    for key in passes.captured.calls:
        name, number = key
        counterpart = passes.pairing.names.get(name)
        base = Judged(name, number, counterpart, "unpaired", alone.get(name, ""), leaf=key not in parents)
        if name not in passes.pairing.reference:
            because = alone.get(name, "it cannot be run on the reference's values")
            rows.append(JudgedRow(replace(base, kind="unpaired" if name in alone else "unplayed", because=because)))
        elif candidate.raised is not None and candidate.at == key:
            because = f"it raises {told(candidate.raised)}"
            rows.append(JudgedRow(replace(base, kind="root", because=because, where="output")))
        elif not owned[key]:
            rows.append(JudgedRow(replace(base, kind="unplayed", because=_silent(candidate, key))))
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


def _row(
    base: Judged, judgements: Mapping[Site, Judgement], measures: Mapping[Site, Distance], *, code: Code
) -> JudgedRow:
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
    return JudgedRow(
        judged, place, measures[place], odd=code != "other" and any(not j.certain for j in judgements.values())
    )


def _without_flips(judgements: Mapping[Site, Judgement], measures: Mapping[Site, Distance]) -> Mapping[Site, Judgement]:
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


def evident(row: JudgedRow, passes: Passes) -> JudgedRow:
    """Blame a module that is within its floor when its weights or settings are seen to be others.

    Both models run the same code there, and still give other bits: a factor of 1.003 is lost in bf16's rounding, but
    not in a look at the weights.
    """
    if not row.odd or row.judged.guilty:
        return row
    case = _case(row, passes)
    found = differing_settings(case)
    if not _is_coarser(passes.ours, passes.theirs):  # the reference's own rounding would be found
        found = differing_weights(case) or quantised_weights(case) or found
    if found is None:
        return row
    because = f"{row.judged.because}, but not the reference's bits, and {found.because}"
    return replace(row, judged=replace(row.judged, kind="root", because=because))


def is_quantised(row: JudgedRow, passes: Passes) -> bool:
    """Tell whether a module's weights lie on a grid, are codes, or are of a kind of tensor that holds codes."""
    partner = passes.partner_of(row.judged.name)
    for tensor in (*partner.parameters(recurse=False), *partner.buffers(recurse=False)):
        codes = tensor.dim() > 1 and not (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        )
        if codes or type(tensor.data) is not torch.Tensor:
            return True
    return quantised_weights(_case(row, passes)) is not None


def _is_coarser(one: ModelSide, other: ModelSide) -> bool:
    coarse = [rounding(main_dtype(side.model) or torch.float64) for side in (one, other)]
    return coarse[0] > coarse[1]


def _case(row: JudgedRow, passes: Passes) -> Case:
    name = row.judged.name
    ours = passes.ours.modules.by_name[name]
    return Case(name, ours, passes.partner_of(name), uncalled=passes.uncalled_in(name))
