"""What a Monitor hands out and saves: mappings of fresh copies, and numbered items.

    Outputs(captures, fetch)[(epoch, batch)]        # a copy of its own, each time
    write_item(folder, "single_epoch_1_000", item, format="pt")

An item is a dict with `epoch, batch_idx, layer, alias, output_shape, output`. `torch.load(..., weights_only=True)` and
`layerscope.open_run` read it. As numpy it is an array (`.npy`, or `.npz` for several) and the rest as JSON beside it.
A whole epoch is written by `streaming.py`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from layerscope.errors import BadText, Unsupported
from layerscope.monitor.captures import CapturedOutput, Fetch
from layerscope.points import Leaf, leaf_text
from layerscope.runtimes.values import leaves
from layerscope.store.layouts.files import FileBatch, numpy_dtype, opened, write_json, write_pt

Format = Literal["pt", "npy"]


@final
class Outputs(Mapping[tuple[int, int], Any]):
    """Outputs by (epoch, batch index), in the order they came; each access reads a fresh copy.

    What did not fit into memory is read from the run when it is asked for.
    """

    def __init__(self, captures: Sequence[CapturedOutput], fetch: Fetch) -> None:
        self._captures = {capture.key: capture for capture in captures}
        self._fetch = fetch

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self._captures[key].output(self._fetch)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._captures)

    def __len__(self) -> int:
        return len(self._captures)

    def __repr__(self) -> str:
        return f"Outputs({', '.join(map(str, self._captures))})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and saved as a dict of the outputs, of the kind that `torch.load(..., weights_only=True)` knows."""
        return OrderedDict, (), None, None, iter(self.items())


# Files ----------------------------------------------------------------------------------------------


def next_number(folder: Path, stem: str) -> int:
    """Return the number behind those of the files that are already there: an earlier run's are never replaced."""
    pattern = re.compile(rf"{re.escape(stem)}_(\d{{3,}})\.(?:pt|npy|npz|json)")
    try:
        found = [int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    except OSError:
        return 0
    return max(found, default=-1) + 1


def write_item(folder: Path, stem: str, item: Mapping[str, Any], *, format: Format) -> Path:
    """Write one item, whole or not at all; return its file."""
    with FileBatch(folder) as batch:
        if format == "pt":
            write_pt(batch.new(f"{stem}.pt"), dict(item))
            return folder / f"{stem}.pt"
        name, dtypes = _write_arrays(batch, stem, item["output"])
        said = {key: value for key, value in item.items() if key != "output"}
        write_json(batch.new(f"{stem}.json"), keyed({**said, "dtype": dtypes, "file": name}))
        return folder / name


def _write_arrays(batch: FileBatch, stem: str, output: Any) -> tuple[str, Any]:
    """Write an output as numpy's files have it; return the file's name and the dtypes the tensors had."""
    if isinstance(output, torch.Tensor):
        with opened(batch.new(f"{stem}.npy")) as out:
            np.save(out, array(output), allow_pickle=False)
        return f"{stem}.npy", _name(output)
    found = {member_name(leaf): tensor for leaf, tensor in leaves(output)}
    with opened(batch.new(f"{stem}.npz")) as out:
        arrays: dict[str, Any] = {key: array(tensor) for key, tensor in found.items()}
        np.savez(out, allow_pickle=False, **arrays)
    return f"{stem}.npz", {key: _name(tensor) for key, tensor in found.items()}


def member_name(leaf: Leaf) -> str:
    """Return what a part of an output is called in an `.npz`."""
    return leaf_text(leaf)[1:-1].replace("][", ".")


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as numpy's files have it: wider where numpy has no such dtype."""
    values: np.ndarray[Any, Any] = tensor.to(getattr(torch, numpy_dtype(_name(tensor)))).numpy()
    return values


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def keyed(value: Any) -> Any:
    """Return a value with the texts for keys that JSON wants."""
    if isinstance(value, Mapping):
        return {str(key): keyed(child) for key, child in value.items()}
    return [keyed(child) for child in value] if isinstance(value, (list, tuple)) else value


# What users save themselves -------------------------------------------------------------------------


def own_path(folder: Path, name: str, *, taken: Path) -> Path:
    """Return where a name lies in a folder; raises ValueError when that is outside it, or in the run."""
    path = (folder / name).resolve()
    if not name or not path.is_relative_to(folder.resolve()) or path == folder.resolve():
        raise BadText(f"{name!r} is not a name inside {folder}; give one such as 'attention_mean.pt'.")
    if path.is_relative_to(taken.resolve()):
        raise BadText(f"{name!r} lies in {taken}, which holds the run; give another name.")
    return path


def write_custom(path: Path, value: Any) -> None:
    """Write a value of the user's: `.npy` as an array, anything else as torch saves it."""
    value = _plain(value)
    with FileBatch(path.parent) as batch:
        beside = batch.new(path.name)
        if path.suffix != ".npy":
            write_pt(beside, value)
            return
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"{path.name} would hold a {type(value).__name__}; a .npy file holds one array")
        with opened(beside) as out:
            np.save(out, array(value), allow_pickle=False)


def _plain(value: Any) -> Any:
    """Return a value as `torch.load(..., weights_only=True)` reads it back: tensors on the CPU, arrays as tensors.

    Raises Unsupported for anything but tensors, arrays, numbers, texts, None, and tuples, lists and dicts of them.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value.item()
        except TypeError:
            raise Unsupported(f"an array of {value.dtype} is not saved; arrays of numbers and booleans are") from None
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, tuple):
        return tuple(_plain(child) for child in value)
    if isinstance(value, list):
        return [_plain(child) for child in value]
    if isinstance(value, Mapping):
        return {_plain(key): _plain(child) for key, child in value.items()}
    raise Unsupported(
        f"a {type(value).__name__} is not saved; tensors, arrays, numbers, texts, tuples, lists and dicts of them are"
    )
