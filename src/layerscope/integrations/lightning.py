"""A Monitor or a Watch inside Lightning's Trainer.

    monitor = Monitor(module, ["net.0"], [0, 2], "out", batch_indices=[0])
    Trainer(max_epochs=3, callbacks=[MonitorCallback(monitor)]).fit(module, loader)

Epochs and batches are Lightning's own numbers: both count from 0, and go on where a checkpoint was when a run is
resumed from it. Sanity checks, validation and tests pass unrecorded.

    MonitorCallback(partial(watch, rules=[nonfinite(action="stop")]))     # a Watch, of the first optimizer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerscope.errors import MissingExtra
from layerscope.integrations.progress import Progress, Watcher

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtra("this MonitorCallback takes lightning: pip install 'layerscope[lightning]'") from error

if TYPE_CHECKING:
    from layerscope.monitor import Watch

__all__ = ["MonitorCallback"]


class MonitorCallback(Callback):
    """Tell Monitors and Watches where a Trainer stands; save at each epoch's end, let go at the end."""

    def __init__(self, *watchers: Watcher) -> None:
        super().__init__()
        self._progress = Progress(*watchers)

    @property
    def watches(self) -> list[Watch]:
        """The Watches: those that were given, then those that were made."""
        return self._progress.watches

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._progress.start(pl_module, trainer.optimizers[0] if trainer.optimizers else None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Name the batch; Lightning begins no epoch when it goes on in the middle of one."""
        within = batch_idx % trainer.accumulate_grad_batches != 0
        self._progress.batch(epoch=trainer.current_epoch, batch=batch_idx, step=trainer.global_step, within=within)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Rest until the next batch: a validation may come."""
        self._progress.rest()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the epoch, whole or stopped early."""
        self._progress.epoch_done()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the model; the exception goes on."""
        self._progress.finish(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the model when the fit is over."""
        if stage == "fit":
            self._progress.finish()
