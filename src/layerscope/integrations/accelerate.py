"""A Monitor or a Watch in a plain loop with Accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with Monitor(accelerator.unwrap_model(model), ["layers.0"], [0, 2], "out", batch_indices=[0]) as monitor:
        for epoch in range(3):
            for batch in batches(loader, monitor, epoch=epoch):
                with accelerator.accumulate(model):
                    ...

`unwrap_model` gives the plain model, and so the plain model's names; its modules are those that the prepared one calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from layerscope.errors import MissingExtra
from layerscope.integrations.training_loop import Training, samples_of

try:
    from accelerate.state import GradientState
except ImportError as error:
    raise MissingExtra("this takes accelerate: pip install 'layerscope[accelerate]'") from error

if TYPE_CHECKING:
    from layerscope.monitor import Monitor, Watch

Batch = TypeVar("Batch")


def batches(loader: Iterable[Batch], *watchers: Monitor | Watch, epoch: int) -> Iterator[Batch]:
    """Yield the batches of an epoch, each named before it is handed out; the epoch is saved when the loop ends.

    What `accelerate.skip_first_batches` skipped counts, so that a resumed epoch goes on with the right number. The
    sample indices are recorded where the loader's sampler gives them. Between one epoch and the next nothing is.
    """
    training = Training(*watchers)
    gradients = GradientState()
    skipped = _skipped(loader)
    with samples_of(loader) as drawn:
        try:
            for number, batch in enumerate(loader):
                training.batch(
                    epoch=epoch,
                    batch=skipped + number,
                    within=not gradients.sync_gradients,
                    samples=None if drawn is None else drawn.of(number),
                )
                yield batch
        finally:
            training.epoch_done()


def _skipped(loader: object) -> int:
    places = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    return max(int(getattr(place, "skip_batches", 0)) for place in places)
