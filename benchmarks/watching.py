"""What watching a training step costs: `watch` against the plain step, and against the hooks people write by hand.

The model is a 12-layer, hidden-512 Llama in float32 with SGD, 2 x 256 tokens; one step is forward, backward and
optimizer. Every variant trains the same model, so that all of them share caches and allocator, and is timed in the
second step after its hooks are there. `wandb.watch` and TensorBoard's histograms are the real ones.

    python -m benchmarks watching             # everything
    python -m benchmarks.watching off 60      # off schedule alone, in 60 rounds: half a percent takes many, and quiet

Off schedule is measured on one thread, in CPU time: every round is plain, off, off, plain (or the other way round), and
gives one ratio. Shown is their median with a 95 % interval of it (bootstrap). Beside it stands what the hooks take by
themselves: the same model on two tokens, where the step is short and its noise with it.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from benchmarks.llama import llama, tokens
from benchmarks.timing import Lap, interleave, machine, stopwatch, table
from layerscope import every
from layerscope.monitor.watching import watch
from layerscope.rules import dead, exploding, nonfinite, saturated, stuck, vanishing


def main() -> None:
    model, ids = llama().train(), tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if sys.argv[1:2] == ["off"]:
        off_schedule(model, optimizer, rounds=int(sys.argv[2]) if len(sys.argv) > 2 else 60)
        return

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    def beside(company: Callable[[], AbstractContextManager[object]]) -> Callable[[], Lap]:
        """Time the second step in a block: hooks are registered once for a whole training."""

        def run() -> Lap:
            with company():
                step()
                lap = stopwatch()
                step()
                return lap()

        return run

    def watched(**wishes) -> Callable[[], Lap]:
        return beside(lambda: watch(model, optimizer, **wishes))

    plain = beside(nullcontext)

    promised = {
        "plain": plain,
        "moments of every output": watched(),
        "with histograms": watched(statistics="full"),
    }
    print(table("What is promised (1.05, 1.12)", interleave(promised, against="plain", rounds=11)))
    off_schedule(model, optimizer, rounds=15)
    more = {
        "plain": plain,
        "moments, and of gradients": watched(gradients=True),
        "moments, and parameters": watched(parameters=True),
        "rule nonfinite (looks at inputs)": watched(rules=[nonfinite()]),
        "rule dead": watched(rules=[dead()]),
        "all six rules": watched(
            rules=[nonfinite(), exploding(), vanishing(), dead(), saturated(), stuck()],
        ),
    }
    print(table("What may be added", interleave(more, against="plain", rounds=7)))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        others = {
            "plain": plain,
            "eight statistics of every output, .item() each": beside(lambda: eight_statistics(model)),
            f"gradient histograms, {_whose('wandb')}": beside(lambda: wandb_watch(model, folder)),
        }
        if _installed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(SummaryWriter(folder))
            others["parameter and gradient histograms, tensorboard"] = beside(
                lambda: histograms(model, optimizer, writer.add_histogram)
            )
        print(table("What others do", interleave(others, against="plain", rounds=3, warmup=1)))


def off_schedule(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, rounds: int) -> None:
    """Say what a watch costs in a step that is not due."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    def lap(ids: torch.Tensor, *, watched: bool) -> float:
        never = every(1 << 40, offset=1 << 40)
        with watch(model, optimizer, every=never) if watched else nullcontext():
            time = stopwatch()
            step(ids)
            return time().cpu

    def pairs(ids: torch.Tensor, rounds: int) -> tuple[list[float], list[float]]:
        """Return the plain steps' times, and the ratio of the watched ones to them, of each round."""
        plain, ratios = [], []
        for turn in range(-1, rounds):
            gc.collect()
            gc.disable()
            order = (False, True, True, False) if turn % 2 else (True, False, False, True)
            laps = [(watched, lap(ids, watched=watched)) for watched in order]
            gc.enable()
            if turn >= 0:
                plain.append(statistics.mean(time for watched, time in laps if not watched))
                ratios.append(statistics.mean(time for watched, time in laps if watched) / plain[-1])
        return plain, ratios

    plain, ratios = pairs(tokens(), rounds)
    low, high = interval(ratios)
    short, few = pairs(tokens()[:1, :2], 8 * rounds)
    cost = (statistics.median(few) - 1) * statistics.median(short)
    print("### Off schedule (1.005), CPU time on one thread\n")
    print(f"- ratio {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}, {rounds} rounds")
    share = cost / statistics.median(plain)
    print(f"- the hooks by themselves: {cost * 1e3:.2f} ms a step, {share:.2%} of the plain step's "
          f"{statistics.median(plain) * 1e3:.0f} ms\n")  # fmt: skip
    torch.set_num_threads(threads)


def interval(values: list[float]) -> tuple[float, float]:
    """Return between which values the median lies, with 95 % confidence."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


@contextmanager
def eight_statistics(model: torch.nn.Module) -> Iterator[None]:
    def look(module, args, output) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                x = value.detach()
                kept.append(
                    [
                        x.mean().item(), x.std().item(), x.min().item(), x.max().item(), x.abs().max().item(),
                        x.norm().item(), x.isnan().sum().item(), x.isinf().sum().item(),
                    ]
                )  # fmt: skip

    kept: list[list[float]] = []
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(look).remove)
        yield


@contextmanager
def wandb_watch(model: torch.nn.Module, folder: str) -> Iterator[None]:
    """`wandb.watch(log="gradients", log_freq=1)`, offline; where it is not installed, what it does to each gradient."""
    if _installed("wandb"):
        import wandb

        with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run:
            run.watch(model, log="gradients", log_freq=1)
            yield
            run.unwatch(model)
        return

    def look(gradient: torch.Tensor) -> None:
        flat = gradient.detach().reshape(-1)
        finite = flat[torch.isfinite(flat)]
        low, high = finite.min().item(), finite.max().item()
        kept.append(torch.histc(finite, bins=64, min=low, max=high).tolist())

    kept: list[list[float]] = []
    with ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(parameter.register_hook(look).remove)
        yield


@contextmanager
def histograms(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, add: Callable[[str, torch.Tensor], object]
) -> Iterator[None]:
    def look(*_: object) -> None:
        for name, parameter in model.named_parameters():
            add(name, parameter)
            add(f"{name}.grad", parameter.grad)

    handle = optimizer.register_step_post_hook(look)
    yield
    handle.remove()


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _whose(name: str) -> str:
    return f"{name}.watch" if _installed(name) else f"as {name} makes them"


if __name__ == "__main__":
    main()
