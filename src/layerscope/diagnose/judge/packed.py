"""How much of the signal packed weights keep: the SQNR of each module's weights, and of what it gives.

    packed_weights(rows, passes)        # (Packed("model.layers.0.mlp.up_proj", "Int8Tensor", 46.1, 45.8), ...)

A candidate whose weights are quantised tensors (torchao's, as transformers loads them), or were packed in a GPTQ or AWQ
checkpoint, has the names of its float original; its weights are dequantised and set against that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from layerscope.diagnose.causes.parameters import dense, held
from layerscope.diagnose.finding import Packed
from layerscope.diagnose.judge.rows import Row
from layerscope.diagnose.replay.passes import Passes
from layerscope.models.packed import Unpacked


def packed_weights(rows: Sequence[Row], passes: Passes) -> tuple[Packed, ...]:
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
