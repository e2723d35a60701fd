"""torch.export: a graph of torch's own operations, saved as `.pt2`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from layerscope.compiled.backends.backend import Made
from layerscope.compiled.tapping import Flat
from layerscope.runtimes.files import opened

__all__ = ["FILE", "LIVE", "NAME", "call", "compile", "exported", "load", "save"]

NAME = "export"
LIVE = False
FILE = "model.pt2"


class Exported:
    """A program, and its module to call."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.module = program.module()


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Export the model."""
    return Made(Exported(exported(flat, example, dynamic=dynamic)))


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the program."""
    return artefact.module(*tensors)  # type: ignore[no-any-return]


def save(artefact: Any, folder: Path) -> None:
    """Write the program with its weights."""
    torch.export.save(artefact.program, folder / FILE)


def load(folder: Path) -> Any:
    """Read the program back."""
    return Exported(opened(folder / FILE))


def exported(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool) -> ExportedProgram:
    """Return the program; sizes are free wherever the model's code leaves them so, but for those of 0 and 1."""
    shapes = {"tensors": tuple({at: Dim.AUTO for at, size in enumerate(t.shape) if size > 1} for t in example)}
    with torch.no_grad():
        return torch.export.export(flat, example, dynamic_shapes=shapes if dynamic else None, strict=False)
