"""Layers that all differ alike are quantised, not wrong: their common behaviour is the floor of each.

    rows = quantised(rows, passes)
    packed_weights(rows, passes)        # (Packed("model.layers.0.mlp.up_proj", "Int8Tensor", 46.1, 45.8), ...)

When nearly every module of one kind is beyond its rounding, and by much the same, the dtype's rounding is no longer
what to expect. A module whose error, or whose best-fitting factor, stands out from its siblings' is still to blame.
Modules whose weights lie on a grid are judged by each other too, when there are several: a model may be quantised in
part. Weights that are packed (torchao's tensors, GPTQ and AWQ checkpoints) are dequantised and set against the
reference's, which has them under the same names.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from layerscope.diagnose.causes.weights import dense, held
from layerscope.diagnose.finding import Packed
from layerscope.diagnose.judge.rows import JudgedRow, is_quantised
from layerscope.diagnose.replay.passes import Passes
from layerscope.models.packed import Unpacked

LEAST = 6  # siblings that it takes to know what is common
SHARE = 0.8  # of them that are beyond their floor
LARGEST = 0.5  # an error of which half the value is left is no quantisation
APART = 3.0  # times the middle error, at least
SPREADS = 5.0  # times the usual scatter of the siblings, at least
FACTOR = 0.01  # the least that a factor of its own must be


class Sibling(NamedTuple):
    """One module of a kind: its isolated error, its best-fitting factor, and whether it is beyond its floor."""

    name: str
    error: float
    scale: float
    beyond: bool


def common(siblings: Sequence[Sibling]) -> bool:
    """Tell whether these modules differ alike, as quantised ones do."""
    usable = [s for s in siblings if math.isfinite(s.error)]
    beyond = [s for s in usable if s.beyond]
    if len(usable) < LEAST or len(beyond) < SHARE * len(usable):
        return False
    return alike(beyond)


def alike(beyond: Sequence[Sibling]) -> bool:
    """Tell whether errors are of a size that a grid makes, and no factor is common to them."""
    middle = statistics.median(s.error for s in beyond)
    drift = statistics.median(abs(s.scale - 1) for s in beyond)
    return middle < LARGEST and drift < max(0.25 * middle, 1e-3)


def standing_out(siblings: Sequence[Sibling], *, among: Sequence[Sibling]) -> dict[str, str]:
    """Return the modules that stand out from others, each with the reason."""
    beyond = [s for s in among if s.beyond]
    logs = [math.log(s.error) for s in beyond if 0 < s.error < math.inf]
    middle = statistics.median(logs)
    scatter = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    limit = max(math.log(APART), SPREADS * scatter)
    drift = statistics.median(abs(s.scale - 1) for s in beyond)
    found: dict[str, str] = {}
    for s in (s for s in siblings if s.beyond):
        if not math.isfinite(s.error) or (s.error > 0 and math.log(s.error) - middle > limit):
            found[s.name] = f"its error is {s.error / math.exp(middle):.1f}x that of its siblings"
        elif abs(s.scale - 1) > max(10 * drift, FACTOR):
            found[s.name] = f"it is the reference's times {s.scale:.3f}, its siblings are within {max(drift, 1e-4):.0e}"
    return found


SEVERAL = 3  # modules on a grid: one or two may be a mistake


def quantised(rows: list[JudgedRow], passes: Passes) -> list[JudgedRow]:
    """Clear the modules that differ just as their siblings do; those that stand out stay to blame.

    Where one kind of module is quantised, others are judged by their own kind if it differs as a whole, and by that one
    if they are few: an embedding that shares its weight with a quantised head is quantised too.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        if row.judged.call:  # a module that runs twelve times is one module
            continue
        module = passes.ours.modules.by_name[row.judged.name]
        weights = module.parameters(recurse=not row.judged.leaf)
        usable = row.measure is not None and row.measure.shape and row.judged.kind not in ("nonfinite", "random")
        if usable and any(parameter.dim() > 1 for parameter in weights):
            groups[type(module).__name__].append(at)
    siblings = {at: _sibling(rows[at]) for members in groups.values() for at in members}
    known = [kind for kind, members in groups.items() if common([siblings[at] for at in members])]
    if known:
        pool = [siblings[at] for kind in known for at in groups[kind]]
        for kind, members in groups.items():
            own = [siblings[at] for at in members]
            as_a_whole = kind in known or (len(own) > 1 and all(sibling.beyond for sibling in own))
            _clear(rows, members, standing_out(own, among=own if as_a_whole else pool))
        return rows
    marked = [at for at in siblings if rows[at].judged.guilty and is_quantised(rows[at], passes)]
    own = [siblings[at] for at in marked]
    if len(marked) >= SEVERAL and alike(own):
        _clear(rows, marked, standing_out(own, among=own))
    return rows


def _clear(rows: list[JudgedRow], members: Collection[int], apart: Mapping[str, str]) -> None:
    cleared = {rows[at].judged.name for at in members}
    for at, row in enumerate(rows):
        judged = row.judged
        if judged.name not in cleared or not judged.guilty:
            continue
        if judged.name in apart:
            judged = replace(judged, kind="root", because=apart[judged.name])
        else:
            judged = replace(judged, kind="quantised", because="off as much as the others that are quantised")
        rows[at] = replace(rows[at], judged=judged)


def _sibling(row: JudgedRow) -> Sibling:
    assert row.measure is not None
    return Sibling(row.judged.name, row.measure.error, row.measure.scale, row.judged.guilty)


def packed_weights(rows: Sequence[JudgedRow], passes: Passes) -> tuple[Packed, ...]:
    """Return the modules whose weights are packed in the candidate and plain in the reference, as they ran."""
    found: dict[str, Packed] = {}
    for judged in (row.judged for row in rows):
        if judged.counterpart is None or judged.name in found:
            continue
        mine = held(passes.ours.modules.by_name[judged.name])
        theirs = held(passes.theirs.modules.by_name[judged.counterpart])
        pairs = [(tensor, theirs[key]) for key, tensor in mine.items() if key in theirs and _is_packed(theirs[key])]
        dense_pairs = [(dense(one), dense(two)) for one, two in pairs if not _is_packed(one)]
        known = [(one, two) for one, two in dense_pairs if one is not None and two is not None]
        known = [(one.double(), two.double().to(one.device)) for one, two in known if one.shape == two.shape]
        if known:
            signal = sum(float(one.square().sum()) for one, _ in known)
            noise = sum(float((one - two).square().sum()) for one, two in known)
            output = None
            if judged.error is not None and judged.where.startswith("output"):
                output = _decibels(1.0, judged.error**2)
            kind = _packing(pairs[0][1]) or type(pairs[0][1]).__name__
            found[judged.name] = Packed(judged.name, kind, _decibels(signal, noise), output)
    return tuple(found.values())


def _is_packed(tensor: torch.Tensor) -> bool:
    unlike_others = getattr(type(tensor), "dequantize", None) is not torch.Tensor.dequantize
    return tensor.is_quantized or unlike_others or bool(_packing(tensor))


def _packing(tensor: torch.Tensor) -> str:
    """Return how a weight was packed in the checkpoint it was loaded from, where `models` has unpacked it."""
    return tensor.packing if isinstance(tensor, Unpacked) else ""


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
