"""A caller's own compiler: any function `(module, example_inputs) -> compiled`.

The module takes tensors by position and returns a tuple of them; the compiled one must do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from layerscope.compile_taps.backends import torchscript
from layerscope.compile_taps.backends.backend import Made
from layerscope.compile_taps.tapped_model import Flat
from layerscope.errors import Unsupported


class Custom:
    """The backend that a function makes."""

    LIVE = False

    def __init__(self, function: Callable[[torch.nn.Module, Any], Any]) -> None:
        self.function = function
        self.NAME = getattr(function, "__name__", type(function).__name__)

    def compile(self, flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
        """Call the function; sizes and precision are its own affair."""
        artefact = self.function(flat, example)
        if not callable(artefact):
            raise Unsupported(
                f"the backend {self.NAME} returned a {type(artefact).__name__}, which cannot be called; "
                "return what runs the graph."
            )
        return Made(artefact)

    def call(self, artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run what the function returned."""
        return artefact(*tensors)  # type: ignore[no-any-return]

    def save(self, artefact: Any, folder: Path) -> None:
        """Write a TorchScript module; nothing is known of any other."""
        if not isinstance(artefact, torch.jit.ScriptModule):
            raise Unsupported(
                f"the backend {self.NAME} made a {type(artefact).__name__}, which layerscope cannot save; "
                "a torch.jit.ScriptModule, or one of the named backends, can be."
            )
        torchscript.save(artefact, folder)

    def load(self, folder: Path) -> Any:
        """Read the TorchScript module back."""
        return torchscript.load(folder)
