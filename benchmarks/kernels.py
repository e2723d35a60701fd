"""How fast the kernels read on a GPU: GB/s of one 268 MB tensor, and of pairs.

PYTHONPATH=src python3 -m benchmarks.kernels
"""

from __future__ import annotations

import torch

from benchmarks.timing import machine
from layerscope.stats.device import Slots

BYTES = 268_435_456


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {machine()}\n")
    print("| what | dtype | GB/s |\n|---|---|---:|")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8):
        x = torch.randn(BYTES // dtype.itemsize, device="cuda").to(dtype)
        y = torch.empty_like(x)
        print(
            f"| copy, read and write | {name(dtype)} | {2 * BYTES / seconds(lambda x=x, y=y: y.copy_(x)) / 1e9:.0f} |"
        )
        for level in ("moments", "full"):
            slots = Slots(x.device, level, torch.cuda.current_stream().cuda_stream)
            took = seconds(lambda slots=slots, x=x: slots.start(0, x))
            slots.gather(1)
            print(f"| {level} | {name(dtype)} | {BYTES / took / 1e9:.0f} |", flush=True)


def seconds(work, repeat=20):
    """Time of one call on the device, the median of several laps."""
    work()
    laps = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(repeat):
            work()
        ended.record()
        ended.synchronize()
        laps.append(began.elapsed_time(ended) / 1e3 / repeat)
    return sorted(laps)[2]


def name(dtype):
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
