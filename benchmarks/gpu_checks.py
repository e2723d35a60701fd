"""Whether recording on a GPU keeps its promises: it waits for nothing, changes nothing, and stays within its memory.

    PYTHONPATH=src python3 -m benchmarks.gpu --only checks

Each check prints one line, "ok" or "FAILED", and the next one runs in any case.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import layerscope as ls
from layerscope.recorder.gpu.transfer import transfer_of

LAYERS = "model.layers.*"
EVERYTHING = ["**:input", "**:output", ".:output"]
WITH_GRADIENTS = "**:*"
KINDS: dict[str, dict[str, Any]] = {"tensors": {}, "full statistics": {"keep": "summary"}}

RING = 4 << 30
SPARE = 64e6  # bytes that summaries may take of the device, if two per cent of the plain run are not more
BUSY = 10_000_000  # cycles: about 6 ms
SYNCHRONISED = "called a synchronizing CUDA operation"


def report(model: Any) -> bool:
    """Run every check, those of memory on the large `model`; return whether all of them held."""
    checks: dict[str, Callable[[], str]] = {}
    for kind, options in KINDS.items():
        for train in (False, True):
            name = f"synchronisations of a {'training step' if train else 'forward'}, {kind} of everything"
            checks[name] = partial(synchronisations, options, train=train)
    checks["the check for synchronisations can fail"] = a_synchronising_hook
    for in_place, sizes in ((True, {"64 KiB": 64, "3 MiB": 3072}), (False, {"64 KiB": 64, "1 MiB": 1024})):
        for size, rows in sizes.items():
            name = f"bits of 1,000 steps, {size} tensors {'changed in place' if in_place else 'taken together'}"
            checks[name] = partial(a_thousand_steps, rows=rows, in_place=in_place)
    for kind, options in KINDS.items():
        checks[f"outputs, loss and gradients, {kind} of everything"] = partial(training_bits, options)
    summaries: dict[str, tuple[Any, dict[str, Any]]] = {
        "full statistics of every input and output": (EVERYTHING, {}),
        "moments of every input and output": (EVERYTHING, {"statistics": "moments"}),
        "full statistics of 24 layers": (LAYERS, {}),
    }
    for shape in ((4, 2048), (1, 512)):
        for name, (taps, options) in summaries.items():
            what = f"device memory at {shape[0]} x {shape[1]}, {name}"
            checks[what] = partial(device_memory, model, taps, options, shape)
    checks["host memory, tensors of 24 layers"] = partial(host_memory, model)
    print("### checks\n", flush=True)
    done = [held(name, check) for name, check in checks.items()]
    return all(done)


def held(name: str, check: Callable[[], str]) -> bool:
    """Run one check and print how it went."""
    try:
        said = check()
    except Exception as error:
        print(f"FAILED {name}: {why(error)}", flush=True)
        return False
    print(f"ok {name}: {said}", flush=True)
    return True


def why(error: Exception) -> str:
    """Say what went wrong, on one line."""
    said = " ".join(str(error).split())
    return said if isinstance(error, AssertionError) and said else f"{type(error).__name__}: {said}"


def lost(rec: ls.Recording, *, due: bool = True) -> str:
    """Say what a recording lost, or missed although it was `due`; empty when that is nothing."""
    done = rec.completeness
    found = [*done.dropped, *(done.missing if due else ())]
    return f"{len(found)} points are incomplete, the first: {found[0]}" if found else ""


def first(value: Any) -> torch.Tensor:
    """Return the tensor that a layer gives, alone or before others."""
    return value[0] if isinstance(value, tuple) else value


@contextmanager
def hooks_on(modules: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Synchronising ----------------------------------------------------------------------------------


def synchronisations(options: dict[str, Any], *, train: bool) -> str:
    """A recorded step makes as many synchronisations as a plain one, from the first on."""
    step, model = small_step(train=train)
    step()
    plain = counted(step)
    with ls.record(
        model, WITH_GRADIENTS if train else EVERYTHING, **options, options=ls.RecordOptions(weights=False)
    ) as rec:
        recorded = counted(step)
    assert rec.completeness.records > 0, "nothing was recorded"
    assert not rec.completeness.dropped, lost(rec)
    assert recorded == plain, f"{recorded} in three steps, {plain} in plain ones"
    return f"{recorded} in three steps, as in plain ones; {rec.completeness.records} records"


def a_synchronising_hook() -> str:
    step, model = small_step(train=False)
    step()
    plain = counted(step)

    def wait(module: nn.Module, args: Any, out: Any) -> None:
        first(out).sum().item()

    with hooks_on(model.model.layers[:1], wait):
        hooked = counted(step)
    assert hooked >= plain + 3, f"{hooked} in three steps with an .item() each, {plain} without: they are not seen"
    return f"{hooked} in three steps with an .item() each, {plain} without"


def counted(step: Callable[[], object], *, steps: int = 3) -> int:
    """Count the synchronisations that torch notices."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return sum(SYNCHRONISED in str(warning.message) for warning in caught)


