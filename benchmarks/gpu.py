"""What recording costs on a GPU, how fast the kernels read, and whether what is promised there holds.

    PYTHONPATH=src python3 -m benchmarks.gpu [prefill train short token] [--rounds N] [--naive]
                                             [--only table|kernels|checks]

The model is a 24-layer Llama of 1.3 B parameters in bfloat16 with random weights. A lap is a few steps back to back,
until the model's own stream has finished them: that is what the model feels. What is still on its way to the host then
is waited for outside the lap. 4 x 2048 tokens keep the device busy; at 1 x 512 tokens and at one token the forward
waits for Python, so every microsecond of a hook counts, and the host's speed changes by more than that from one lap to
the next: there, six steps of the model take turns with six of a twin that shares its weights and is not recorded, and
a step is over when it returns. `--naive` times what scripts do too.

It exits with 1 if a check failed or a recording lost something; a ratio over its limit is only marked.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

import layerscope as ls
from benchmarks import gpu_checks, kernels
from benchmarks.gpu_checks import EVERYTHING, LAYERS, first, lost, why
from benchmarks.llama import large
from benchmarks.pairing import Lap, Ratio, Seconds, in_turn, paired, ratio_of_turns, table, taking_turns
from benchmarks.timing import machine

PARTS = ("table", "kernels", "checks")
LAPS = 2  # in a round, where steps take turns


class Case(NamedTuple):
    """A step to be timed, how many of them (or turns of six) make a lap, and how many come before that, untimed.

    A device at rest runs faster than one that has worked for a while. And small tensors are held back to the end of a
    step once that was tried, up to 48 MB of them in a step: the inputs and outputs of 1 x 512 tokens are 700 MB.
    """

    name: str
    shape: tuple[int, int]
    train: bool
    steps: int
    warm_up: int
    warm_up_of_all: int
    alternates: bool = False


CASES = {
    "prefill": Case("prefill 4 x 2048", (4, 2048), False, 6, 10, 10),
    "train": Case("train 4 x 2048", (4, 2048), True, 2, 3, 3),
    "short": Case("prefill 1 x 512", (1, 512), False, 4, 6, 40, True),
    "token": Case("one token", (1, 1), False, 4, 6, 6, True),
}


class Recorded(NamedTuple):
    """What is recorded, and the limits of its ratio in the order of CASES."""

    taps: Any
    options: Mapping[str, Any]
    limits: tuple[float, ...] = ()


RECORDED = {
    "24 layers, tensors on the host": Recorded(LAYERS, {}, (1.02, 1.01, 1.06, 1.03)),
    "24 layers, full statistics": Recorded(LAYERS, {"keep": "summary"}, (1.02, 1.01, 1.06, 1.03)),
    "every input and output, moments": Recorded(
        EVERYTHING, {"keep": "summary", "statistics": "moments"}, (1.15, 1.06, 1.60, 1.60)
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
    parser.add_argument("--rounds", type=several, default=21, help="laps of every variant (21)")
    parser.add_argument("--naive", action="store_true", help="time what scripts do in a hook as well")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all three")
    return parser.parse_args()


def known(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"there is no case {text!r}; there are {', '.join(CASES)}")
    return text


def several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} rounds have no spread; take 2 or more")
    return int(text)


def tabled(model: Any, key: str, *, rounds: int, naive: bool) -> bool:
    """Time the variants of one case and print their table; return whether nothing was lost and nothing raised."""
    case, failures = CASES[key], {}
    try:
        plain, variants = laps_of(model, case, failures, naive=naive)
        for name, lap in list(variants.items()):
            try:
                lap()  # kernels are compiled and memory is got before anything is timed
                lap()
            except Exception as error:
                failures[name] = why(error)
                del variants[name]
        ratios, alone = (in_turns if case.alternates else paired)(plain, variants, rounds=rounds)
        place = list(CASES).index(key)
        limits = {name: wanted.limits[place] for name, wanted in RECORDED.items() if wanted.limits}
        laps = f"{LAPS} x {case.steps} turns of six steps" if case.alternates else f"{case.steps} steps"
        title = f"{case.name}, {rounds} rounds of {laps}"
        print(table(title, ratios, plain=alone, limits=limits), flush=True)
    except Exception as error:
        failures["the table"] = why(error)
    finally:
        model.zero_grad(set_to_none=True)
    for name, reason in failures.items():
        print(f"FAILED {case.name}, {name}: {reason}", flush=True)
    return not failures


def in_turns(
    plain: Lap, variants: Mapping[str, Callable[[], Seconds]], *, rounds: int
) -> tuple[dict[str, Ratio], list[float]]:
    """Return the ratios of variants whose steps take turns with plain ones, and laps of the plain run."""
    laps: dict[str, list[Seconds]] = {name: [] for name in variants}
    for name in in_turn(variants, rounds):
        laps[name] += [variants[name]() for _ in range(LAPS)]
    return {name: ratio_of_turns(seconds) for name, seconds in laps.items()}, [plain() for _ in range(rounds)]


def twin_of(model: Any) -> Any:
    """Return a model with modules of its own and the same weights."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def laps_of(
    model: Any, case: Case, failures: dict[str, str], *, naive: bool
) -> tuple[Lap, dict[str, Callable[[], Any]]]:
    """Return the lap of the plain run and those of every variant; what a recording lost is put in `failures`."""
    ids = torch.randint(0, 32000, case.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    models = [model, *([twin_of(model)] if case.alternates else [])]  # the one that is recorded comes first

    def step(which: int = 0) -> None:
        model = models[which]
        if case.train:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)

    def plain() -> float:
        return timed(lambda: None, warm_up=case.warm_up)

    def lap(release: Callable[[], object] = lambda: None, *, warm_up: int = case.warm_up) -> float | Seconds:
        if not case.alternates:
            return timed(release, warm_up=warm_up)
        for which in [0] * warm_up + [1]:
            step(which)
        torch.cuda.synchronize()
        return taking_turns(step, partial(step, 1), turns=case.steps)

    def timed(release: Callable[[], object], *, warm_up: int) -> float:
        for _ in range(warm_up):
            step()
            release()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(case.steps):
            step()
            release()
        torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - began) / case.steps

    def hooked(keep: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        def run() -> Any:
            kept: list[Any] = []
            with ExitStack() as stack:
                for layer in models[0].model.layers:
                    hook = layer.register_forward_hook(lambda m, a, out: kept.append(keep(first(out).detach())))
                    stack.callback(hook.remove)
                taken = lap()
            models.append(models.pop(0))  # two that are alike are not equally fast
            return taken

        return run

    def recorded(name: str, wanted: Recorded) -> Callable[[], Any]:
        def run() -> Any:
            with ls.record(models[0], wanted.taps, weights=False, **wanted.options) as rec:
                # Page-locked memory is released per step where a few of them would fill it.
                large = "keep" not in wanted.options and case.shape[0] * case.shape[1] > 512
                release = partial(rec.take, leave=1) if large else lambda: None
                of_all = wanted.taps is EVERYTHING and "when" not in wanted.options
                taken = lap(release, warm_up=case.warm_up_of_all if of_all else case.warm_up)
                rec._pending.clear()  # nobody reads them
            if reason := lost(rec, due="when" not in wanted.options):
                failures[name] = reason
            models.append(models.pop(0))
            return taken

        return run

    variants = {name: hooked(keep) for name, keep in NAIVE.items() if naive}
    variants |= {name: recorded(name, wanted) for name, wanted in RECORDED.items()}
    return plain, variants


if __name__ == "__main__":
    raise SystemExit(main())
