"""What recording costs: a forward under `record` against the plain forward, and against the usual hand-written hooks.

Set-up (parsing patterns, registering hooks, fingerprinting weights) happens once per run and is timed apart. Tensors
that go to disk are timed until the last one is acknowledged. Peers from PyPI are in `peers.py`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import layerscope as ls
from benchmarks.llama import llama, tokens
from benchmarks.timing import interleave, machine, stopwatch, table

LAYERS = "model.layers.*"
EVERYTHING = ["**:input", "**:output", ".:output"]


def main() -> None:
    model, ids = llama(), tokens()
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, runs in {folder.parent}\n")

    def plain():
        return model(input_ids=ids, use_cache=False)

    def hidden_states():
        return model(input_ids=ids, use_cache=False, output_hidden_states=True)

    def bare_hooks():
        kept = []
        with ExitStack() as stack:
            for layer in model.model.layers:
                hook = layer.register_forward_hook(lambda m, a, out: kept.append(first(out).detach().cpu().clone()))
                stack.callback(hook.remove)
            plain()
        return kept

    def eight_statistics():
        kept = []

        def hook(module, args, out):
            t = first(out)
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                t = t.detach()
                kept.append(
                    [
                        *(t.mean().item(), t.std().item(), t.min().item(), t.max().item()),
                        *(t.abs().max().item(), t.norm().item(), t.isnan().sum().item(), t.isinf().sum().item()),
                    ]
                )

        with ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_hook(hook).remove)
            plain()
        return kept

    runs = iter(range(10**6))

    def recorded(taps, *, disk=False, **options):
        """One forward inside a block that is already open; only the forward (and the writing) is timed."""

        def run():
            to = folder / str(next(runs)) if disk else None
            with ls.record(model, taps, to=to, **options, options=ls.RecordOptions(weights=False)) as rec:
                watch = stopwatch()
                plain()
                rec.flush()
                lap = watch()
            if disk:
                shutil.rmtree(to)
            return lap

        return run

    variants = {
        "plain": plain,
        "output_hidden_states=True": hidden_states,
        "bare hook, .detach().cpu().clone(), 12 layers": bare_hooks,
        "eight torch statistics, every output": eight_statistics,
        "record: 12 layers' tensors in memory": recorded(LAYERS),
        "record: 12 layers' tensors to disk": recorded(LAYERS, disk=True, keep="tensor"),
        "record: 12 layers' tensors and statistics to disk (default)": recorded(LAYERS, disk=True),
        "record: every input and output, moments": recorded(EVERYTHING, keep="summary", statistics="moments"),
        "record: every input and output, full statistics": recorded(EVERYTHING, keep="summary"),
        "record: every input and output, full statistics to disk": recorded(EVERYTHING, keep="summary", disk=True),
        "record: every output, channels": recorded(["**:output", ".:output"], keep="summary", statistics="channels"),
        "record: schedule not due": recorded(EVERYTHING, keep="summary", when="steps(1000)"),
    }
    with torch.no_grad():
        rows = interleave(variants, against="plain", rounds=15)
        print(table("One forward, 12-layer Llama, hidden 512, 2 x 256 tokens, float32", rows))
        began = time.perf_counter()
        with ls.record(model, EVERYTHING, to=folder / "setup", keep="summary"):
            entered = time.perf_counter() - began
            plain()
            began = time.perf_counter()
        left = time.perf_counter() - began
    print(f"Once per run: {entered * 1e3:.0f} ms to begin (with weight fingerprints), {left * 1e3:.0f} ms to end.")
    shutil.rmtree(folder)


def first(value):
    return value[0] if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
