"""Capture what is wanted of a tensor in the hook that sees it, before the model can change it.

    taken = capture.take(shared, tensor, want)                    # its values, its summary, or both

On the CPU the values are read here. On a GPU copies and reductions are started here, on the model's own stream:
whatever the model does next comes after them. Nothing is read later, and no sight of a tensor stands for another: torch
counts changes in place, but not those of `.data`, numpy or a kernel of one's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from layerscope.errors import Unsupported
from layerscope.log import log
from layerscope.recorder.gpu.staging import SMALL, Staging
from layerscope.recorder.gpu.statistics import DeviceStatistics
from layerscope.recorder.gpu.transfer import is_capturing, transfer_of
from layerscope.recorder.host_memory import Arena, same_bits
from layerscope.recorder.taps import TapPlan, Want
from layerscope.recorder.tensors import dtype_name, plain, undisturbed
from layerscope.stats import Summary, backend, prepare, summarize
from layerscope.stats.tensor_views import lying
from layerscope.store import Blob

_inference_mode = torch.is_inference_mode_enabled


class Taken(NamedTuple):
    """What was taken of one tensor, in one hook; copy and summary may still have to arrive from a device."""

    copy: Callable[[], torch.Tensor] | None = None  # for a run in memory
    blob: Blob | None = None  # on its way to disk
    summary: Summary | Callable[[], Summary] | None = None
    note: Mapping[str, str] | None = None


class Shared(NamedTuple):
    """A copy in memory that other points may share, and what else was taken with it."""

    tensor: weakref.ref[torch.Tensor]
    want: Want
    taken: Taken

    def holds(self, tensor: torch.Tensor, want: Want) -> bool:
        """Whether all that is wanted of a tensor on the CPU is here: the same object, which still has the same bits."""
        had, copy = self.want, self.taken.copy
        counted = had.summary and had.level in ("full", want.level) and want.axis in (None, had.axis)
        return (
            self.tensor() is tensor and (counted or not want.summary) and copy is not None and same_bits(copy(), tensor)
        )


class Capture:
    """The copies and statistics of one recording: copies that stay in memory, or pass through to the disk."""

    def __init__(self, *, in_memory: bool, budget: int) -> None:
        self._in_memory = in_memory
        self._arena = Arena(budget=None if in_memory else budget)
        self._devices = DeviceStatistics()
        self._staging = Staging(self._devices)

    def prepare(self, parameters: list[torch.Tensor], plan: TapPlan) -> str | None:
        """Have the kernels ready before the first hook; return which they are, None when no statistics are wanted."""
        on_device = [p for p in parameters if p.device.type != "cpu"]
        if any(p.is_cuda for p in on_device):
            if is_capturing():
                raise Unsupported(
                    "a recording cannot begin while a CUDA graph is captured: it gets memory, which no capture bears; "
                    "begin it before the capture"
                )
            for device in {p.device for p in on_device if p.is_cuda}:
                transfer_of(device).prepare()
        if on_device:
            level = plan.default.level if plan.counts else None
            self._devices.prepare(on_device, level=level, channels=plan.counts_channels)
        elif plan.counts:
            prepare(*_dtypes(parameters), channels=plan.counts_channels)
        return (self._devices.kernels if on_device else backend()) if plan.counts else None

    def end_step(self) -> None:
        """Send what the step has left to the host: what is waited for from now on leaves at once."""
        try:
            self._staging.send()
            self._devices.end_step()
        except Exception as error:  # the reader of the values gets the error
            log.warning("after a step: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Have everything leave, and give the memory on devices back."""
        self._staging.close()
        self._devices.close()

    def take(self, shared: dict[int, Shared], tensor: torch.Tensor, want: Want) -> Taken:
        """Take what is wanted of a tensor; `shared` are the copies of this step.

        A tensor on the CPU that another point saw in this step, and that has the same bits still, shares its copy in
        memory: an output is often the next module's input.
        """
        if not tensor.is_cpu:
            return self._staged(tensor, want) or self._taken(tensor, want)
        if not (self._in_memory and want.tensor):
            return self._taken(tensor, want)
        known = shared.get(id(tensor))
        if known is None or not known.holds(tensor, want):
            known = shared[id(tensor)] = Shared(weakref.ref(tensor), want, self._taken(tensor, want))
        return known.taken

    def _staged(self, tensor: torch.Tensor, want: Want) -> Taken | None:
        """Copy a small tensor on the GPU it lies on; None of any other."""
        staged = self._staging.stage(tensor, want) if tensor.is_cuda else None
        if staged is None:
            return None
        summary = staged.summary if want.summary else None
        return self._kept(tensor, staged.tensor, summary) if want.tensor else Taken(summary=summary)

    def _taken(self, tensor: torch.Tensor, want: Want) -> Taken:
        if _inference_mode():  # whose tensors cannot be trained on afterwards
            with undisturbed():
                return self._taken(tensor, want)
        if tensor.is_cuda and not want.tensor and want.axis is None:
            started = self._devices.start(tensor, want.level)
            if started is not None:
                return Taken(summary=started)
        note: Mapping[str, str] = {}
        if want.tensor or lying(tensor) is None:
            tensor, note = plain(tensor)
            if tensor.nbytes <= SMALL and (staged := self._staged(tensor.contiguous(), want)) is not None:
                return staged._replace(note=note or None)
        summary: Summary | Callable[[], Summary] | None = None
        if want.summary and tensor.is_cpu:
            summary = summarize(tensor, level=want.level, channels=want.axis)
        elif want.summary:
            summary = self._devices.of(tensor, level=want.level, channels=want.axis)
        if not want.tensor:
            return Taken(summary=summary, note=note or None)
        return self._kept(tensor, self._arena.copy(tensor), summary, note or None)

    def _kept(
        self,
        tensor: torch.Tensor,
        copy: Callable[[], torch.Tensor],
        summary: Summary | Callable[[], Summary] | None,
        note: Mapping[str, str] | None = None,
    ) -> Taken:
        if self._in_memory:
            return Taken(copy, None, summary, note)
        blob = Blob(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes, partial(_octets, copy))
        return Taken(None, blob, summary, note)


def _octets(copy: Callable[[], torch.Tensor]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return copy().reshape(-1).view(torch.uint8).numpy()


def _dtypes(parameters: list[torch.Tensor]) -> set[str]:
    """Return the dtypes that tensors of a model on the CPU are likely to have."""
    usual = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    found = {p.dtype for p in parameters if p.device.type == "cpu"} & usual
    return {dtype_name(dtype) for dtype in found or {torch.float32}}
