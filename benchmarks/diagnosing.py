"""What a diagnosis costs: in forwards of both models on a CPU, in device memory on a GPU.

    python -m benchmarks.diagnosing

On a CPU: the 12-layer Llama against a copy of it in float32 and in bfloat16, healthy and with one weight times 1.05.
The unit is one forward of each model; the limit is 6, the look at single operations apart (a changed weight needs
none). On a GPU, where there is one: 24 layers and 1.3 B parameters in bfloat16, two models; the limit is twice what
both hold.
"""

from __future__ import annotations

import copy
import time

import torch

import layerscope as ls
from benchmarks.llama import large, llama, tokens
from benchmarks.timing import interleave, machine, table

TARGET = "model.layers.5.mlp.up_proj"
ROUNDS = 5


def pair(dtype: torch.dtype, *, fault: bool):
    reference = llama()
    candidate = copy.deepcopy(reference).to(dtype)
    if fault:
        with torch.no_grad():
            candidate.get_submodule(TARGET).weight.mul_(1.05)
    return reference, candidate


@torch.no_grad()
def forwards(reference, candidate, ids) -> None:
    reference(input_ids=ids)
    candidate(input_ids=ids)


def on_cpu() -> None:
    ids = tokens()
    for dtype in (torch.float32, torch.bfloat16):
        for fault in (False, True):
            reference, candidate = pair(dtype, fault=fault)
            found = ls.diagnose(reference, candidate, {"input_ids": ids}).root
            assert found == (TARGET if fault else None), found
            ways = {
                "one forward of each": lambda r=reference, c=candidate: forwards(r, c, ids),
                "diagnose": lambda r=reference, c=candidate: ls.diagnose(r, c, {"input_ids": ids}),
            }
            rows = interleave(ways, against="one forward of each", rounds=ROUNDS, warmup=1)
            name = str(dtype).removeprefix("torch.")
            print(table(f"float32 against {name}, {'one weight times 1.05' if fault else 'healthy'}", rows))


def on_gpu() -> None:
    target = "model.layers.11.mlp.up_proj"
    print("| pair, 1.3 B parameters | tokens | root | seconds | peak over both models |\n|---|---|---|---:|---:|")
    for dtype in (torch.bfloat16, torch.float32):
        for length in (512, 2048):
            reference = large(dtype=dtype)
            candidate = copy.deepcopy(reference).to(torch.bfloat16)
            ids = torch.randint(0, 32000, (1, length), device="cuda")
            with torch.no_grad():
                candidate.get_submodule(target).weight.mul_(1.05)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            finding = ls.diagnose(reference, candidate, {"input_ids": ids})
            torch.cuda.synchronize()
            took, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated()
            assert finding.root == target, finding.verdict.because
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} against bfloat16 | 1 x {length} | {finding.root} | {took:.1f} | {peak / held:.2f} |")
            del reference, candidate, finding
            torch.cuda.empty_cache()


def main() -> int:
    torch.set_num_threads(2)
    print(f"{machine()}, torch {torch.__version__}\n")
    on_cpu()
    if torch.cuda.is_available():
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
        on_gpu()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
