"""Gather what is known of each suspect, and ask for the cause.

explain(suspects, passes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from layerscope.diagnose.causes import Case, Cause, cause_of
from layerscope.diagnose.causes.cause import shape
from layerscope.diagnose.judge.evidence import partner_of, uncalled_in
from layerscope.diagnose.judge.second_look import Look
from layerscope.diagnose.judge.suspects import Suspect
from layerscope.diagnose.operations import Operation, differences
from layerscope.diagnose.replay.module_hooks import Key
from layerscope.diagnose.replay.passes import Passes
from layerscope.diagnose.replay.replay import Guidance, Guided, Place
from layerscope.report.writing import some


def explain(suspects: Sequence[Suspect], passes: Passes, guided: Guided, look: Look) -> list[Cause]:
    """Name the cause of each, as far as the evidence goes."""
    return [_cause(suspect, passes, guided, look, drill=at < MOST) for at, suspect in enumerate(suspects)]


def _cause(suspect: Suspect, passes: Passes, guided: Guided, look: Look, *, drill: bool) -> Cause:
    if suspect.swapped is not None:
        evidence = {"relation": "exchanged", "owner": suspect.swapped}
        return Cause("weights", f"it holds the weights of {suspect.swapped}", evidence)
    place, row = suspect.row.place, suspect.row.judged
    if place is not None and suspect.row.measure is not None and not suspect.row.measure.there:
        return _not_handed(place, passes, guided)
    call = passes.captured.calls[suspect.row.key]
    case = Case(
        name=suspect.name,
        reference=passes.ours.modules.by_name[suspect.name],
        candidate=partner_of(suspect.name, passes),
        inputs=tuple(held.tensor for held in call.inputs.values()),
        own_code=not row.leaf,
        raised=guided.raised if guided.at == suspect.row.key else None,
        others=passes.ours.modules.by_name,
        uncalled=uncalled_in(suspect.name, passes),
    )
    if place is not None:
        wanted = _wanted(place, passes)
        seen = [kept.get(place) for kept in (look.got, look.floor, look.again)]
        got, floor, again = (_without_padding(value, wanted, passes) for value in seen)
        case = replace(case, wanted=wanted, got=got, floor=floor, again=again, what=str(place))
    found = cause_of(case)
    if not drill or (place is not None and place.gradient) or case.raised is not None:
        return found
    if found.kind == "unknown" or (case.own_code and found.kind not in ("weights", "constant", "randomness")):
        return cause_of(replace(case, operations=_operations(suspect.row.key, passes)))
    return found


MOST = 3  # suspects whose own code is looked into, operation by operation


def _without_padding(value: torch.Tensor | None, wanted: torch.Tensor | None, passes: Passes) -> torch.Tensor | None:
    return value if value is None or wanted is None else passes.captured.padded_alike(wanted, value)


def _not_handed(place: Place, passes: Passes, guided: Guided) -> Cause:
    """Tell which argument the candidate's code drops, and the operation that makes it in the reference's."""
    assert place.into is not None
    value, name = passes.captured.calls[place.into].inputs[place.leaf].tensor, place.leaf[0]
    others = [p.into[0] for p, m in guided.measured.items() if p.into and p.owner == place.owner and not m.there]
    log = passes.reference(Guidance(trace=place.owner, only=(), until=(place.owner,))).traced
    makers = [
        call.name
        for call in log
        for made in call.outputs
        if made.shape == value.shape and made.dtype == value.dtype and torch.equal(made, value)
    ]
    said = f"it hands no {name} to {some(others, 1)}, where the reference hands one of {shape(value.shape)}"
    made = f", made by its {makers[-1]}" if makers else ""
    evidence = {"argument": name, "modules": others, "operation": makers[-1] if makers else None}
    return Cause("operation", said + made, evidence)


def _wanted(place: Place, passes: Passes) -> torch.Tensor | None:
    """Return the reference's value at a place; gradients are not kept by place."""
    if place.gradient:
        return None
    call = passes.captured.calls[place.owner if place.into is None else place.into]
    held = (call.outputs if place.into is None else call.inputs).get(place.leaf)
    if held is None:
        return None
    return held.tensor if place.cut is None else held.tensor[..., slice(*place.cut)]


def _operations(key: Key, passes: Passes) -> tuple[Operation, ...]:
    """Log the own code of one call in both models and at the floor, and tell where it differs."""
    guidance = Guidance(trace=key, only=(), until=(key,))
    logs = [run(guidance).traced for run in (passes.reference, passes.candidate, passes.floor)]
    try:
        return differences(*logs)
    except Exception:  # two logs that cannot be laid side by side explain nothing, and lose nothing
        return ()
