"""Where training stands, told to Monitors and Watches.

training = Training(monitor)               # nothing is recorded from here on ...
training.start(model, optimizer)
training.batch(epoch=0, batch=3, step=3)   # ... but the batches that are named, as they are named
samples_of(loader)                         # which samples are in each of its batches, while the block lasts
training.rest()                            # what follows is no training: an evaluation
training.epoch_done()
training.finish()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from layerscope.monitor import Monitor, Watch
from layerscope.monitor.loaders import Drawn, remembering

if TYPE_CHECKING:
    import torch

Watcher: TypeAlias = "Monitor | Watch | Callable[[torch.nn.Module, torch.optim.Optimizer], Watch]"


class Training:
    """The one who counts is the training loop; this passes on what it says.

    A Monitor is let go of at the end. A Watch that is given is the caller's, who begins and ends it. One that is made
    by a function of the model and its optimizer, as `watch` is, begins at the start and ends at the end.
    """

    def __init__(self, *watchers: Watcher) -> None:
        odd = [one for one in watchers if not isinstance(one, Monitor | Watch) and not callable(one)]
        if odd or not watchers:
            given = ", ".join(type(one).__name__ for one in odd) or "nothing"
            raise TypeError(f"give a Monitor, a Watch, or a function that makes a Watch such as `watch`, not {given}.")
        self.monitors = [one for one in watchers if isinstance(one, Monitor)]
        self.watches = [one for one in watchers if isinstance(one, Watch)]
        self._makers = [one for one in watchers if not isinstance(one, Monitor | Watch)]
        self._own: list[Watch] = []
        self._epoch: int | None = None
        self.rest()

    def start(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Begin anew, with what is trained and what trains it."""
        self._epoch = None
        while self._makers:
            watch = self._makers.pop()(model, optimizer)
            self._own.append(watch.__enter__())
            self.watches.append(watch)
        self.rest()

    def batch(
        self,
        *,
        epoch: int,
        batch: int,
        step: int | None = None,
        within: bool = False,
        samples: Iterable[int] | None = None,
    ) -> None:
        """Name the batch that is about to be trained on, and the samples in it where they are known.

        A Watch is told of steps of the optimizer: `step` is the number of this one, and `within` says that it has begun
        with an earlier batch.
        """
        for monitor in self.monitors:
            if epoch != self._epoch:
                monitor.set_epoch(epoch)
            monitor.note_samples(samples)
            monitor.set_batch_idx(batch)
        for watch in self.watches:
            if not within or epoch != self._epoch:
                watch.moment(epoch=epoch, step=step, batch=batch)
            watch.resume()
        self._epoch = epoch

    def judge(self) -> None:
        """Have the rules that say stop look, before the optimizer takes its step; raises Stopped."""
        for watch in self.watches:
            watch.judge()

    def rest(self) -> None:
        """Let pass what is not training."""
        for monitor in self.monitors:
            monitor.pause()
        for watch in self.watches:
            watch.pause()

    def epoch_done(self) -> None:
        """Save what the epoch left."""
        self.rest()
        for monitor in self.monitors:
            monitor.save_single_outputs()
            monitor.save_epoch_outputs()
        for watch in self.watches:
            watch.flush()

    def finish(self, error: BaseException | None = None) -> None:
        """Let go of the model, once and for all."""
        for monitor in self.monitors:
            monitor.remove_hooks()
        while self._own:
            watch = self._own.pop()
            watch.__exit__(
                None if error is None else type(error), error, None if error is None else error.__traceback__
            )


def samples_of(loader: Any) -> AbstractContextManager[Drawn | None]:
    """Have a loader's sampler remember what is drawn, until the block ends; None where it cannot be known.

    Accelerate keeps torch's loader inside its own; its dispatcher draws on one process for all of them.
    """
    if any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__):
        return nullcontext()
    return remembering(getattr(loader, "base_dataloader", loader))
