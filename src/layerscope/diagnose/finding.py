"""What a diagnosis found: the module to blame, why, and how every other one was judged.

finding = diagnose(reference, candidate, inputs)
finding.root                # 'model.layers.2.mlp.up_proj', or None when the pair is healthy
finding.cause               # Cause('weights', because='its weight is the reference's times 1.050')
print(finding)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from layerscope.compare.result import Verdict
from layerscope.diagnose.causes import Cause

Kind = Literal["same", "noise", "root", "nonfinite", "random", "quantised", "unpaired", "unplayed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GUILTY: tuple[Kind, ...] = ("root", "nonfinite", "random")


@dataclass(frozen=True, slots=True)
class Judged:
    """One call of one module, run on what the reference gave it.

    `name` is the reference's (`""` is the model itself), `counterpart` the candidate's. `where` says at which value the
    module is furthest off: its output, a value that its own code hands to a module inside it, or a gradient. `error`
    and `floor` are relative L2 errors there, `ratio` the one over the other. `leaf` tells that nothing inside was
    judged on its own, so that the error is all of the module's and not of its own code alone.
    """

    name: str
    call: int
    counterpart: str | None
    kind: Kind
    because: str
    where: str = "output"
    error: float | None = None
    floor: float | None = None
    ratio: float | None = None
    leaf: bool = True

    @property
    def guilty(self) -> bool:
        """Whether a difference is made here."""
        return self.kind in GUILTY


@dataclass(frozen=True, slots=True)
class Blame:
    """A module where a difference is made, why, and what putting it right does to the model's output.

    `removed` is the share of the final error, beyond the floor, that goes when the reference's value is put in its
    place alone; `made` the final error of the reference with the candidate's module in its place. None: there is
    nothing to remove, or it could not be tried.
    """

    name: str
    cause: Cause
    row: Judged
    removed: float | None = None
    made: float | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """The relative L2 error of the candidate's output, and of the reference's when it runs in the candidate's dtypes.

    `removed` is the share of it, beyond the floor, that goes when every module to blame is put right at once.
    """

    error: float | None
    floor: float | None
    removed: float | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """A module with packed weights: signal over quantisation noise in dB, of the weights and of the output.

    The output is the one on the reference's inputs; None where it was not judged.
    """

    name: str
    kind: str
    weight_sqnr: float
    output_sqnr: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of a pair of models.

    `rows` come in the order the reference ran; `roots` are every module that is to blame, the first to run first;
    `ranking` is the layers by the damage each does to the output, worst first, where all of them differ alike;
    `packed` is the modules whose weights are quantised tensors in the candidate, and what of the signal they keep.
    `notes` say what could not be replayed, and what the judgement rests on instead; `provenance` what was judged:
    both models, the inputs, the seed, the versions.
    """

    roots: tuple[Blame, ...]
    rows: tuple[Judged, ...]
    verdict: Verdict
    final: Final
    notes: tuple[str, ...] = ()
    ranking: tuple[tuple[str, float], ...] = ()
    packed: tuple[Packed, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> str | None:
        """The module to blame that runs first, in the reference's names; None when the pair is healthy."""
        return self.roots[0].name if self.roots else None

    @property
    def cause(self) -> Cause | None:
        """Why, as far as the evidence goes; None when the pair is healthy."""
        return self.roots[0].cause if self.roots else None

    def __str__(self) -> str:
        from layerscope.diagnose.page.document import document
        from layerscope.report import terminal

        return terminal.render(document(self))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report to look at: one file, which needs nothing else."""
        from layerscope.diagnose.page.html_page import page
        from layerscope.report import html

        html.save(page(self), path)

    def _repr_html_(self) -> str:
        from layerscope.diagnose.page.document import document
        from layerscope.report import html

        return html.fragment(document(self))

    def plot(self) -> Any:
        """Draw every module's error and floor as a matplotlib figure; raises MissingExtra without matplotlib."""
        from layerscope.diagnose.page.html_page import curves
        from layerscope.report.plots import figure

        return figure(*curves(self))


def called(name: str) -> str:
    """Return a module's name for a sentence."""
    return name or "the model itself"
