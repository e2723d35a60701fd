"""AOTInductor: torch.export's graph compiled to machine code ahead of time, in a package."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerscope.compile_taps.backends.backend import FileArtefact, Made
from layerscope.compile_taps.backends.export import exported, fixed, sizes_of
from layerscope.compile_taps.tapped_model import Flat
from layerscope.errors import BadModel

NAME = "aoti"
LIVE = False
FILE = "model.aoti.pt2"


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Export the model and compile the graph; takes a C++ compiler."""
    path = Path(tempfile.mkdtemp(prefix="layerscope_aoti_")) / FILE
    options = {"emulate_precision_casts": True} if precise else {}
    program = exported(flat, example, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own use of its trees
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    return Made(_loaded(path, passing=True), fixed(flat, example, sizes_of(program)) if dynamic else ())


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the machine code."""
    return artefact.run(*tensors)  # type: ignore[no-any-return]


def save(artefact: Any, folder: Path) -> None:
    """Copy the package."""
    shutil.copyfile(artefact.path, folder / FILE)


def load(folder: Path) -> Any:
    """Load the package; it is machine code, to be trusted as much as any other library."""
    path = folder / FILE
    if not path.is_file():
        raise BadModel(f"{str(path)!r} is not there.")
    return _loaded(path)


def _loaded(path: Path, *, passing: bool = False) -> FileArtefact:
    return FileArtefact(path, torch._inductor.aoti_load_package(str(path)), passing=passing)