def small(*, attention: str) -> LlamaForCausalLM:
    """Hidden 256, two layers, vocabulary 1000, bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1000, max_position_embeddings=512, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def small_step(*, train: bool, attention: str = "sdpa") -> tuple[Callable[[], Any], LlamaForCausalLM]:
    """Return a step of the small model, which returns the model's output, and the model."""
    model = small(attention=attention)
    ids = torch.randint(0, 1000, (2, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def step() -> Any:
        if not train:
            with torch.no_grad():
                return model(input_ids=ids, use_cache=False)
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        return out

    return step, model


# Bits -------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Four layers whose outputs, and what they were given, may be changed in place right after."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.in_place:
                x += layer(x).tanh_()
            else:
                x = x + layer(x).tanh()
        return x


def a_thousand_steps(*, rows: int, in_place: bool, steps: int = 1000) -> str:
    """What is recorded of a busy device is what a clone in a plain hook is, and memory is used again and again."""
    torch.manual_seed(0)
    model = Residual(in_place=in_place).to("cuda")
    cloned: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    same = 0

    def take(run: Any) -> None:
        kept.extend(entry.tensor().clone() for entry in run.records())  # a clone lets go of page-locked memory

    def compare() -> int:
        number = len(kept)
        for place, (mine, theirs) in enumerate(zip(kept, cloned, strict=False)):
            step, layer = divmod(same + place, len(model.layers))
            assert same_bits(mine, theirs.cpu()), f"layer {layer} at step {step} is not what it was"
        del kept[:], cloned[:number]
        return number

    with hooks_on(model.layers, lambda module, args, out: cloned.append(out.clone())), torch.no_grad():
        with ls.record(model, "layers.*", options=ls.RecordOptions(weights=False)) as rec:
            for step in range(steps):
                if step % 10 == 5:
                    torch.cuda._sleep(BUSY)
                model(torch.randn(rows, 256, device="cuda"))
                take(rec.take(leave=1))
                if step % 50 == 49:
                    same += compare()
        take(rec.run)
        same += compare()
    assert same == steps * len(model.layers), f"{same} of {steps * len(model.layers)} tensors were recorded"
    assert not cloned, f"{len(cloned)} tensors were not recorded"
    assert not lost(rec), lost(rec)
    return f"{same} tensors, all as cloned in a hook"


def training_bits(options: dict[str, Any]) -> str:
    """A training step gives the same bits with and without recording."""
    step, model = small_step(train=True, attention="eager")  # whose gradients do not depend on who comes first

    def results(recording: Any) -> dict[str, torch.Tensor]:
        with recording:
            out = step()
        found = {"logits": out.logits, "loss": out.loss, **{name: p.grad for name, p in model.named_parameters()}}
        return {name: value.detach().clone() for name, value in found.items()}

    plain, again = results(nullcontext()), results(nullcontext())
    assert not (others := differing(plain, again)), f"plain steps differ from each other: {others}"
    recording = ls.record(model, WITH_GRADIENTS, **options, options=ls.RecordOptions(weights=False))
    recorded = results(recording)
    assert recording.completeness.records > 0, "nothing was recorded"
    assert not (others := differing(plain, recorded)), f"{len(others)} differ: {others[:5]}"
    return f"{len(plain)} tensors of a training step, {recording.completeness.records} records"


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not same_bits(a[name], b[name])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# Memory -----------------------------------------------------------------------------------------


def prefill(model: Any, *, shape: tuple[int, int] = (4, 2048)) -> Callable[[], None]:
    ids = torch.randint(0, 32000, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return step


def device_memory(model: Any, taps: Any, options: dict[str, Any], shape: tuple[int, int]) -> str:
    """Summaries of a prefill take little of the device, from the first step on, and where small tensors are held."""
    step, steps = prefill(model, shape=shape), 3 if shape[0] > 1 else 20
    plain = peak(step, steps=steps)
    with ls.record(model, taps, keep="summary", **options, options=ls.RecordOptions(weights=False)) as rec:
        most = peak(step, steps=steps)
    assert not lost(rec), lost(rec)
    said = f"{(most - plain) / 1e6:.1f} MB over the {plain / 1e6:.0f} MB of the plain run"
    assert most - plain <= max(0.02 * plain, SPARE), said
    return said


def peak(step: Callable[[], object], *, steps: int = 3) -> int:
    """Return the most bytes that were allocated on the device at one time."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def host_memory(model: Any, *, steps: int = 30) -> str:
    """Full tensors of prefill after prefill, released per step, stay within the page-locked ring."""
    step = prefill(model)
    most = early = 0
    with ls.record(model, LAYERS, options=ls.RecordOptions(weights=False)) as rec:
        for number in range(steps):
            step()
            rec.take(leave=1)
            most = max(most, locked())
            if number == 4:
                early = resident()
        grown = resident() - early
    assert not lost(rec), lost(rec)
    said = f"{most >> 20} MiB page-locked at most, {grown / 2**20:+.0f} MiB resident since the fifth of {steps} steps"
    assert 0 < most <= RING, said
    assert grown <= RING, said
    return said


def locked() -> int:
    """Return how many bytes are page-locked for copies of the current device."""
    pinned = transfer_of(torch.device("cuda", torch.cuda.current_device())).pinned
    return 0 if pinned is None else pinned.total


def resident() -> int:
    """Return how many bytes of the process are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
