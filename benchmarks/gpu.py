"""What recording costs on a GPU, how fast the kernels read, and whether what is promised there holds.

    PYTHONPATH=src python3 -m benchmarks.gpu [prefill train short token] [--rounds N] [--naive]
                                             [--only table|kernels|checks]

The model is a 24-layer Llama of 1.3 B parameters in bfloat16 with random weights. A few steps of it back to back take
turns with as many of a twin that shares its weights and is not recorded: the host's speed, and that of a device which
draws all the power that it may, change by more than a recording costs. 4 x 2048 tokens keep the device busy, so that a
step is over when the model's own stream has finished it: that is what the model feels. At 1 x 512 tokens and at one
token the forward waits for Python, so every microsecond of a hook counts, and a step is over when it returns. What is
still on its way to the host then is on its way beside the steps that follow. Two models of which neither is recorded
show what the method makes of nothing. `--naive` times what scripts do too.

It exits with 1 if a check failed or a recording lost something; a ratio over its limit is only marked.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

import layerscope as ls
from benchmarks import gpu_checks, kernels
from benchmarks.gpu_checks import EVERYTHING, LAYERS, first, lost, why
from benchmarks.llama import large
from benchmarks.pairing import HOST, Clock, Seconds, in_turn, plain_of, ratio_of_turns, table, taking_turns
from benchmarks.timing import machine

Lap = Callable[[int, int], Seconds]  # by how many turns, and how many plain steps later they begin

PARTS = ("table", "kernels", "checks")
NOTHING = "nothing"  # the ratio of two models of which neither is recorded


def mark_of_stream() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_marks(earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
    later.synchronize()
    return earlier.elapsed_time(later) / 1e3


STREAM = Clock(mark_of_stream, between_marks)


class Case(NamedTuple):
    """A step to be timed, by which clock, and how many laps of how many turns of how many steps.

    Recorded steps come before each lap, untimed: a device that was at rest is faster for a while, and then slower.
    """

    name: str
    shape: tuple[int, int]
    train: bool
    clock: Clock
    laps: int
    turns: int
    of: int
    warm_up: int
    warm_up_of_all: int


CASES = {
    "prefill": Case("prefill 4 x 2048", (4, 2048), False, STREAM, 8, 6, 4, 16, 16),
    "train": Case("train 4 x 2048", (4, 2048), True, STREAM, 8, 5, 3, 4, 4),
    "short": Case("prefill 1 x 512", (1, 512), False, HOST, 40, 4, 6, 6, 60),
    "token": Case("one token", (1, 1), False, HOST, 40, 4, 6, 6, 6),
}


class Recorded(NamedTuple):
    """What is recorded, and the limits of its ratio in the order of CASES."""

    taps: Any
    options: Mapping[str, Any]
    limits: tuple[float, ...]


RECORDED = {
    "24 layers, tensors on the host": Recorded(LAYERS, {}, (1.02, 1.01, 1.08, 1.08)),
    "24 layers, full statistics": Recorded(LAYERS, {"keep": "summary"}, (1.02, 1.01, 1.08, 1.08)),
    "24 layers, channels": Recorded(LAYERS, {"keep": "summary", "statistics": "channels"}, (1.02, 1.01, 1.08, 1.08)),
    "every input and output, moments": Recorded(
        EVERYTHING, {"keep": "summary", "statistics": "moments"}, (1.15, 1.06, 1.65, 1.65)
    ),
    "every input and output, schedule off": Recorded(
        EVERYTHING, {"keep": "summary", "when": "steps(1000000)"}, (1.005, 1.005, 1.01, 1.01)
    ),
}


def eight(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a monitoring script takes of a tensor, one operation after the other."""
    return x.mean(), x.std(), x.min(), x.max(), x.abs().mean(), x.norm(), x.isnan().sum(), (x == 0).sum()


NAIVE: dict[str, Callable[[torch.Tensor], Any]] = {
    "hook: .cpu()": torch.Tensor.cpu,
    "hook: .clone()": torch.Tensor.clone,
    "hook: eight statistics": eight,
}


def main() -> int:
    asked = arguments()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {machine()}\n", flush=True)
    parts = [asked.only] if asked.only else PARTS
    model = large() if parts != ["kernels"] else None
    gc.collect()
    gc.freeze()  # so that collecting between laps takes no time
    fine = True
    for part in parts:
        try:
            fine &= run(part, model, asked)
        except Exception as error:
            print(f"FAILED {part}: {why(error)}", flush=True)
            fine = False
    return 0 if fine else 1


