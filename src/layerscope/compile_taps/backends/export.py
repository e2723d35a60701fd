"""torch.export: a graph of torch's own operations, saved as `.pt2`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from layerscope.compile_taps.backends.backend import Made, Mismatch
from layerscope.compile_taps.tapped_model import Flat
from layerscope.runtimes.model_files import opened
from layerscope.runtimes.snapshot import restored

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
    program = exported(flat, example, dynamic=dynamic)
    return Made(Exported(program), fixed(flat, example, sizes_of(program)) if dynamic else ())


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the program."""
    try:
        return artefact.module(*tensors)  # type: ignore[no-any-return]
    except AssertionError as error:
        if not str(error).startswith("Guard failed"):
            raise
        dtypes = [str(each.dtype).removeprefix("torch.") for each in _inputs(artefact.program)]
        takes = list(map(taken, dtypes, sizes_of(artefact.program)))
        raise Mismatch(takes, str(error).splitlines()[0].lower()) from error


def save(artefact: Any, folder: Path) -> None:
    """Write the program with its weights."""
    torch.export.save(artefact.program, folder / FILE)


def load(folder: Path) -> Any:
    """Read the program back."""
    return Exported(opened(folder / FILE))


def exported(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool) -> ExportedProgram:
    """Return the program; sizes are free wherever the model's code leaves them so, but for those of 0 and 1."""
    shapes = {"tensors": tuple({at: Dim.AUTO for at, size in enumerate(t.shape) if size > 1} for t in example)}
    with torch.no_grad(), quiet("torch.fx.experimental.symbolic_shapes", "torch.export"):
        return torch.export.export(flat, example, dynamic_shapes=shapes if dynamic else None, strict=False)


def fixed(flat: Flat, example: tuple[torch.Tensor, ...], shapes: Sequence[Sequence[int | None]]) -> tuple[str, ...]:
    """Say which sizes the graph has as the example has them, though the model itself takes others; None is a free one.

    So are those of 1, and those that the model's code reads as numbers.
    """
    sizes = {(at, size) for shape in shapes for at, size in enumerate(shape) if size is not None}
    narrowed = {each for each in sizes if _takes_another(flat, example, *each)}
    told = [
        f"dimension {at} of {name} at {size}"
        for name, shape in zip(flat.arguments.names(), shapes, strict=True)
        for at, size in enumerate(shape)
        if (at, size) in narrowed
    ]
    return (f"the graph takes sizes as the example has them alone: {', '.join(told)}",) if told else ()


def _takes_another(flat: Flat, example: tuple[torch.Tensor, ...], at: int, size: int) -> bool:
    """Tell whether the model runs on an example that is longer by one in a dimension."""
    longer = [
        torch.cat([each, each.narrow(at, 0, 1)], at) if size and each.shape[at : at + 1] == (size,) else each
        for each in example
    ]
    try:
        with restored(flat), torch.no_grad():
            flat(*longer)
    except Exception:
        return False
    return True


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keep the exporter's remarks out of the user's log, and the graph that it prints where it fails out of sight."""
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    printed = io.StringIO()
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())  # the model's own
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _inputs(program: ExportedProgram) -> list[torch.Tensor]:
    given = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return [given[str(name)] for name in program.graph_signature.user_inputs]


def sizes_of(program: ExportedProgram) -> list[list[int | None]]:
    """Return the sizes of each input of a program, None for those that are free."""
    return [[int(text) if (text := str(size)).isdigit() else None for size in each.shape] for each in _inputs(program)]


def taken(dtype: str, shape: Sequence[int | None]) -> str:
    """Say what a graph takes: `float32 (any, 8)`."""
    return f"{dtype} ({', '.join('any' if size is None else str(size) for size in shape)})"
