"""Run a model on the side, and leave no trace of it: random state and buffers are put back.

with kept(model):
    model(**inputs)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept"]


@contextmanager
def kept(model: torch.nn.Module | None) -> Iterator[None]:
    """Put back the random state and the model's buffers when the block ends."""
    buffers = [] if model is None else [buffer for buffer in model.buffers() if not buffer.is_meta]
    before = [buffer.detach().clone() for buffer in buffers]
    devices = {buffer.device for buffer in [*buffers, *(() if model is None else model.parameters())]}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
