"""Files that are whole or not there: written beside their place, then renamed.

    with Batch(Path("layer_outputs")) as batch:
        summary, dtype = write_npy(batch.new("mode_fp32_layer_0.npy"), entry)

Everything of a batch is renamed at its end, in order; when the block raises, nothing is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, final

from layerscope.errors import Unsupported
from layerscope.store import strictjson
from layerscope.store.address import PARTIAL, sync_directory
from layerscope.store.layouts.arrays import NUMPY
from layerscope.store.run import Entry

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

# Values at a time: 16 MB of float32.
_PIECE = 4 << 20


@final
class FileBatch:
    """New files of one folder, which is made where it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._new: dict[Path, Path] = {}
        self._old: list[Path] = []

    def new(self, name: str) -> Path:
        """Return where to write a file until the batch is over."""
        place = self.folder / name
        self._new[place] = place.with_name(place.name + PARTIAL)
        return self._new[place]

    def forget(self, name: str) -> None:
        """Remove a file at the end of the batch, unless the batch writes it anew."""
        self._old.append(self.folder / name)

    def __enter__(self) -> FileBatch:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._settle()
        finally:
            for beside in self._new.values():
                with contextlib.suppress(OSError):
                    beside.unlink(missing_ok=True)

    def _settle(self) -> None:
        for place, beside in self._new.items():
            beside.replace(place)
        for place in self._old:
            if place not in self._new:
                place.unlink(missing_ok=True)
        sync_directory(self.folder)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write; at the end of the block its bytes are on the disk."""
    with path.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def numpy_dtype(dtype: str) -> str:
    """Return the dtype that stands for one of torch's in numpy's files; raises Unsupported where none does."""
    if dtype in NUMPY:
        return dtype
    if dtype == "complex32":
        return "complex64"
    if dtype == "bfloat16" or dtype.startswith("float8"):
        return "float32"
    raise Unsupported(f"numpy has no dtype for {dtype}, and float32 is not the same thing")


def write_npy(file: Path | IO[bytes], entry: Entry) -> tuple[Summary, str]:
    """Write a record's tensor as `.npy`, piece by piece; return its statistics and the dtype in the file."""
    import numpy as np
    import torch

    assert entry.dtype is not None
    assert entry.shape is not None
    dtype = numpy_dtype(entry.dtype)
    wanted = getattr(torch, dtype)
    with opened(file) if isinstance(file, Path) else contextlib.nullcontext(file) as out:
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": entry.shape}
        np.lib.format.write_array_header_1_0(out, header)
        total: Summary | None = None
        for piece in entry.pieces(_PIECE):
            total = _more(total, piece)
            out.write(piece.to(wanted).contiguous().view(torch.uint8).numpy().data)
    return _stated(entry, total), dtype


def write_pt(path: Path, value: Any) -> None:
    """Save a value as torch does, so that `torch.load` reads it as it is called without arguments."""
    import torch

    with opened(path) as out:
        torch.save(value, out)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write strict JSON, indented; non-finite numbers are named."""
    with opened(path) as out:
        out.write(f"{strictjson.dumps(value, indent=2)}\n".encode())


def _more(total: Summary | None, piece: torch.Tensor) -> Summary:
    from layerscope.stats import summarize

    summary = summarize(piece, level="moments")
    # A sum of two tensors has no first values; of the pieces of one, those of the first are the tensor's.
    return summary if total is None else replace(total + summary, first=total.first)


def _stated(entry: Entry, total: Summary | None) -> Summary:
    if total is None:
        import torch

        total = _more(None, torch.empty(0, dtype=getattr(torch, entry.dtype or "")))
    return replace(total, shape=entry.shape, tensors=1)
