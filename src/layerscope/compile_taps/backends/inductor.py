"""torch.compile with Inductor: one graph, any Python values in and out, compiled at the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from layerscope.compile_taps.backends.backend import Made
from layerscope.compile_taps.tapped_model import Flat
from layerscope.errors import Unsupported
from layerscope.runtimes.traced_hooks import alone

NAME = "inductor"
LIVE = True


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Have the whole model compiled as one graph; a second size of an input makes it a dynamic one."""
    options: dict[str, Any] = {"emulate_precision_casts": True} if precise else {}
    return Made(
        _said(torch.compile(_called(flat.tapped), fullgraph=True, dynamic=None if dynamic else False, options=options))
    )


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the model by its tensors; `Compiled` calls the artefact itself, with the arguments as they are."""
    return artefact(*tensors)  # type: ignore[no-any-return]


def save(artefact: Any, folder: Path) -> None:
    """Refuse: what torch.compile makes lives in one process."""
    raise Unsupported(
        "torch.compile makes code for this process alone, which cannot be saved; compile with backend='aoti' "
        "(the same compiler, ahead of time), 'export', 'torchscript' or 'onnx' for a file."
    )


def load(folder: Path) -> Any:
    """Refuse, as `save` does."""
    raise Unsupported(f"{str(folder)!r} says it was made by torch.compile, of which nothing can be saved.")


def _called(model: torch.nn.Module) -> Callable[..., Any]:
    def tapped(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return alone(tapped)  # type: ignore[no-any-return]


def _said(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Have what cannot be compiled told in a sentence; the compiler's own pages are its cause."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            where = next((line for line in reversed(lines) if line.startswith("File ")), "")
            raise Unsupported(
                f"inductor cannot compile the model as one graph for these inputs: {lines[0].rstrip('.')}"
                f"{f' ({where})' if where else ''}. Take what hinders it out of the model's code, try another backend, "
                "or record the model uncompiled."
            ) from error

    return call
