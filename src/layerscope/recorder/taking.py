"""Take what is wanted of a tensor in the hook that sees it, before the model can change it.

    look = taking.look(step.looks, tensor, wish)                    # its copy, its summary, or both

On the CPU the values are read here. On an accelerator copies and reductions are started here, on the model's own
stream: whatever the model does next comes after them. Nothing is read later, and no sight of a tensor stands for
another: torch counts changes in place, but not those of `.data`, numpy or a kernel of one's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from layerscope.errors import Unsupported
from layerscope.log import log
from layerscope.recorder.copying import Arena, Pool, dtype_name, plain, same_bits
from layerscope.recorder.devices import Statistics
from layerscope.recorder.lanes import is_capturing, lane_of
from layerscope.recorder.staging import Staged, Staging
from layerscope.recorder.taps import Plan, Wish
from layerscope.stats import Summary, backend, prepare, summarize
from layerscope.stats.tensor_views import lying
from layerscope.store import Blob

__all__ = ["Look", "Taking"]


class Look:
    """What was taken of one tensor, in one hook."""

    __slots__ = ("blob", "copy", "note", "summary", "taken", "tensor")

    def __init__(self) -> None:
        self.tensor: weakref.ref[torch.Tensor] | None = None
        self.copy: Callable[[], torch.Tensor] | None = None  # in memory
        self.blob: Blob | None = None  # on its way to disk
        self.summary: Summary | Callable[[], Summary] | None = None
        self.taken: Wish | None = None  # with the statistics that were taken
        self.note: Mapping[str, str] | None = None

    def holds(self, tensor: torch.Tensor, wish: Wish) -> bool:
        """Whether all that is wanted of a tensor on the CPU is here: the same object, which still has the same bits."""
        if self.tensor is None or self.tensor() is not tensor or self.copy is None:
            return False
        taken = self.taken
        counted = taken is not None and taken.level in ("full", wish.level) and wish.axis in (None, taken.axis)
        return (not wish.summary or counted) and same_bits(self.copy(), tensor)


class Taking:
    """The copies and statistics of one recording."""

    def __init__(self, *, in_memory: bool, budget: int) -> None:
        self._in_memory = in_memory
        self._arena = Arena()
        self._pool = Pool(budget)
        self._devices = Statistics()
        self.staging = Staging(self._devices)

    def prepare(self, parameters: list[torch.Tensor], plan: Plan) -> str | None:
        """Have the kernels ready before the first hook; return which they are, None when no statistics are wanted."""
        on_device = [p for p in parameters if p.device.type != "cpu"]
        if any(p.is_cuda for p in on_device):
            if is_capturing():
                raise Unsupported(
                    "a recording cannot begin while a CUDA graph is captured: it gets memory, which no capture bears; "
                    "begin it before the capture"
                )
            for device in {p.device for p in on_device if p.is_cuda}:
                lane_of(device).prepare()
        if on_device:
            level = plan.default.level if plan.counts else None
            self._devices.prepare(on_device, level=level, channels=plan.counts_channels)
        elif plan.counts:
            prepare(*_dtypes(parameters), channels=plan.counts_channels)
        return (self._devices.kernels if on_device else backend()) if plan.counts else None

    def end(self) -> None:
        """End a step: what is waited for from now on leaves at once."""
        try:
            self.staging.send()
            self._devices.fetch()
        except Exception as error:  # whoever waits for the values is told
            log.warning("after a step: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Have everything leave, and give the memory on devices back."""
        self.staging.close()
        self._devices.close()

    def look(self, looks: dict[int, Look], tensor: torch.Tensor, wish: Wish) -> Look:
        """Take what is wanted of a tensor.

        A tensor on the CPU that another point saw in this step, and that has the same bits still, shares its copy in
        memory: an output is often the next module's input.
        """
        shares = self._in_memory and wish.tensor and tensor.is_cpu
        if shares and (known := looks.get(id(tensor))) is not None and known.holds(tensor, wish):
            return known
        look = Look()
        self._take(look, tensor, wish)
        if shares:
            look.tensor = weakref.ref(tensor)
            looks[id(tensor)] = look
        return look

    def _take(self, look: Look, tensor: torch.Tensor, wish: Wish) -> None:
        if tensor.is_cuda and (staged := self.staging.stage(tensor, wish)) is not None:
            if wish.summary:
                look.summary = staged.summary
            if wish.tensor and self._in_memory:
                look.copy = staged.tensor
            elif wish.tensor:
                look.blob = Blob(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes, partial(_octets, staged))
            return
        if not wish.tensor and tensor.is_cuda and wish.axis is None:
            look.summary = self._devices.start(tensor, wish.level)
            if look.summary is not None:
                return
        if wish.tensor or lying(tensor) is None:
            values, said = plain(tensor)
            look.note = said or None
        else:
            values = tensor
        if wish.summary:
            if values.is_cpu:
                look.summary = summarize(values, level=wish.level, channels=wish.axis)
            else:
                early = None if wish.axis is not None else self._devices.start(values, wish.level)
                look.summary = early or self._devices.of(values, level=wish.level, channels=wish.axis)
            look.taken = wish
        if wish.tensor and self._in_memory:
            look.copy = self._arena.copy(values)
        elif wish.tensor:
            lease = self._pool.copy(values)
            look.blob = Blob(dtype_name(values.dtype), tuple(values.shape), values.nbytes, lease.data, lease.release)


def _octets(staged: Staged) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return staged.tensor().reshape(-1).view(torch.uint8).numpy()


def _dtypes(parameters: list[torch.Tensor]) -> set[str]:
    """Return the dtypes that tensors of a model on the CPU are likely to have."""
    usual = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    found = {p.dtype for p in parameters if p.device.type == "cpu"} & usual
    return {dtype_name(dtype) for dtype in found or {torch.float32}}
