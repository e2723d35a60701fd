"""How fast a tensor is summarised: GB/s per dtype, level and engine, against reading and copying the same memory.

One thread. Eight tensors of 2 MB each, so that they are warm in the last-level cache as a layer's output is in a hook;
the reference is a plain read (numpy's sum of the memory as 64-bit integers). Then what one forward of the benchmark
Llama asks for (about 190 tensors, 260 MB of float32), and what a tiny tensor costs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.timing import machine
from layerscope.stats import backend, fingerprint, numpy_engine, prepare, summarize, sweeps
from layerscope.stats.engine import engine

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8", "int32", "int64", "bool", "complex64")
MEGABYTES, TENSORS, ROUNDS = 2, 8, 15


def main() -> int:
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}, numpy {np.__version__}, backend {backend()}\n")
    prepare(*DTYPES)
    print("| dtype | read | copy | moments | full | fingerprint | moments, numpy | full, numpy |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for dtype in DTYPES:
        print(f"| {dtype} | " + " | ".join(f"{speed:.2f}" for speed in speeds(dtype)) + " |", flush=True)
    print("\n(GB/s, medians of interleaved rounds; tensors of normal values)\n")
    whole_forward()
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")
    return 0


def tensors_of(dtype: str) -> list[torch.Tensor]:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    size = (MEGABYTES << 20) // kind.itemsize
    normal = [torch.randn(size, generator=generator) for _ in range(TENSORS)]
    return [(tensor * 40 if not kind.is_floating_point else tensor).to(kind) for tensor in normal]


def speeds(dtype: str) -> list[float]:
    tensors = tensors_of(dtype)
    words = [tensor.view(torch.uint8).numpy().view(np.uint64) for tensor in tensors]
    target = np.empty_like(words[0])
    fast = engine()

    def each(job: Callable[[torch.Tensor], object], counting: object = fast) -> Callable[[], None]:
        def run() -> None:
            using(counting)
            for tensor in tensors:
                job(tensor)

        return run

    jobs: list[Callable[[], object]] = [
        lambda: [word.sum() for word in words],
        lambda: [np.copyto(target, word) for word in words],
        each(lambda tensor: summarize(tensor, level="moments")),
        each(summarize),
        each(fingerprint),
        each(lambda tensor: summarize(tensor, level="moments"), numpy_engine),
        each(summarize, numpy_engine),
    ]
    seconds = interleaved(jobs)
    using(fast)
    size = sum(tensor.nbytes for tensor in tensors)
    return [size / taken / 1e9 for taken in seconds]


def using(counting: object) -> None:
    """Make `summarize` count with one engine or the other."""
    sweeps.engine = lambda: counting  # type: ignore[assignment, return-value]


def interleaved(jobs: list[Callable[[], object]]) -> list[float]:
    """Median seconds of each job, all of them once per round."""
    taken: list[list[float]] = [[] for _ in jobs]
    for turn in range(-2, ROUNDS):
        for job, laps in zip(jobs, taken, strict=True):
            began = time.perf_counter()
            job()
            if turn >= 0:
                laps.append(time.perf_counter() - began)
    return [statistics.median(laps) for laps in taken]


def whole_forward() -> None:
    """Sizes as in 2 x 256 tokens through the benchmark's Llama: hidden 512, intermediate 1376, vocabulary 8000."""
    shapes = [(2, 256, 512)] * 150 + [(2, 256, 1376)] * 36 + [(2, 256, 8000)]
    tensors = [torch.randn(shape) for shape in shapes]
    size = sum(tensor.nbytes for tensor in tensors)
    tiny = torch.randn(16)
    print(f"{len(tensors)} float32 tensors, {size / 1e6:.0f} MB, each touched just before:")
    for level in ("moments", "full"):
        laps, tiny_laps = [], []
        for _ in range(7):
            spent = 0.0
            for tensor in tensors:
                tensor.mul_(1.0)
                began = time.perf_counter()
                summarize(tensor, level=level)
                spent += time.perf_counter() - began
            laps.append(spent)
            began = time.perf_counter()
            for _ in range(200):
                summarize(tiny, level=level)
            tiny_laps.append((time.perf_counter() - began) / 200)
        taken = statistics.median(laps)
        print(
            f"  {level}: {taken * 1e3:.1f} ms, {size / taken / 1e9:.1f} GB/s; "
            f"16 values take {statistics.median(tiny_laps) * 1e6:.1f} us"
        )


if __name__ == "__main__":
    raise SystemExit(main())
