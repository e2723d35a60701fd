"""What is known of one suspect, and what is made of it: `Case` in, `Cause` out.

    Cause("weights", "its weight is the reference's times 1.050", {"parameter": "weight", "factor": 1.05})

A cause is what the values show, with the numbers that show it; what they do not show is `unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from layerscope.diagnose.operations import Operation

__all__ = ["KINDS", "Case", "Cause", "Kind"]

Kind = Literal[
    "weights",
    "cast",
    "saturation",
    "grid",
    "constant",
    "nonfinite",
    "tokens",
    "heads",
    "order",
    "scale",
    "randomness",
    "shape",
    "operation",
    "raised",
    "unknown",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a module's result differs: the kind, a clause that follows its name, and plain values as evidence.

    >>> str(Cause("randomness", "two runs of it differ"))
    'two runs of it differ'
    """

    kind: Kind
    because: str
    evidence: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.because


@dataclass(frozen=True, slots=True)
class Case:
    """One suspect: the two live modules, and what each made of the reference's inputs.

    `wanted` is the reference's result, `got` the candidate's, `floor` the reference's in the candidate's dtype, and
    `again` the candidate's under another seed. `what` is what sentences call them. With `own_code` all that ran inside
    agrees; `uncalled` are the modules inside that did not run by themselves (their weights are used functionally),
    None: not known. `others` are the reference's modules by name, for weights that were mixed up.
    """

    name: str
    reference: nn.Module
    candidate: nn.Module
    inputs: tuple[torch.Tensor, ...] = ()
    wanted: torch.Tensor | None = None
    got: torch.Tensor | None = None
    floor: torch.Tensor | None = None
    again: torch.Tensor | None = None
    own_code: bool = False
    operations: tuple[Operation, ...] = ()
    raised: BaseException | None = None
    others: Mapping[str, nn.Module] = field(default_factory=dict)
    uncalled: tuple[str, ...] | None = None
    what: str = "output"
