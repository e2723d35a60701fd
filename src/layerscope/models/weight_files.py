"""The weight files of a checkpoint folder, read without running anything that lies in them.

    read_weights(Path("checkpoints/mamba-130m"))["backbone.embedding.weight"]

safetensors where there are any, else `pytorch_model*.bin` by `torch.load(weights_only=True)`, which knows tensors,
numbers and containers and refuses the rest.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerscope.errors import BadModel, first_line


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, safetensors first; empty where there are none."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def read_weights(folder: Path) -> dict[str, Any]:
    """Return every tensor by its name, and the numbers that some writers keep beside them."""
    files = weight_files(folder)
    if not files:
        raise BadModel(
            f"{str(folder)!r} has a config.json and no weights; put model.safetensors or pytorch_model.bin beside it."
        )
    found: dict[str, Any] = {}
    for file in files:
        read = read_tensors(file)
        if not isinstance(read, Mapping):
            raise BadModel(f"{str(file)!r} holds a {type(read).__name__}, not weights by their names.")
        found |= {str(name): value for name, value in read.items()}
    return found


def read_tensors(file: Path, what: str = "") -> Any:
    """Return what a safetensors file holds, or one that torch saved; `what` stands before its name where it is refused.

    Of torch's, tensors, numbers and containers are read, and nothing else.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file.suffix.lower() == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as error:
            raise BadModel(f"{what}{str(file)!r} is not a readable safetensors file: {error}.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch thinks of the file is told by the error below
            return torch.load(file, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(file))
    except Exception as error:  # of a damaged one, torch's reader raises whatever comes
        raise BadModel(
            f"{what}{str(file)!r} is not a file of tensors and numbers alone ({first_line(error)}); anything more "
            "could run code and is refused."
        ) from error
