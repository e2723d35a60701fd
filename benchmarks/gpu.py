"""What recording costs on a GPU: 24-layer Llama, 1.3B parameters, bfloat16, random weights.

    PYTHONPATH=src python3 -m benchmarks.gpu [ROUNDS]

A lap is the second forward of a recording, until the device has finished it (`torch.cuda.synchronize`): that is what
the model feels. What is then still to do, on the way to memory or disk, is waited for afterwards and told apart.
4 x 2048 tokens keep the device busy; at 1 x 512 the forward waits for Python, so every microsecond of a hook counts.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch

import layerscope as ls
from benchmarks.llama import large
from benchmarks.timing import interleave, machine, stopwatch, table

LAYERS = "model.layers.*"
EVERYTHING = ["**:input", "**:output", ".:output"]


def compare(model, ids, folder, *, rounds):
    """Time the variants on these tokens and return the rows, and what was still to do after each lap."""
    runs = iter(range(10**6))
    rest = defaultdict(list)

    def plain():
        return model(input_ids=ids, use_cache=False)

    def timed(forward):
        torch.cuda.synchronize()
        watch = stopwatch()
        forward()
        torch.cuda.synchronize()
        return watch()

    def hooked(keep):
        def run():
            kept = []
            with ExitStack() as stack:
                for layer in model.model.layers:
                    hook = layer.register_forward_hook(lambda m, a, out: kept.append(keep(first(out).detach())))
                    stack.callback(hook.remove)
                return timed(plain)

        return run

    def recorded(name, taps, *, disk=False, **options):
        def run():
            to = folder / str(next(runs)) if disk else None
            with ls.record(model, taps, to=to, weights=False, **options) as rec:
                plain()
                rec.flush()
                lap = timed(plain)
                began = time.perf_counter()
                rec.flush()
                rest[name].append(time.perf_counter() - began)
            lost = [*rec.completeness.dropped, *(rec.completeness.missing if "when" not in options else [])]
            if lost:
                print(f"! {name}: {len(lost)} points incomplete, the first: {lost[0]}")
            if disk:
                shutil.rmtree(to)
            return lap

        return run

    variants = {
        "plain": lambda: timed(plain),
        "hook: .cpu()": hooked(torch.Tensor.cpu),
        "hook: .clone()": hooked(torch.Tensor.clone),
    }
    for name, taps, options in (
        ("record: 24 layers, tensors in memory", LAYERS, {}),
        ("record: 24 layers, full statistics", LAYERS, {"keep": "summary"}),
        ("record: 24 layers, tensors and full statistics to disk", LAYERS, {"disk": True}),
        ("record: every input and output, moments", EVERYTHING, {"keep": "summary", "statistics": "moments"}),
        ("record: every input and output, full statistics", EVERYTHING, {"keep": "summary"}),
        ("record: every input and output, schedule not due", EVERYTHING, {"keep": "summary", "when": "steps(1000)"}),
    ):
        variants[name] = recorded(name, taps, **options)
    return interleave(variants, against="plain", rounds=rounds), rest


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {machine()}, runs in {folder.parent}\n")
    model = large()
    with torch.no_grad():
        for shape in ((4, 2048), (1, 512)):
            ids = torch.randint(0, 32000, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            rows, rest = compare(model, ids, folder, rounds=rounds)
            print(table(f"One forward, 24-layer Llama 1.3B bfloat16, {shape[0]} x {shape[1]} tokens", rows))
            for name, seconds in rest.items():
                print(f"still to do after the lap, {name.removeprefix('record: ')}: {median_ms(seconds)} ms")
            print(flush=True)
    shutil.rmtree(folder)


def median_ms(seconds):
    return f"{statistics.median(seconds) * 1e3:.1f}"


def first(value):
    return value[0] if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
