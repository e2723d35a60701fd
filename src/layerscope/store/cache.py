"""A folder of this user's for what can be made anew: comparisons that a live page made, calibrated scales."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder, None when there is no place for one."""
    for place in _places():
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a shared temporary folder another user could have put files there.
            if os.access(place, os.W_OK) and place.stat().st_uid == os.getuid():
                return place
        except OSError:
            continue
    return None


def _places() -> Iterator[Path]:
    own = os.environ.get("LAYERSCOPE_CACHE")
    if own:
        yield Path(own)
        return
    with contextlib.suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerscope"
    yield Path(tempfile.gettempdir()) / f"layerscope-{os.getuid()}"
