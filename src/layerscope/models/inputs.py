"""What a model is called with: from a file, from a function, from a prompt.

    read_inputs("batch.safetensors")      # a mapping of names: keyword arguments
    Inputs.of((ids, mask))                # a tuple: positional arguments

Nothing here unpickles: `.pt` is read with `weights_only=True`, `.npz` with `allow_pickle=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope.errors import BadModel, first_line
from layerscope.models.functions import function_at, is_function
from layerscope.models.weight_files import read_tensors

if TYPE_CHECKING:
    import torch

DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog, and the lazy dog looks up: who was that?"
FORMS = "FILE.safetensors, FILE.npz, FILE.pt, file.py:function or package.module:function"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object) -> Inputs:
        """Read a mapping as keyword arguments, a tuple as positional ones, anything else as the only one.

        A mapping whose keys are 0, 1, 2 ... is positional too: file formats without tuples write them so.
        """
        if isinstance(value, Inputs):
            return value
        if isinstance(value, tuple):
            return cls(value)
        if not isinstance(value, Mapping):
            return cls((value,))
        named = {str(key): item for key, item in value.items()}
        numbers = [str(n) for n in range(len(named))]
        if named and sorted(named) == sorted(numbers):
            return cls(tuple(named[n] for n in numbers))
        return cls((), named)


def batches_of(value: object) -> Iterator[Inputs]:
    """Yield the arguments of each forward: one for a single value, one per item for a list or a generator."""
    if isinstance(value, list) or (isinstance(value, Iterator) and not isinstance(value, Mapping)):
        yield from map(Inputs.of, value)
    else:
        yield Inputs.of(value)


def read_inputs(text: str) -> object:
    """Return what `--inputs` names: a mapping, a tuple, a tensor, or several of them in a list."""
    if is_function(text):
        return function_at(text)()
    path = Path(text)
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", ".npz", ".pt", ".pth"):
        raise BadModel(f"--inputs {text!r} has a form that is not known; give {FORMS}.")
    if not path.is_file():
        raise BadModel(f"--inputs {text!r} is not a file; give {FORMS}.")
    return _read_npz(path) if suffix == ".npz" else read_tensors(path, "--inputs ")


def bytes_as_ids(prompt: str, *, vocabulary: int = 256) -> torch.Tensor:
    """Return the prompt's UTF-8 bytes as token ids, (1, length); for models that come without a tokenizer."""
    import torch

    if not prompt:
        raise BadModel("--prompt is empty; a model needs at least one token to run on.")
    return torch.tensor([[byte % vocabulary for byte in prompt.encode("utf-8", "surrogateescape")]])


def _read_npz(path: Path) -> object:
    import numpy as np
    import torch

    try:
        # Opened here: numpy leaves the file open when it turns out to be no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:  # of a damaged one, numpy's reader raises whatever comes
        raise BadModel(
            f"--inputs {str(path)!r} is not an .npz file of plain arrays ({first_line(error)}); "
            "objects that need pickle are refused, save numbers."
        ) from error
