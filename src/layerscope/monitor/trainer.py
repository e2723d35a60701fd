"""Monitor a training function without changing it.

    train = MonitoredTrainer(monitor).wrap_training_function(train)
    train(config, device)

A function that takes `epoch_callback` and `batch_callback` (by name, or in `**kwargs`) is given them. As long as it
does not call them, nor sets epoch and batch on the Monitor itself, passes over DataLoaders are counted:

- an epoch is a pass over the training loader, which is the first one that is under way when the model is called in
  training mode (some functions make it anew each epoch: another one over the same dataset is the same, and one that
  comes when loader and dataset are gone takes its place);
- a batch is the loader's own, from 0; batches of other loaders in the same epoch are counted on behind it;
- a forward in evaluation mode (`model.eval()`) is not recorded and counts for nothing, whatever loader it is fed from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, final

from layerscope.monitor.loaders import Pass, following
from layerscope.monitor.monitor import Monitor

P = ParamSpec("P")
R = TypeVar("R")


@final
class MonitoredTrainer:
    """Wraps training functions so that a Monitor knows where they are; counted epochs begin with `first_epoch`."""

    def __init__(self, monitor: Monitor, *, first_epoch: int = 1) -> None:
        self.monitor = monitor
        self.first_epoch = first_epoch

    def wrap_training_function(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return the function, monitored: each epoch is saved at its end, and at the end of all the hooks are removed.

        What the function raises goes on. Ctrl-C and SIGTERM save the epoch so far.
        """

        @functools.wraps(fn)
        def monitored(*args: Any, **kwargs: Any) -> R:
            counting = _Counting(self.monitor, self.first_epoch)
            with self.monitor, self.monitor.driven_by(counting), following(counting):
                return fn(*args, **kwargs, **self._callbacks(fn, args, kwargs))

        return monitored

    def _callbacks(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the callbacks that the function takes and the caller has not given."""
        callbacks = {
            "epoch_callback": self.monitor.create_epoch_callback(),
            "batch_callback": self.monitor.create_batch_callback(),
        }
        try:
            signature = inspect.signature(fn)
            given = signature.bind_partial(*args, **kwargs).arguments
        except (TypeError, ValueError):  # a builtin, or a call that will raise by itself
            return {}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
        takes = {name for name, each in signature.parameters.items() if each.kind in by_name}
        known = {*given, *kwargs}
        return {name: each for name, each in callbacks.items() if (anything or name in takes) and name not in known}


@final
class _Counting:
    """Where training is, told from the loaders; gives way to the function as soon as that says it itself."""

    def __init__(self, monitor: Monitor, first_epoch: int) -> None:
        self._monitor = monitor
        self._epoch = first_epoch - 1
        self._epoch_told = self._batch_told = False
        self._speaking = False  # it is this that sets the epoch or the batch
        self._trained = False
        self._current: Pass | None = None
        self._training: Pass | None = None  # over the loader whose passes are the epochs
        self._counted: Pass | None = None  # the pass under way that has been used for training
        self._first_batch = 0  # what the first batch of that pass is numbered
        self._next_batch = 0

    # What the Monitor tells ---------------------------------------------------------------------

    def told(self, *, epoch: bool) -> None:
        """Count no more what the function says by itself."""
        if self._speaking:
            return
        if epoch:
            self._epoch_told, self._counted, self._next_batch = True, None, 0
        else:
            self._batch_told = True

    def forward(self) -> str | None:
        """Set epoch and batch for a forward; return why it does not count."""
        told = self._epoch_told and self._batch_told
        if not self._monitor.model.training:
            return "the model is in evaluation mode" if self._trained or not told else None
        self._trained = True
        under_way = self._current
        if told or under_way is None:
            return None
        if under_way is not self._counted:
            self._begin(under_way)
        if not self._batch_told:
            batch = self._first_batch + under_way.index
            self._next_batch = batch + 1
            if batch != self._monitor.current_batch_idx:
                self._say(self._monitor.set_batch_idx, batch)
        return None

    def _begin(self, under_way: Pass) -> None:
        """Take a pass into account, now that the model is trained in it."""
        self._counted = under_way
        if self._is_training(under_way) and not self._epoch_told:
            self._epoch += 1
            self._next_batch = 0
            self._say(self._monitor.set_epoch, self._epoch)
        self._first_batch = self._next_batch

    def _say(self, word: Callable[[int], None], number: int) -> None:
        self._speaking = True
        try:
            word(number)
        finally:
            self._speaking = False

    def _is_training(self, under_way: Pass) -> bool:
        """Whether a pass is over the training loader: the first one, or its successor when that is gone for good."""
        first, dataset = self._training, under_way.dataset()
        if first is None or (first.loader() is None and first.dataset() is None):
            self._training = under_way
            return True
        return first.loader() is under_way.loader() or (dataset is not None and dataset is first.dataset())

    # What the loaders tell ----------------------------------------------------------------------

    def yielded(self, under_way: Pass) -> None:
        """Remember which batch is under way."""
        self._current = under_way
        self._monitor.note_samples(under_way.samples)

    def over(self, ended: Pass) -> None:
        """Save a counted epoch as soon as its loader has no more batches."""
        if ended is self._counted and not self._epoch_told:
            self._monitor.save_single_outputs()
            self._monitor.save_epoch_outputs()
        self._monitor.note_samples(None)
