"""A Monitor or a Watch inside transformers' Trainer.

    monitor = Monitor(model, ["model.layers.0"], [0, 2], "out", batch_indices=[0])
    with MonitorCallback(monitor) as callback:
        Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

Epochs count from 0. A batch is one of the loader's: with gradient accumulation, several make one optimizer step.
Evaluations pass unrecorded, and a run that is resumed from a checkpoint goes on where it was. The indices of a batch's
samples are recorded where the loader's sampler gives them. The Trainer tells its callbacks when it has ended, but not
when it has failed; the `with` block ends the watching either way. Without it, what a Monitor saw is saved when the
process ends, when the model goes, or when the next training begins.

    MonitorCallback(partial(watch, rules=[nonfinite(action="stop")]))     # a Watch, made of the Trainer's optimizer
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from layerscope.errors import MissingExtra
from layerscope.integrations.training_loop import Training, Watcher, samples_of

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise MissingExtra("this MonitorCallback takes transformers: pip install 'layerscope[hf]'") from error

if TYPE_CHECKING:
    from layerscope.monitor import Watch
    from layerscope.monitor.loaders import Drawn


class MonitorCallback(TrainerCallback):
    """Tell Monitors and Watches where a Trainer stands; save at each epoch's end, let go at the end."""

    def __init__(self, *watchers: Watcher) -> None:
        self._training = Training(*watchers)
        self._epoch = 0
        self._batch = 0
        self._loader = ExitStack()  # with its sampler as it was
        self._drawn: Drawn | None = None

    @property
    def watches(self) -> list[Watch]:
        """The Watches: those that were given, then those that were made."""
        return self._training.watches

    def __enter__(self) -> MonitorCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.close()
        self._training.finish(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Begin where the Trainer begins: at the start, or behind a checkpoint."""
        self._epoch, self._batch = _first_batch(args, state, said["train_dataloader"])
        self._loader.close()
        self._drawn = self._loader.enter_context(samples_of(said["train_dataloader"]))
        self._training.start(said["model"], said["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Name the first batch of an optimizer step."""
        self._name_batch(state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Name the next batch of the same optimizer step: no evaluation comes in between."""
        self._batch += 1
        self._name_batch(state, within=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Rest until the next step: an evaluation may come."""
        self._batch += 1
        self._training.rest()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Save the epoch, whole or stopped early."""
        self._training.epoch_done()
        self._epoch, self._batch = self._epoch + 1, 0

    def on_train_end(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        """Let go of the model."""
        self._loader.close()
        self._training.finish()

    def _name_batch(self, state: Any, *, within: bool = False) -> None:
        samples = None if self._drawn is None else self._drawn.of(self._batch)
        self._training.batch(
            epoch=self._epoch, batch=self._batch, step=state.global_step, within=within, samples=samples
        )


def _first_batch(args: Any, state: Any, loader: Any) -> tuple[int, int]:
    """Return the epoch and batch that a Trainer goes on with after `state.global_step` optimizer steps."""
    together = args.gradient_accumulation_steps
    try:
        steps = max(1, -(-len(loader) // together))
    except TypeError:  # a stream without a length is one epoch
        steps = state.max_steps
    epoch, done = divmod(state.global_step, steps)
    return epoch, 0 if args.ignore_data_skip else done * together
