"""A Monitor or a Watch inside Lightning's Trainer.

    monitor = Monitor(module, ["net.0"], [0, 2], "out", batch_indices=[0])
    Trainer(max_epochs=3, callbacks=[MonitorCallback(monitor)]).fit(module, loader)

Epochs and batches are Lightning's own numbers: both count from 0, and go on where a checkpoint was when a run is
resumed from it. Sanity checks, validation and tests pass unrecorded. The indices of a batch's samples are recorded
where the loader's sampler gives them, but for the rest of an epoch that was resumed in its middle. SIGTERM is
Lightning's to handle: it ends the fit after the batch.

    MonitorCallback(partial(watch, rules=[nonfinite(action="stop")]))     # a Watch, of the first optimizer
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from layerscope.errors import MissingExtra
from layerscope.integrations.training_loop import Training, Watcher
from layerscope.monitor.loaders import Pass, following

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtra("this MonitorCallback takes lightning: pip install 'layerscope[lightning]'") from error

if TYPE_CHECKING:
    from layerscope.monitor import Watch


class MonitorCallback(Callback):
    """Tell Monitors and Watches where a Trainer stands; save at each epoch's end, let go at the end."""

    def __init__(self, *watchers: Watcher) -> None:
        super().__init__()
        self._training = Training(*watchers)
        for monitor in self._training.monitors:
            monitor.leave_sigterm_alone()
        self._following = ExitStack()
        self._passes = _Passes()
        self._pass: Pass | None = None  # over the training loader, from its first batch on

    @property
    def watches(self) -> list[Watch]:
        """The Watches: those that were given, then those that were made."""
        return self._training.watches

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Follow the loaders before the first of them is begun."""
        if stage == "fit":
            self._following.enter_context(following(self._passes))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._pass = None
        self._training.start(pl_module, trainer.optimizers[0] if trainer.optimizers else None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Name the batch; Lightning begins no epoch when it goes on in the middle of one."""
        if batch_idx == 0:
            self._pass = self._passes.last(trainer.train_dataloader)
        self._training.batch(
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            within=batch_idx % trainer.accumulate_grad_batches != 0,
            samples=None if self._pass is None else self._pass.of(batch_idx),
        )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Have rules stop before the weights are moved; gradients are not clipped yet."""
        self._training.judge()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Rest until the next batch: a validation may come."""
        self._training.rest()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the epoch, whole or stopped early."""
        self._training.epoch_done()
        self._pass = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the model; the exception goes on."""
        self._following.close()
        self._training.finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the model when the fit is over."""
        if stage == "fit":
            self._following.close()
            self._training.finish()


class _Passes:
    """The pass that last gave a batch, over each loader; Lightning fetches ahead, and validates in between."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Any, Pass] = WeakKeyDictionary()

    def yielded(self, under_way: Pass) -> None:
        loader = under_way.loader()
        if loader is not None:
            self._last[loader] = under_way

    def over(self, ended: Pass) -> None:
        pass

    def last(self, loader: Any) -> Pass | None:
        """Return the last pass over a loader; of several that are combined, a sample's loader is not known."""
        return self._last.get(loader) if isinstance(loader, DataLoader) else None
