"""Write the item of an epoch batch by batch, so that an epoch larger than memory can be saved.

    write_epoch(folder, "epoch_1_000", about, joined(captures), pieces, format="pt")

What comes out is what torch and numpy write of the whole. A `.pt` file is an archive with one member for the bytes of
each tensor, and one with a pickle that says what they are. A piece of one tensor is in memory at a time.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map, tree_map_only

from layerscope.monitor.captures import CapturedOutput, EpochColumn, Held, Pieces, shape_of
from layerscope.monitor.items import Format, array, keyed, member_name
from layerscope.points import Leaf
from layerscope.recorder.tensors import dtype_name
from layerscope.stats import Summary, summarize
from layerscope.store.layouts.files import FileBatch, numpy_dtype, opened, write_json
from layerscope.store.layouts.statistics import described

_FIRST = 10  # values of a tensor that its statistics show
_PROTOCOL = 2  # torch's own
_ALIGNED = 64  # bytes: where torch begins a tensor in the file, so that it can be mapped
# A member's header: fixed part, and what Python adds for sizes beyond 4 GiB.
_HEADER, _LARGE = 30, 20


# What is written ------------------------------------------------------------------------------------


def joined(captures: Sequence[CapturedOutput]) -> Any:
    """Join the outputs of an epoch's batches along dimension 0, tensor by tensor; a list of them where that cannot be.

    A number for each batch (a loss) makes a row of numbers.
    """
    trees = [capture.tree for capture in captures]
    try:
        return tree_map(_column, *trees)
    except ValueError:  # trees of other forms, or a leaf that goes with no other
        return [tree_map_only(Held, lambda held: EpochColumn((held,), held.shape), tree) for tree in trees]


def _column(*leaves: Any) -> Any:
    """Join what is in one place of the outputs; what is no tensor is the same in all of them."""
    first = leaves[0]
    if not isinstance(first, Held) and all(leaf == first for leaf in leaves):
        return first
    kinds = {(leaf.dtype, len(leaf.shape), leaf.shape[1:]) if isinstance(leaf, Held) else None for leaf in leaves}
    if len(kinds) > 1 or None in kinds:
        raise ValueError("tensors that cannot be joined along dimension 0")
    return EpochColumn(leaves, (sum(held.shape[0] if held.shape else 1 for held in leaves), *first.shape[1:]))


def _columns(tree: Any, at: Leaf = ()) -> Iterator[tuple[Leaf, EpochColumn]]:
    """Go through the columns of a tree in order, with the way to each."""
    if isinstance(tree, EpochColumn):
        yield at, tree
    elif isinstance(tree, (tuple, list, dict)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _columns(child, (*at, key))


def _statistics(tree: Any, summaries: Mapping[int, Summary]) -> Any:
    """Return the statistics of each tensor in the structure of the output, as plain numbers."""
    if isinstance(tree, EpochColumn):
        return described(summaries[id(tree)])
    if isinstance(tree, (tuple, list)):
        return [_statistics(child, summaries) for child in tree]
    return {key: _statistics(child, summaries) for key, child in tree.items()} if isinstance(tree, dict) else None


# Files ----------------------------------------------------------------------------------------------


def write_epoch(
    folder: Path, stem: str, about: Mapping[str, Any], output: Any, pieces: Pieces, *, format: Format
) -> Path:
    """Write what is known of an epoch, its output and the statistics of that, whole or not at all; return the file."""
    with FileBatch(folder) as batch:
        if format == "pt":
            name = f"{stem}.pt"
            _write_pt(batch.new(name), about, output, pieces)
            return folder / name
        found = dict(_columns(output))
        name = f"{stem}.npy" if list(found) == [()] else f"{stem}.npz"
        dtypes: Any = {member_name(leaf): dtype_name(column.dtype) for leaf, column in found.items()}
        if () in found:
            dtypes = dtype_name(found[()].dtype)
            with opened(batch.new(name)) as out:
                sums = {id(found[()]): _as_numpy(found[()], pieces, out)}
        else:
            sums = {}
            with opened(batch.new(name)) as out, zipfile.ZipFile(out, "w") as archive:
                for leaf, column in found.items():
                    with _member(archive, f"{member_name(leaf)}.npy") as member:
                        sums[id(column)] = _as_numpy(column, pieces, member)
        write_json(batch.new(f"{stem}.json"), keyed({**about, **_said(output, sums), "dtype": dtypes, "file": name}))
        return folder / name


def _write_pt(path: Path, about: Mapping[str, Any], output: Any, pieces: Pieces) -> None:
    with opened(path) as out, zipfile.ZipFile(out, "w") as archive:
        keys: dict[int, str] = {}
        sums: dict[int, Summary] = {}
        for number, (_, column) in enumerate(_columns(output)):
            keys[id(column)] = str(number)
            with _member(archive, f"archive/data/{number}") as member:
                sums[id(column)] = _poured(column, pieces, member, as_torch=True)
        pickled = io.BytesIO()
        _Pickler(pickled, keys).dump({**about, **_said(output, sums), "output": output})
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/version", "3\n")


def _said(output: Any, sums: Mapping[int, Summary]) -> dict[str, Any]:
    return {"output_shape": shape_of(output), "statistics": _statistics(output, sums)}


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Begin a member whose bytes are aligned in the file."""
    info = zipfile.ZipInfo(name)
    begins = archive.start_dir + _HEADER + len(name.encode()) + _LARGE + 4
    gap = -begins % _ALIGNED
    info.extra = struct.pack("<HH", 0x4246, gap) + b"Z" * gap  # as torch fills it
    return archive.open(info, "w", force_zip64=True)


