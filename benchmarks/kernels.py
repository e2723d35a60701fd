"""How fast the kernels read on a GPU: GB/s of one 268 MB tensor.

    PYTHONPATH=src python3 -m benchmarks.gpu --only kernels

The time is the device's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.pairing import judged
from layerscope.stats.device import Slots

BYTES = 268_435_456
LAPS = 5
WANTED = {"moments": 2500.0, "full": 800.0}
MANY = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes that the limits are for


class Speed(NamedTuple):
    """What is to be timed: a call that returns its seconds, how many bytes it reads or writes, how fast it should."""

    what: str
    measure: Callable[[], float]
    amount: int
    wanted: float | None


def report() -> bool:
    """Print the speed of every kernel; return whether all of them ran."""
    print("### kernels, 268 MB\n\n| what | dtype | GB/s | wanted | |\n|---|---|---:|---:|---|", flush=True)
    fine = True
    for dtype in (*MANY, torch.float8_e4m3fn, torch.int8):
        for speed in speeds(dtype):
            try:
                found = speed.amount / speed.measure() / 1e9
                said = f"{found:.0f} | {judged(found, speed.wanted, least=True)}"
            except Exception as error:
                said, fine = f"FAILED {type(error).__name__}: {error} | | ", False
            print(f"| {speed.what} | {str(dtype).removeprefix('torch.')} | {said} |", flush=True)
    print(flush=True)
    return fine


def speeds(dtype: torch.dtype) -> Iterator[Speed]:
    """Go through what is timed of one dtype."""
    x = torch.randn(BYTES // dtype.itemsize, device="cuda").to(dtype)
    y = torch.empty_like(x)
    yield Speed("copy, read and write", lambda: seconds(lambda: y.copy_(x)), 2 * BYTES, None)
    for level, wanted in WANTED.items():
        yield Speed(level, partial(summarising, x, level), BYTES, wanted if dtype in MANY else None)


def summarising(x: torch.Tensor, level: Any) -> float:
    slots = Slots(x.device, level, torch.cuda.current_stream().cuda_stream)
    start = slots.starting(x.dtype)
    took = seconds(lambda: start(0, x.data_ptr(), x.numel()))
    buffer = slots.buffer(1)
    slots.gather(buffer)
    torch.cuda.synchronize()
    return took


def seconds(work: Callable[[], object], *, repeat: int = 20) -> float:
    """Time of one call on the device, calls back to back: the median of several laps."""
    work()
    laps = []
    for _ in range(LAPS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(repeat):
            work()
        ended.record()
        ended.synchronize()
        laps.append(began.elapsed_time(ended) / 1e3 / repeat)
    return statistics.median(laps)
