"""TorchScript, by tracing: `torch.jit.trace`, saved as one file that C++ reads as well."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.jit._trace import TracerWarning

from layerscope.compile_taps.backends.backend import Made
from layerscope.compile_taps.tapped_model import Flat
from layerscope.runtimes.model_files import opened

NAME = "torchscript"
LIVE = False
FILE = "model.pt"
_LINES = 5


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Trace the model; sizes that its code reads as Python numbers are those of the example, and said so."""
    frozen: list[str] = []
    with _listening(frozen):
        traced: Any = torch.jit.trace(flat, example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
    return Made(traced, _told(list(dict.fromkeys(frozen))))


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the traced module."""
    return artefact(*tensors)  # type: ignore[no-any-return]


def save(artefact: Any, folder: Path) -> None:
    """Write the module with its weights."""
    with _listening([]):
        torch.jit.save(artefact, folder / FILE)


def load(folder: Path) -> Any:
    """Read the module back."""
    return opened(folder / FILE)


def _told(lines: list[str]) -> tuple[str, ...]:
    if not lines:
        return ()
    more = f" and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
    return (
        f"tracing keeps {len(lines)} values as the example has them, and takes the same branch for any input: "
        f"{', '.join(lines[:_LINES])}{more}",
    )


@contextmanager
def _listening(frozen: list[str]) -> Iterator[None]:
    """Collect what the tracer warns of, and drop what torch says of TorchScript's future."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    for each in said:
        if issubclass(each.category, TracerWarning):
            frozen.append(f"{Path(each.filename).name}:{each.lineno}")
        elif not issubclass(each.category, (DeprecationWarning, FutureWarning)):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