def _as_numpy(column: EpochColumn, pieces: Pieces, out: IO[bytes]) -> Summary:
    descr = np.dtype(numpy_dtype(dtype_name(column.dtype))).str
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": column.shape})
    return _poured(column, pieces, out, as_torch=False)


def _poured(column: EpochColumn, pieces: Pieces, out: IO[bytes], *, as_torch: bool) -> Summary:
    """Write the values one piece after the other; return their statistics."""
    total: Summary | None = None
    for piece in (piece for held in column.parts for piece in pieces(held)):
        summary = summarize(piece, level="moments")
        # A sum of two tensors has no first values; the pieces of one have the tensor's.
        total = summary if total is None else replace(total + summary, first=(total.first + summary.first)[:_FIRST])
        out.write(piece.view(torch.uint8).numpy().data if as_torch else array(piece).data)
    if total is None:
        total = summarize(torch.empty(0, dtype=column.dtype), level="moments")
    return replace(total, shape=column.shape, tensors=1)


# The pickle inside ----------------------------------------------------------------------------------


class _Storage(NamedTuple):
    """The bytes of one tensor, as a pickle of torch's names them."""

    kind: Any
    key: str
    elements: int


class _Pickler(pickle.Pickler):
    """Writes a column as torch writes the tensor that it stands for."""

    def __init__(self, out: IO[bytes], keys: Mapping[int, str]) -> None:
        super().__init__(out, protocol=_PROTOCOL)
        self._keys = keys

    def persistent_id(self, obj: Any) -> Any:
        """Name the member of the archive that holds the bytes."""
        return ("storage", obj.kind, obj.key, "cpu", obj.elements) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        """Say how the tensor is made of them."""
        if not isinstance(obj, EpochColumn):
            return NotImplemented
        meta = torch.empty(obj.shape, dtype=obj.dtype, device="meta")
        kind, key = _KINDS.get(obj.dtype), self._keys[id(obj)]
        # Dtypes that came to torch after it had given up a class for each are named beside plain bytes.
        storage = _Storage(kind or torch.UntypedStorage, key, meta.numel() if kind else meta.nbytes)
        hooks: OrderedDict[str, Any] = OrderedDict()
        made = (storage, 0, tuple(obj.shape), meta.stride(), False, hooks)
        if kind is None:
            return torch._utils._rebuild_tensor_v3, (*made, obj.dtype)
        return torch._utils._rebuild_tensor_v2, made


_KINDS = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
