"""How fast the selective scan is on a CPU, against the recurrence one step after another.

    python -m benchmarks.scanning [threads]      # default 2

The loop is what one writes first, and what transformers falls back to: every token multiplies, adds and reads out its
own state. "Loop of additions" takes all but the recurrence itself out of the loop, for the whole length at once. Sizes
are those of one sample of 512 tokens in `quamba-small` and `quamba-130m-w8a8`, of ten samples of the small one, and of
one step of training. All ways once per round, in one process; medians.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.nn.functional import softplus

from benchmarks.timing import interleave, machine, table
from layerscope.models.mamba import selective_scan

LENGTH, STATES, ROUNDS = 512, 16, 7


def loop(u, delta, rates, b, c, d):
    state, outputs = u.new_zeros(u.shape[0], *rates.shape), []
    for t in range(u.shape[1]):
        state = torch.exp(delta[:, t, :, None] * rates) * state + (delta[:, t] * u[:, t])[:, :, None] * b[:, t, None, :]
        outputs.append((state * c[:, t, None, :]).sum(-1))
    return torch.stack(outputs, dim=1) + d * u


def loop_of_additions(u, delta, rates, b, c, d):
    decay = torch.exp(delta[:, :, None, :] * rates.t())
    states = (delta * u)[:, :, None, :] * b[:, :, :, None]
    for t in range(1, u.shape[1]):
        states[:, t].addcmul_(decay[:, t], states[:, t - 1])
    return (c[:, :, None, :] @ states).squeeze(2) + d * u


def inputs(batch: int, channels: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    u, steps = (torch.randn(batch, LENGTH, channels, generator=g) for _ in range(2))
    b, c = (torch.randn(batch, LENGTH, STATES, generator=g) for _ in range(2))
    rates = -torch.arange(1.0, STATES + 1).repeat(channels, 1)
    return [u, softplus(steps - 4), rates, b, c, torch.ones(channels)]


def learning(scan: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> None:
    with torch.enable_grad():
        torch.autograd.grad(scan(*given).sum(), given)


@torch.no_grad()
def main() -> int:
    torch.set_num_threads(int(sys.argv[1]) if sys.argv[1:] else 2)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    for name, batch, channels in (("quamba-small", 1, 256), ("quamba-small", 10, 256), ("quamba-130m-w8a8", 1, 1536)):
        given = inputs(batch, channels)
        ways = {
            "one step after another": lambda given=given: loop(*given),
            "loop of additions": lambda given=given: loop_of_additions(*given),
            "selective_scan": lambda given=given: selective_scan(*given),
        }
        rows = interleave(ways, against="one step after another", rounds=ROUNDS, warmup=1)
        print(table(f"a layer of {name}, {batch} x {LENGTH} tokens", rows))
    given = [tensor.requires_grad_() for tensor in inputs(1, 256)]
    ways = {
        "one step after another": lambda: learning(loop, given),
        "selective_scan": lambda: learning(selective_scan, given),
    }
    rows = interleave(ways, against="one step after another", rounds=ROUNDS, warmup=1)
    print(table(f"the same with its gradients, quamba-small, 1 x {LENGTH} tokens", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
