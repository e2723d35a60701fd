"""Take values from an accelerator without making the model wait for it.

    arrive = arriving(tensor, host)          # the copy is on its way; arrive() waits for it
    later = Statistics().of(tensor)          # launched on the device; later() gives the Summary

Nothing in a hook synchronises. A tensor is cloned on the model's own stream, so that a later in-place operation cannot
reach what is recorded, and the clone travels to pinned memory on a side stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerscope.stats import Summary, summarize

__all__ = ["Statistics", "arriving"]

_streams: dict[torch.device, torch.cuda.Stream] = {}


def arriving(tensor: torch.Tensor, host: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start an asynchronous copy to pinned memory; the call that is returned waits for it.

    Only the clone is read by the side stream, and `record_stream` keeps its memory until then.
    """
    if tensor.device.type != "cuda":
        host.copy_(tensor)
        return lambda: host
    stream = _streams.get(tensor.device)
    if stream is None:
        stream = _streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]
    snapshot = tensor.clone(memory_format=torch.contiguous_format)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host.copy_(snapshot, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(stream)
    snapshot.record_stream(stream)

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return host

    return wait


class Statistics:
    """Summaries of tensors on an accelerator, made without waiting for it."""

    def of(self, tensor: torch.Tensor, *, level: str = "full") -> Callable[[], Summary]:
        """Start the reduction of a plain tensor; the call that is returned waits for the numbers."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        arrive = arriving(tensor, host)
        return lambda: summarize(arrive(), level=level)  # type: ignore[arg-type]

    def fetch(self) -> None:
        """Send for the numbers of everything started so far, in one transfer; called at the end of a step."""
