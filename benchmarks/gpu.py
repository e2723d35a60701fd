"""What recording costs on a GPU: 24-layer Llama, 1.3 B parameters, bfloat16, random weights.

    PYTHONPATH=src python3 -m benchmarks.gpu [ROUNDS] [naive]

A lap is a few steps back to back, until the model's own stream has finished them: that is what the model feels. What is
still on its way to the host then is waited for outside the lap. 4 x 2048 tokens keep the device busy; at 1 x 512 tokens
and at one token the forward waits for Python, so every microsecond of a hook counts. `naive` times what scripts do too.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import NamedTuple

import torch

import layerscope as ls
from benchmarks.llama import large
from benchmarks.timing import interleave, machine, stopwatch, table
from layerscope.recorder.lanes import lane_of

LAYERS = "model.layers.*"
EVERYTHING = ["**:input", "**:output", ".:output"]


class Case(NamedTuple):
    """A step to be timed, and how many of them make a lap."""

    name: str
    shape: tuple[int, int]
    train: bool
    steps: int


CASES = (
    Case("prefill 4 x 2048", (4, 2048), False, 3),
    Case("train 4 x 2048", (4, 2048), True, 2),
    Case("prefill 1 x 512", (1, 512), False, 10),
    Case("one token", (1, 1), False, 10),
)

RECORDED = {
    "24 layers, tensors on the host": (LAYERS, {}),
    "24 layers, full statistics": (LAYERS, {"keep": "summary"}),
    "every input and output, moments": (EVERYTHING, {"keep": "summary", "statistics": "moments"}),
    "every input and output, full statistics": (EVERYTHING, {"keep": "summary"}),
    "every input and output, schedule off": (EVERYTHING, {"keep": "summary", "when": "steps(1000000)"}),
}


def eight(x):
    """What a monitoring script takes of a tensor, one operation after the other."""
    return x.mean(), x.std(), x.min(), x.max(), x.abs().mean(), x.norm(), x.isnan().sum(), (x == 0).sum()


NAIVE = {"hook: .cpu()": torch.Tensor.cpu, "hook: .clone()": torch.Tensor.clone, "hook: eight statistics": eight}


def compare(model, case, *, rounds, naive):
    """Time the variants of one case and return the rows."""
    ids = torch.randint(0, 32000, case.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def step():
        if not case.train:
            with torch.no_grad():
                return model(input_ids=ids, use_cache=False)
        model.zero_grad(set_to_none=True)
        return model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def lap():
        step()  # every variant's lap begins on a device that has just worked: at rest it would run faster
        torch.cuda.synchronize()
        watch = stopwatch()
        for _ in range(case.steps):
            step()
        torch.cuda.current_stream().synchronize()
        return watch()

    def hooked(keep):
        def run():
            kept = []
            with ExitStack() as stack:
                for layer in model.model.layers:
                    hook = layer.register_forward_hook(lambda m, a, out: kept.append(keep(first(out).detach())))
                    stack.callback(hook.remove)
                return lap()

        return run

    def recorded(taps, options):
        def run():
            with ls.record(model, taps, weights=False, **options) as rec:
                taken = lap()
            lost = [*rec.completeness.dropped, *(rec.completeness.missing if "when" not in options else [])]
            if lost:
                print(f"! {len(lost)} points incomplete, the first: {lost[0]}")
            return taken

        return run

    variants = {"plain": lap}
    variants |= {name: hooked(keep) for name, keep in NAIVE.items() if naive}
    variants |= {name: recorded(*wanted) for name, wanted in RECORDED.items()}
    return interleave(variants, against="plain", rounds=rounds, warmup=3)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {machine()}\n")
    model = large()
    for case in CASES:
        rows = compare(model, case, rounds=rounds, naive="naive" in sys.argv)
        print(table(f"{case.name} tokens, laps of {case.steps} steps", rows), flush=True)
    pinned = lane_of(torch.device("cuda", torch.cuda.current_device())).pinned
    print(f"page-locked memory: {0 if pinned is None else pinned.total >> 20} MiB")


def first(value):
    return value[0] if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
