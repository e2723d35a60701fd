"""GPTQ and AWQ checkpoints: their packed weights as the floats they stand for, without the libraries that run them.

    weights = unpacked(read_weights(folder), packing_of(config), torch.float16)
    weights["model.layers.0.mlp.up_proj.weight"]

Both keep a Linear as int32 words of small integers, with a scale and a zero for each group of inputs:
`weight[o, i] = scales[group(i), o] * (q[i, o] - zeros[group(i), o])`. GPTQ packs `qweight` along the inputs and states
each input's group in `g_idx`; AWQ packs along the outputs, in an order of its own. The products are taken in float32
and rounded once, to the dtype of the model; kernels that multiply in float16 round on the way as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerscope.errors import BadModel, first_line

# Where AWQ's `gemm` layout keeps the outputs of a word, from its low bits on: output 0 first, then 2, 4, 6, 1, 3, 5, 7.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Unpacked(nn.Parameter):
    """A weight that was packed in its checkpoint; `packing` says how."""

    packing: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Unpacked:
        copied: Unpacked = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.packing = self.packing
        return copied


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint packs its weights: `method` is gptq or awq; `zero` is what is added to a stored zero."""

    method: str
    bits: int
    group: int  # inputs that share a scale; -1 is all of them
    zero: int = 0

    def __str__(self) -> str:
        return f"{self.method.upper()} int{self.bits}{'' if self.group < 0 else f' g{self.group}'}"


def packing_of(config: Mapping[str, Any], folder: Path) -> Packing | None:
    """Read how a checkpoint is packed; None where it is not, or by another method; refuses forms that are not known."""
    said = config.get("quantization_config")
    method = str(said.get("quant_method", "")).lower() if isinstance(said, Mapping) else ""
    if method not in ("gptq", "awq"):
        return None
    assert isinstance(said, Mapping)
    bits = said.get("bits", said.get("w_bit", 4))
    group = said.get("group_size", said.get("q_group_size", 128))
    form = str(said.get("checkpoint_format", "gptq") if method == "gptq" else said.get("version", "gemm")).lower()
    if form not in (("gptq", "gptq_v2") if method == "gptq" else ("gemm",)):
        raise _refused(folder, f"its {method.upper()} weights are in the format {form!r}")
    if bits not in ((2, 4, 8) if method == "gptq" else (4,)):
        raise _refused(folder, f"its {method.upper()} weights have {bits} bits")
    if type(group) is not int or not (group == -1 or group > 0):
        raise _refused(folder, f"its group_size is {group!r}")
    # The first GPTQ format stores each zero less one.
    return Packing(method, bits, group, zero=int(form == "gptq"))


def unpacked(
    weights: Mapping[str, Any], packing: Packing, dtype: torch.dtype, *, folder: Path
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights with every packed one in its float form, and the names of those that were packed."""
    names = [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]
    if not names:
        raise BadModel(f"{str(folder)!r} says that its weights are packed by {packing}, and there is no .qweight.")
    inside = {f"{name}.{part}" for name in names for part in _PARTS}
    found = {name: tensor for name, tensor in weights.items() if name not in inside}
    for name in names:
        parts = {part: weights.get(f"{name}.{part}") for part in _PARTS}
        try:
            found[f"{name}.weight"] = _weight(packing, **parts).to(dtype)
        except (ValueError, RuntimeError, IndexError, AttributeError, TypeError) as error:
            told = ", ".join(f"{part} {_shape(tensor)}" for part, tensor in parts.items() if tensor is not None)
            raise BadModel(f"{str(folder)!r}: {name} ({told}) does not fit {packing}: {first_line(error)}.") from error
    return found, [f"{name}.weight" for name in names]


def _weight(packing: Packing, *, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> torch.Tensor:
    groups, outputs = scales.shape
    if packing.method == "gptq":
        codes = _spread(qweight, packing.bits).transpose(1, 2).flatten(0, 1)
        zeros = _spread(qzeros, packing.bits).flatten(1) + packing.zero
    else:
        codes, zeros = (_spread(words, packing.bits)[:, :, list(_AWQ_ORDER)].flatten(1) for words in (qweight, qzeros))
    inputs = len(codes) if g_idx is None else min(len(g_idx), len(codes))  # the last word may be filled up
    if packing.group > 0 and -(-inputs // packing.group) != groups:
        raise ValueError(f"{inputs} inputs in groups of {packing.group} are not {groups}")
    if codes.shape[1] < outputs or zeros.shape[1] < outputs:
        raise ValueError(f"there are {min(codes.shape[1], zeros.shape[1])} outputs for {outputs} scales")
    each = inputs if packing.group < 0 else packing.group
    group = torch.arange(inputs) // each if packing.method == "awq" or g_idx is None else g_idx.long()
    if len(group) != inputs or not 0 <= int(group.min()) <= int(group.max()) < groups:
        raise ValueError("its g_idx does not name a group for each input")
    offset = codes[:inputs, :outputs] - zeros[:, :outputs][group]
    weight: torch.Tensor = offset.float() * scales.float()[group]
    return weight.t().contiguous()


def _spread(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers in each word along a new last axis, from its low bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.to(torch.int32)[..., None] >> shifts) & ((1 << bits) - 1)


def _shape(tensor: Any) -> str:
    return "x".join(map(str, getattr(tensor, "shape", ()))) or type(tensor).__name__


def _refused(folder: Path, what: str) -> BadModel:
    return BadModel(
        f"{str(folder)!r}: {what}, which is not read here; GPTQ of 2, 4 or 8 bits (gptq, gptq_v2) and AWQ of 4 (gemm) "
        "are. Load it yourself in a file.py:function that returns the model."
    )
