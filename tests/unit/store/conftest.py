"""Writing a small run in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer


def _blob(array: np.ndarray, **kwargs: Any) -> Blob:
    return Blob(str(array.dtype), array.shape, array.nbytes, lambda: array, **kwargs)


def _write(path: Any, records: Iterable[tuple[str, Moment, np.ndarray | None]], **kwargs: Any) -> Writer:
    manifest = kwargs.pop("manifest", Manifest())
    writer = Writer(path, manifest, **kwargs)
    for text, moment, array in records:
        writer.write(Point.parse(text), moment, blob=None if array is None else _blob(array))
    return writer


@pytest.fixture
def blob() -> Callable[..., Blob]:
    """Return a function that makes a Blob of an array."""
    return _blob


@pytest.fixture
def write() -> Callable[..., Writer]:
    """Return a function that writes records (text of a point, moment, array) and returns the open Writer."""
    return _write


@pytest.fixture
def wrong() -> Callable[[Any, int], None]:
    """Return a function that flips one bit of a file."""

    def flip(path: Any, at: int) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 0x10
        path.write_bytes(raw)

    return flip
