"""What every backend can be asked: each is a module with these verbs, found by `backends.named`.

artefact = backend.compile(flat, example, dynamic=True, precise=False)
outputs = backend.call(artefact, example)
backend.save(artefact, folder); backend.load(folder)
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from layerscope.compile_taps.tapped_model import Flat
from layerscope.runtimes.observer_effect import ObserverEffect


class Made(NamedTuple):
    """What a compiler made, and what it said on the way that a user should know.

    `effect` is there where what the taps do to the output cannot be measured, and says why.
    """

    artefact: Any
    notes: tuple[str, ...] = ()
    effect: ObserverEffect | None = None


class FileArtefact:
    """A file that a compiler made, and what runs it; with `passing`, its folder goes when it does."""

    def __init__(self, path: Path, run: Any, *, passing: bool = False) -> None:
        self.path = path
        self.run = run
        if passing:
            weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)


class Mismatch(Exception):
    """A graph was given tensors that it was not compiled for; `takes` says of each what it was compiled for."""

    def __init__(self, takes: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.takes = takes


def sized(tensor: torch.Tensor) -> str:
    """Say what a tensor is: `float32 (2, 6)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} ({', '.join(map(str, tensor.shape))})"


class Backend(Protocol):
    """The verbs of a backend. An artefact is what its compiler made, whatever that is."""

    NAME: str
    """What `taps.json` and the runs call it."""

    LIVE: bool
    """Whether it takes and gives any Python value; else tensors alone, as `Flat` has them."""

    def compile(self, flat: Flat, example: tuple[torch.Tensor, ...], /, *, dynamic: bool, precise: bool) -> Made:
        """Compile the flat form; `precise` asks a compiler that fuses to round where the source does."""

    def call(self, artefact: Any, tensors: Sequence[torch.Tensor], /) -> Sequence[torch.Tensor]:
        """Run the graph."""

    def save(self, artefact: Any, folder: Path, /) -> None:
        """Write the graph into a folder that is there."""

    def load(self, folder: Path, /) -> Any:
        """Read it back; no pickle is run, and the model's source is not needed."""
