"""A process to be killed: writes a run, or recovers one, and says what it has done. Needs no torch.

    python writing.py write FOLDER SEED [slow]      # prints how many records are acknowledged, after each few
    python writing.py recover FOLDER [slow]

Every record can be told from its number: `expected(seed, n)` is what it must hold. With `slow`, the system calls that
seal and cut take milliseconds, so that a kill falls between them.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np

from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, recover

KINDS = ("float32", "int16", "uint8", "bfloat16", "complex128")
ITEMSIZE = {"float32": 4, "int16": 2, "uint8": 1, "bfloat16": 2, "complex128": 16}


def expected(seed: int, n: int) -> tuple[Point, Moment, str, tuple[int, ...], bytes]:
    """Return point, moment, dtype, shape and bytes of record `n`."""
    rng = np.random.default_rng((seed, n))
    dtype = KINDS[n % len(KINDS)]
    shape = (int(rng.integers(0, 9)), int(rng.integers(1, 300)))
    data = rng.integers(0, 256, shape[0] * shape[1] * ITEMSIZE[dtype], dtype=np.uint8).tobytes()
    return Point(f"layers.{n % 7}", leaf=(n % 2,)), Moment(step=n, batch=n), dtype, shape, data


def write(folder: str, seed: int, *, tensors: int = 16) -> None:
    writer = Writer(folder, Manifest(seed=seed), segment_tensors=tensors)
    rng = np.random.default_rng(seed)
    for n in itertools.count():
        point, moment, dtype, shape, data = expected(seed, n)
        writer.write(point, moment, blob=Blob(dtype, shape, len(data), lambda data=data: data), note={"n": n})
        if rng.random() < 0.3:
            writer.flush()
            say(n + 1)


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def slow_down() -> None:
    """Make each step of sealing, cutting and renaming long enough to be hit."""

    def slowly(work):
        def call(*args, **kwargs):
            time.sleep(0.002)
            result = work(*args, **kwargs)
            time.sleep(0.002)
            return result

        return call

    os.fsync, os.ftruncate = slowly(os.fsync), slowly(os.ftruncate)
    Path.replace, Path.unlink = slowly(Path.replace), slowly(Path.unlink)
    pwrite = os.pwrite

    def torn(fd, data, offset):  # a header or a tensor that arrives in two halves
        half = len(data) // 2
        if not half:
            return pwrite(fd, data, offset)
        return pwrite(fd, data[:half], offset) + (time.sleep(0.001) or pwrite(fd, data[half:], offset + half))

    os.pwrite = torn


if __name__ == "__main__":
    if "slow" in sys.argv:
        slow_down()
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]), tensors=3 if "slow" in sys.argv else 16)
    else:
        say("begun")
        recover(sys.argv[2])
        say("done")
