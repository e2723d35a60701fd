"""What our Python costs for each hooked module: microseconds over the plain forward, whatever the tensors cost.

300 modules that hand on a view of four numbers. Statistics are left out where it says so: on an accelerator they are
started here and made elsewhere. The smallest of many interleaved rounds is shown, because what disturbs a round only
ever adds to it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import nn

import layerscope as ls
from benchmarks.timing import machine
from layerscope.recorder.capture import Capture, Taken
from layerscope.recorder.recording import Recording

MODULES = 300
UNWEIGHED = ls.RecordOptions(weights=False)
ROUNDS = 400
SIDES = {"output": "m.*:output", "input and output": ["m.*:input", "m.*:output"]}


class View(nn.Module):
    def forward(self, x):
        return x.view_as(x)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.ModuleList(View() for _ in range(MODULES))

    def forward(self, x):
        for module in self.m:
            x = module(x)
        return x


class Nothing:
    """A hook that takes whatever it is given."""

    def __call__(self, *args):
        return None


@contextmanager
def hooked(model, *, both):
    with ExitStack() as stack:
        for module in model.m:
            stack.callback(module.register_forward_hook(Nothing(), with_kwargs=both, always_call=both).remove)
            if both:
                stack.callback(module.register_forward_pre_hook(Nothing(), with_kwargs=True).remove)
        yield


@contextmanager
def recorded(model, taps, *, taken=True, **options):
    def nothing(capture, shared, tensor, want):
        return Taken(summary=nothing)

    with (
        ls.record(
            model, taps, keep="summary", statistics="moments", **options, options=ls.RecordOptions(weights=False)
        ) as rec,
        ExitStack() as s,
    ):
        if not taken:
            s.enter_context(patch.object(Capture, "take", nothing))
        yield rec
        rec._sink.pending.records.clear()


def main() -> None:
    torch.set_num_threads(1)
    model, x = Chain(), torch.ones(4)
    variants = {
        "one hook that does nothing": lambda: hooked(model, both=False),
        "two hooks that do nothing": lambda: hooked(model, both=True),
        "schedule not due": lambda: recorded(model, SIDES["input and output"], when="steps(1000000)"),
    }
    for name, taps in SIDES.items():
        variants[f"{name}, statistics left out"] = lambda taps=taps: recorded(model, taps, taken=False)
    for name, taps in SIDES.items():
        variants[f"{name}, moments"] = lambda taps=taps: recorded(model, taps)
    best = dict.fromkeys(["plain", *variants], float("inf"))

    def rounds(name, times, rec=None):
        for _ in range(times):
            began = time.perf_counter()
            model(x)
            best[name] = min(best[name], time.perf_counter() - began)
            if isinstance(rec, Recording):
                rec._sink.pending.records.clear()

    with torch.no_grad():
        for _ in range(ROUNDS // 20):
            rounds("plain", 20)
            for name, variant in variants.items():
                with variant() as rec:
                    rounds(name, 20, rec)
    print(f"{machine()}, torch {torch.__version__}\n")
    print(f"| of {MODULES} modules ({best['plain'] / MODULES * 1e6:.2f} us each) | us for each module |\n|---|---:|")
    for name in variants:
        print(f"| {name} | {(best[name] - best['plain']) / MODULES * 1e6:.2f} |")


if __name__ == "__main__":
    main()
