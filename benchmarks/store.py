"""How fast a run is written and read, against moving the same bytes with plain system calls.

    python -m benchmarks.store [folder]          # default /dev/shm, which shows the format's cost and not the disk's

Writing: `Writer` (background thread, crc32c, journal, seal) from the first record to the closed run, against `os.write`
of the same buffers into one file; once with bytes that are still in the processor's cache, as a recorder that keeps up
has them, and once with bytes that waited in a long queue. Reading: `Run.tensor` (crc32c verified) against `os.pread` of
the same stretches; once into memory of each tensor's own, which is what a caller gets and keeps (16 at a time), and
once dropping each tensor, against one buffer read into again and again, which never leaves the cache.

CPU time of all threads. Rounds are interleaved in one process; medians of the ratios within a round, and their range.
Every file is removed as soon as its time is taken, so that each way gets the pages the one before gave back: on a
virtual machine, pages that were free for a while may have to be fetched from the host first.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run

ROUNDS = 9

# What is measured, and what it is set against.
PAIRS = {
    "write, in cache": "write raw, in cache",
    "write, queued": "write raw, queued",
    "read, kept": "read raw, kept",
    "read, dropped": "read raw, one buffer",
}


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()  # in memory nothing is waited for, and nobody beside counts
    work()
    return time.process_time() - start


def measure(folder: Path, *, size: int, count: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return seconds per round for each way of moving `count` tensors of `size` bytes."""
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    queued = [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]
    # No two are equal, or they would be stored once; a batch of small ones is a MiB.
    in_cache = (queued[: 1 + 2 * (1 << 20) // size] * count)[:count]
    points = [Point(f"model.layers.{n}") for n in range(count)]
    shape = (size // 2048, 1024)
    raw, path, buffer = folder / "raw", folder / "run", np.empty(size, np.uint8)

    def stamped(n: int, each: np.ndarray) -> np.ndarray:
        each[:8] = np.frombuffer(n.to_bytes(8, "little"), np.uint8)
        return each

    def write_raw(data: list[np.ndarray]) -> None:
        fd = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for n, each in enumerate(data):
            os.write(fd, stamped(n, each))
        os.fsync(fd)
        os.close(fd)

    def write_run(data: list[np.ndarray]) -> None:
        writer = Writer(path, Manifest())
        for n, (point, each) in enumerate(zip(points, data, strict=True)):
            writer.write(point, Moment(), blob=Blob("bfloat16", shape, size, partial(stamped, n, each)))
        assert writer.close().records == count

    def remove() -> None:
        raw.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def read_raw(keep: int) -> None:
        fd = os.open(raw, os.O_RDONLY)
        kept = deque(maxlen=keep)
        for n in range(count):
            if keep:
                kept.append(os.pread(fd, size, n * size))
            else:
                os.preadv(fd, [buffer], n * size)
        os.close(fd)

    def read_run(keep: int) -> None:
        kept = deque(maxlen=keep)
        for point in points:
            kept.append(run.tensor(point))

    seconds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        spent: dict[str, float] = {}
        for name, data in (("in cache", in_cache), ("queued", queued)):
            ways = [(f"write raw, {name}", write_raw), (f"write, {name}", write_run)]
            for label, write in ways if turn % 2 else reversed(ways):
                spent[label] = timed(lambda write=write, data=data: write(data))
                remove()
        write_raw(queued)
        write_run(queued)
        run = open_run(path)
        spent["read raw, kept"] = timed(lambda: read_raw(16))
        spent["read, kept"] = timed(lambda: read_run(16))
        spent["read raw, one buffer"] = timed(lambda: read_raw(0))
        spent["read, dropped"] = timed(lambda: read_run(0))
        remove()
        if turn:  # the first round warms up: fresh memory, imports
            for label, value in spent.items():
                seconds.setdefault(label, []).append(value)
    return seconds


def report(seconds: dict[str, list[float]], *, size: int, count: int) -> None:
    total = size * count / 1e9
    for name, against in PAIRS.items():
        for label in (against, name):
            each = statistics.median(seconds[label]) / count
            line = f"  {label:22s}{total / count / each:7.2f} GB/s {each * 1e6:9.1f} us each"
            if label == name:
                ratios = sorted(a / b for a, b in zip(seconds[against], seconds[name], strict=True))
                line += f"   {statistics.median(ratios):.2f}x raw ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            print(line)


def main(place: str = "/dev/shm") -> None:
    folder = Path(tempfile.mkdtemp(dir=place, prefix="layerscope-bench-"))
    try:
        for size, count in ((3 << 20, 160), (64 << 10, 2000)):
            load = os.getloadavg()[0]
            seconds = measure(folder, size=size, count=count)
            print(
                f"{count} tensors of {size >> 10} KiB on {place}, {ROUNDS} rounds, load {load:.2f} of {os.cpu_count()}"
            )
            report(seconds, size=size, count=count)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
