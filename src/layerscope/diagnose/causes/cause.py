"""What is known of one suspect, what is made of it, and in which words: `Case` in, `Cause` out.

    Cause("weights", "its weight is the reference's times 1.050", {"parameter": "weight", "factor": 1.05})
    times(1.05), indices([3, 4, 5], "row")      # "is the reference's times 1.050", "rows 3 to 5"

A cause is what the values show, with the numbers that show it; what they do not show is `unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from layerscope.diagnose.operations import Operation
from layerscope.report.writing import many, number

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


def times(factor: float) -> str:
    """Say by which factor something is off.

    >>> times(1.05), times(-1.0)
    ("is the reference's times 1.050", "is the reference's with the sign turned")
    """
    turned = abs(factor + 1) < 1e-3
    return "is the reference's with the sign turned" if turned else f"is the reference's times {number(factor)}"


def indices(at: Sequence[int], noun: str) -> str:
    """Name a few of many, or all of a run.

    >>> indices([7], "row"), indices([0, 1, 2], "row"), indices([1, 4], "token"), indices([1, 4, 5, 9, 12], "row")
    ('row 7', 'rows 0 to 2', 'tokens 1 and 4', '5 rows (1, 4, 5, 9, ...)')
    """
    if len(at) == 1:
        return f"{noun} {at[0]}"
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"{noun}s {at[0]} to {at[-1]}"
    if len(at) <= 4:
        return f"{noun}s {listed(at)}"
    return f"{many(len(at), noun)} ({', '.join(map(str, at[:4]))}, ...)"


def listed(things: Sequence[object]) -> str:
    """Join things as a sentence does.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    words = [str(thing) for thing in things]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shape(sizes: Sequence[int]) -> str:
    """Write a shape.

    >>> shape((2, 3))
    '2 x 3'
    """
    return " x ".join(map(str, sizes)) or "one number"


def share(part: int, whole: int) -> str:
    """Write a share in percent, with as many digits as tell something.

    >>> share(3, 100), share(1, 4096), share(1, 3)
    ('3 %', '0.024 %', '33 %')
    """
    return f"{100 * part / whole:.2g} %" if part < whole else "100 %"
