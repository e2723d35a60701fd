"""Follow passes over DataLoaders: which batch is under way, and which samples are in it.

    with following(follower):                   # every DataLoader that this thread begins to iterate
        train(model)
    for batch in Followed(loader, follower):    # this one
        ...

The follower hears of each batch before the loop's body does. What a pass yields, and in which order, is unchanged.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch.utils.data import DataLoader

__all__ = ["Followed", "Follower", "Pass", "following"]

# Index lists that may wait between the sampler and the loop: workers fetch a few batches ahead.
_AHEAD = 1 << 14


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a loader: the number of the batch under way, from 0, and its samples where the sampler tells.

    `loader` and `dataset` are weak: called, they give the thing or None.
    """

    loader: Callable[[], Any]
    dataset: Callable[[], Any]
    index: int = -1
    samples: tuple[int, ...] | None = None


class Follower(Protocol):
    """Who wants to know how far a loader is."""

    def yielded(self, under_way: Pass) -> None:
        """Hear that the next batch is about to be handed to the loop."""

    def over(self, ended: Pass) -> None:
        """Hear that the loader has no more batches."""


@final
class Followed:
    """A loader whose passes are followed; everything else is the loader's own."""

    def __init__(self, loader: Any, follower: Follower) -> None:
        self._loader = loader
        self._follower = follower

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._loader, DataLoader) and threading.get_ident() in _followers:
            return iter(self._loader)  # followed already
        return _Following(self._loader, self._follower, iter)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@contextmanager
def following(follower: Follower) -> Iterator[None]:
    """Follow every DataLoader that this thread begins to iterate until the block ends; the innermost block counts."""
    thread = threading.get_ident()
    with _lock:
        if not _Patch.placed:
            _Patch.original, _Patch.placed = DataLoader.__iter__, True
            DataLoader.__iter__ = _iterate  # type: ignore[method-assign, assignment]
        _followers.setdefault(thread, []).append(follower)
    try:
        yield
    finally:
        with _lock:
            _followers[thread].remove(follower)
            if not _followers[thread]:
                del _followers[thread]
            # Somebody who replaced it since then goes on calling ours, which passes everything through.
            if not _followers and DataLoader.__iter__ is _iterate:
                DataLoader.__iter__, _Patch.placed = _Patch.original, False  # type: ignore[method-assign, assignment]


_lock = threading.Lock()
_followers: dict[int, list[Follower]] = {}


class _Patch:
    """What `DataLoader.__iter__` was before the first block, and whether ours is in its place."""

    placed = False
    original: Callable[[Any], Iterator[Any]] = DataLoader.__iter__


def _iterate(loader: Any) -> Iterator[Any]:
    followers = _followers.get(threading.get_ident())
    return _Following(loader, followers[-1], _Patch.original) if followers else _Patch.original(loader)


class _Following:
    """The iterator of one pass; whatever else is asked of it, torch's own iterator answers."""

    def __init__(self, loader: Any, follower: Follower, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._follower = follower
        self._pass = Pass(_weak(loader), _weak(getattr(loader, "dataset", None)))
        self._inner, self._drawn = _begun(loader, begin)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            self._follower.over(self._pass)
            raise
        self._pass.index += 1
        self._pass.samples = None if self._drawn is None else self._drawn.next()
        self._follower.yielded(self._pass)
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a list of batches, None
        return lambda: thing


def _begun(loader: Any, begin: Callable[[Any], Iterator[Any]]) -> tuple[Iterator[Any], _Drawn | None]:
    """Begin a pass with a sampler that remembers what is drawn from it.

    An iterator takes its loader's sampler when it is made, and keeps it; so the loader gets its own back at once.
    """
    word = "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"
    own = getattr(loader, "__dict__", {}).get(word)
    if not isinstance(loader, DataLoader) or own is None or not getattr(loader, "in_order", True):
        return begin(loader), None
    try:
        vars(loader)[word] = _Drawn(own)
        inner = begin(loader)
    finally:
        vars(loader)[word] = own
    # Workers that persist keep the iterator of the first pass, and with it the sampler of that time.
    drawn = getattr(inner, "_index_sampler", None)
    return inner, drawn if isinstance(drawn, _Drawn) else None


class _Drawn:
    """A sampler that keeps what was drawn in the present pass until the batch is there."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._waiting: deque[Any] = deque(maxlen=_AHEAD)

    def __iter__(self) -> Iterator[Any]:
        waiting: deque[Any] = deque(maxlen=_AHEAD)
        self._waiting = waiting
        for indices in self._sampler:
            waiting.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def next(self) -> tuple[int, ...] | None:
        """Return the samples of the batch that has just arrived; None where a sampler gives no numbers."""
        indices: Any = self._waiting.popleft() if self._waiting else None
        try:
            return tuple(int(index) for index in (indices if isinstance(indices, (list, tuple)) else [indices]))
        except (TypeError, ValueError):
            return None