def run(part: str, model: Any, asked: argparse.Namespace) -> bool:
    """Time or check one part; return whether nothing failed in it."""
    if part == "kernels":
        return kernels.report()
    if part == "checks":
        return gpu_checks.report(model)
    done = [tabled(model, key, rounds=asked.rounds, naive=asked.naive) for key in asked.cases or CASES]
    return all(done)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description="Time and check recording on a GPU, against the same steps without it."
    )
    parser.add_argument("cases", nargs="*", type=known, metavar="CASE", help=f"of the table: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=several, help="laps of every variant, instead of 8 or 40")
    parser.add_argument("--naive", action="store_true", help="time what scripts do in a hook as well")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all three")
    return parser.parse_args()


def known(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"there is no case {text!r}; there are {', '.join(CASES)}")
    return text


def several(text: str) -> int:
    if not text.isdecimal() or int(text) < 4:
        raise argparse.ArgumentTypeError(f"{text!r} laps have no spread; take 4 or more")
    return int(text)


def tabled(model: Any, key: str, *, rounds: int | None, naive: bool) -> bool:
    """Time the variants of one case and print their table; return whether nothing was lost and nothing raised."""
    case, failures = CASES[key], {}
    try:
        variants = laps_of(model, case, failures, naive=naive)
        for name, lap in list(variants.items()):
            try:
                lap(1, 0)  # kernels are compiled and memory is got before anything is timed
            except Exception as error:
                failures[name] = why(error)
                del variants[name]
        laps: dict[str, list[Seconds]] = {name: [] for name in variants}
        for name in in_turn(variants, rounds or case.laps):
            later = 5 * len(laps[name]) % (2 * case.of)  # how fast a device is after a rest goes up and down
            laps[name].append(variants[name](case.turns, later))
        place = list(CASES).index(key)
        print(
            table(
                f"{case.name}, {rounds or case.laps} laps of {case.turns} turns of {case.of} steps",
                {name: ratio_of_turns(mine, of=case.of) for name, mine in laps.items()},
                plain={name: plain_of(mine, of=case.of) for name, mine in laps.items()},
                limits={name: wanted.limits[place] for name, wanted in RECORDED.items()},
            ),
            flush=True,
        )
    except Exception as error:
        failures["the table"] = why(error)
    finally:
        model.zero_grad(set_to_none=True)
    for name, reason in failures.items():
        print(f"FAILED {case.name}, {name}: {reason}", flush=True)
    return not failures


def twin_of(model: Any) -> Any:
    """Return a model with modules of its own and the same weights."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def laps_of(model: Any, case: Case, failures: dict[str, str], *, naive: bool) -> dict[str, Lap]:
    """Return the laps of every variant; what a recording lost is put in `failures`."""
    ids = torch.randint(0, 32000, case.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    models = [model, twin_of(model)]  # the one that is recorded comes first

    def step(which: int, release: Callable[[], object] = lambda: None) -> None:
        model = models[which]
        if case.train:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        release()

    def lap(
        turns: int, later: int, release: Callable[[], object] = lambda: None, *, warm_up: int = case.warm_up
    ) -> Seconds:
        other, plain = partial(step, 0, release), partial(step, 1)
        for one in [other] * warm_up + [plain] * (1 + later):
            one()
        taken = taking_turns(other, plain, turns=turns, of=case.of, clock=case.clock)
        models.reverse()
        return taken

    def hooked(keep: Callable[[torch.Tensor], Any]) -> Lap:
        def run(turns: int, later: int) -> Seconds:
            kept: list[Any] = []
            with ExitStack() as stack:
                for layer in models[0].model.layers:
                    hook = layer.register_forward_hook(lambda m, a, out: kept.append(keep(first(out).detach())))
                    stack.callback(hook.remove)
                return lap(turns, later, kept.clear)

        return run

    def recorded(name: str, wanted: Recorded) -> Lap:
        def run(turns: int, later: int) -> Seconds:
            with ls.record(models[0], wanted.taps, **wanted.options, options=ls.RecordOptions(weights=False)) as rec:
                # Page-locked memory is released per step where a few of them would fill it.
                large = "keep" not in wanted.options and case.shape[0] * case.shape[1] > 512
                release = partial(rec.take, leave=1) if large else lambda: None
                of_all = wanted.taps is EVERYTHING and "when" not in wanted.options
                taken = lap(turns, later, release, warm_up=case.warm_up_of_all if of_all else case.warm_up)
                rec._sink.pending.records.clear()  # nobody reads them
            if reason := lost(rec, due="when" not in wanted.options):
                failures[name] = reason
            return taken

        return run

    variants = {name: hooked(keep) for name, keep in NAIVE.items() if naive}
    variants |= {name: recorded(name, wanted) for name, wanted in RECORDED.items()}
    return {NOTHING: lap, **variants}


if __name__ == "__main__":
    raise SystemExit(main())
