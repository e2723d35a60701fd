"""Memory of a device where tensors are put together, so that one launch brings all of them to the host.

    berth = Berths(device).at(0, size, raw, side)     # for the first share of what a step brings on the stream `raw`
    gates.fly_on(launch, ..., carry, ..., berth.told) # a kernel fills it, once it is empty; another empties it beside

On the model's own stream the way to the host would hold up the model. So would the copy engine beside it, which takes
one copy after the other: whatever the model itself fetches, be it one number, would wait for all of ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from layerscope.recorder.copying import undisturbed
from layerscope.recorder.ferrying import CARRIERS
from layerscope.stats.driver import crossing

__all__ = ["Berth", "Berths"]

_PAGE = 2 << 20  # bytes, in units of which torch gives memory of a device


class Berth(NamedTuple):
    """Room for one share on a stream, and what `native/` is told of it."""

    memory: torch.Tensor
    address: int
    raw: int
    events: tuple[torch.cuda.Event, torch.cuda.Event]  # it is filled, it has left
    told: tuple[int, ...]  # the driver's functions, the streams, the events, the address, programs that empty it


class Berths:
    """The berths of one recording on one device, got when they are first needed.

    `share` is how many bytes are put together, at most. No tensor that waits has more than an eighth of that, so that
    five shares are the most that a step brings.
    """

    share = 16 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._berths: list[Berth] = []

    def at(self, number: int, size: int, raw: int, side: torch.cuda.Stream) -> Berth:
        """Return the berth of a share on the current stream, which `raw` is; `side` is what brings it to the host."""
        known = self._berths[number] if number < len(self._berths) else None
        if known is not None and known.raw == raw and known.memory.numel() >= size:
            return known
        with undisturbed():
            memory = torch.empty(-(-size // _PAGE) * _PAGE, dtype=torch.uint8, device=self._device)
            memory.record_stream(side)  # whoever has this memory next waits for our copies, whenever we let go of it
        filled, left = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream(self._device)
        filled.record(here)  # which makes them
        left.record(here)
        address = memory.data_ptr()
        told = *crossing(), raw, side.cuda_stream, filled.cuda_event, left.cuda_event, address, CARRIERS
        made = Berth(memory, address, raw, (filled, left), told)
        self._berths[number : number + 1] = [made]
        return made
