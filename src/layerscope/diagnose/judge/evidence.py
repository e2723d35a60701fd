"""What a look at two modules shows, without running them: weights and settings that are not the same.

row = evident(row, passes)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from layerscope.diagnose.causes import Case
from layerscope.diagnose.causes.settings import differing_settings
from layerscope.diagnose.causes.weights import differing_weights, quantised_weights
from layerscope.diagnose.judge.measuring import rounding
from layerscope.diagnose.judge.rows import Row
from layerscope.diagnose.replay.passes import Passes
from layerscope.diagnose.replay.sides import Side, main_dtype


def evident(row: Row, passes: Passes) -> Row:
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


def is_quantised(row: Row, passes: Passes) -> bool:
    """Tell whether a module's weights lie on a grid, are codes, or are of a kind of tensor that holds codes."""
    partner = partner_of(row.judged.name, passes)
    for tensor in (*partner.parameters(recurse=False), *partner.buffers(recurse=False)):
        codes = tensor.dim() > 1 and not (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        )
        if codes or type(tensor.data) is not torch.Tensor:
            return True
    return quantised_weights(_case(row, passes)) is not None


def _is_coarser(one: Side, other: Side) -> bool:
    coarse = [rounding(main_dtype(side.model) or torch.float64) for side in (one, other)]
    return coarse[0] > coarse[1]


def _case(row: Row, passes: Passes) -> Case:
    name = row.judged.name
    ours = passes.ours.modules.by_name[name]
    return Case(name, ours, partner_of(name, passes), uncalled=uncalled_in(name, passes))


def partner_of(name: str, passes: Passes) -> nn.Module:
    """Return the candidate's module; one that is used without being called has the place in its parent's partner."""
    inner: list[str] = []
    while name not in passes.pairing.names:
        name, _, last = name.rpartition(".")
        inner.insert(0, last)
    return passes.theirs.modules.by_name[passes.pairing.names[name]].get_submodule(".".join(inner))


def uncalled_in(name: str, passes: Passes) -> tuple[str, ...]:
    """Return the modules inside that never ran by themselves: their weights are the own code's."""
    called = {key[0] for key in passes.captured.calls}
    prefix = f"{name}." if name else ""
    return tuple(
        n.removeprefix(prefix) for n in passes.ours.modules.by_name if n.startswith(prefix) and n not in called
    )
