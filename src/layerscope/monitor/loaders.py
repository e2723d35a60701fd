"""Follow passes over DataLoaders: which batch is under way, and which samples are in it.

    with following(follower):                   # every DataLoader that this thread begins to iterate
        train(model)
    for batch in Followed(loader, follower):    # this one
        ...
    with remembering(loader) as drawn:          # for a loop that counts the batches itself
        drawn.of(3)

The follower hears of each batch before the loop's body does. What a pass yields, and in which order, is unchanged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch.utils.data import DataLoader

# Index lists that are remembered between the sampler and the loop: workers and training loops fetch batches ahead.
_AHEAD = 1 << 10


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a loader: the number of the batch under way, from 0, and its samples where the sampler tells.

    `loader` and `dataset` are weak: called, they give the thing or None.
    """

    loader: Callable[[], Any]
    dataset: Callable[[], Any]
    drawn: Drawn | None = None
    index: int = -1

    @property
    def samples(self) -> tuple[int, ...] | None:
        """Those in the batch that was yielded last."""
        return self.of(self.index)

    def of(self, batch: int) -> tuple[int, ...] | None:
        """Return the samples in a batch of the pass; None where they are not known."""
        return None if self.drawn is None else self.drawn.of(batch)


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
            # What replaced it since then goes on calling ours, which passes everything through.
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
        self._inner, drawn = _begun(loader, begin)
        self._pass = Pass(_weak(loader), _weak(getattr(loader, "dataset", None)), drawn)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            self._follower.over(self._pass)
            raise
        self._pass.index += 1
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


def _begun(loader: Any, begin: Callable[[Any], Iterator[Any]]) -> tuple[Iterator[Any], Drawn | None]:
    """Begin a pass with a sampler that remembers; an iterator keeps the sampler that it finds when it is made."""
    with remembering(loader):
        inner = begin(loader)
    # Workers that persist keep the iterator of the first pass, and with it the sampler of that time.
    sampler = getattr(inner, "_index_sampler", None)
    return inner, sampler.drawn if isinstance(sampler, _Remembering) else None


@contextmanager
def remembering(loader: Any) -> Iterator[Drawn | None]:
    """Have a DataLoader's sampler remember what is drawn in passes that begin inside the block.

    None where there is no sampler, or where workers may hand over batches in another order than it gave them.
    """
    word = "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"
    own = getattr(loader, "__dict__", {}).get(word)
    if not isinstance(loader, DataLoader) or own is None or not getattr(loader, "in_order", True):
        yield None
        return
    if isinstance(own, _Remembering):
        yield own.drawn
        return
    vars(loader)[word] = sampler = _Remembering(own)
    try:
        yield sampler.drawn
    finally:
        vars(loader)[word] = own


@final
class Drawn:
    """What was drawn from a sampler in its last pass, by the number of the batch; it does not keep the sampler."""

    def __init__(self) -> None:
        self.batches: dict[int, Any] = {}

    def of(self, batch: int) -> tuple[int, ...] | None:
        """Return the samples of a batch, from 0; None where the sampler gives no numbers, or it is long ago."""
        indices: Any = self.batches.get(batch)
        try:
            return tuple(int(index) for index in (indices if isinstance(indices, (list, tuple)) else [indices]))
        except (TypeError, ValueError):
            return None


class _Remembering:
    """A sampler that takes down what is drawn from it."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn = Drawn()

    def __iter__(self) -> Iterator[Any]:
        batches: dict[int, Any] = {}
        self.drawn.batches = batches
        for number, indices in enumerate(self._sampler):
            batches[number] = indices
            batches.pop(number - _AHEAD, None)
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
