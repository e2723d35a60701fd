"""What taps cost in compiled models: every decoder layer tapped, against the same artefact untapped.

Compiled in (`layerscope.compile`), and after the fact (`record` of a file that was made without us, into memory). The
copy of each tap and the Python around a call are included. CPU time, the two interleaved in one process, one thread.
`python -m benchmarks.compiled torchscript export --rounds 5` runs some, shorter. The limits are those we promise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import layerscope as ls
from benchmarks.timing import interleave, machine, table
from layerscope.runtimes import opened

LIMITS = {"inductor": 1.05, "aoti": 1.05, "torchscript": 1.08, "export": 1.10, "onnx": 1.08}
AFTER = {"torchscript": 1.12, "export": 1.10, "onnx": 1.08}
SIZES = {"Llama, hidden 768, 4 layers, 128 tokens": (768, 128), "Llama, hidden 256, 4 layers, 64 tokens": (256, 64)}


def main() -> int:
    parser = argparse.ArgumentParser(description="What taps cost in compiled models.")
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help=", ".join(LIMITS))
    parser.add_argument("--rounds", type=int, default=31)
    asked = parser.parse_args()
    unknown = set(asked.backends) - set(LIMITS)
    if unknown:
        parser.error(f"no backend called {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread\n")
    over = False
    for at, (title, (hidden, length)) in enumerate(SIZES.items()):
        for backend in asked.backends or LIMITS:
            for measured, limits in ((compiled_in, LIMITS), (after_the_fact, AFTER)):
                if backend in limits:
                    ratio = measured(backend, title, hidden, length, asked.rounds)
                    limit = f" (limit {limits[backend]:.2f})" if at == 0 else " (reported)"
                    print(f"{backend}, {measured.__name__}: CPU ratio {ratio:.3f}{limit}\n", flush=True)
                    over = over or (at == 0 and ratio > limits[backend])
    return 1 if over else 0


def compiled_in(backend: str, title: str, hidden: int, length: int, rounds: int) -> float:
    """Print the table of one backend; return the ratio of CPU times."""
    model, ids = llama(hidden), torch.arange(length)[None] % 1000
    inputs = {"input_ids": ids, "use_cache": False}
    compiled = {
        name: ls.compile(model, inputs, backend=backend, record_layer_outputs=record, observer="skip", dynamic=False)
        for name, record in (("untapped", False), ("tapped, 4 layers, embedding, logits", True))
    }
    with torch.no_grad():
        for each in compiled.values():
            each(**inputs)
        variants = {name: (lambda run=run: run(**inputs)) for name, run in compiled.items()}
        rows = interleave(variants, against="untapped", rounds=rounds, warmup=3)
    print(table(f"{backend}, compiled in: {title}, float32", rows))
    return rows[-1].cpu_ratio


def after_the_fact(kind: str, title: str, hidden: int, length: int, rounds: int) -> float:
    """Print the table of one kind of file; return the ratio of CPU times."""
    ids = torch.arange(length)[None] % 1000
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = saved(kind, Logits(hidden).eval(), ids, Path(folder))
        untapped = untapped_call(kind, path)
        with ls.record(path, "model.model.layers.*") as rec:
            variants = {"untapped": lambda: untapped(ids), "recorded, 4 layers": lambda: rec.model(ids)}
            rows = interleave(variants, against="untapped", rounds=rounds, warmup=3)
    print(table(f"{kind}, after the fact: {title}, float32", rows))
    return rows[-1].cpu_ratio


class Logits(nn.Module):
    """Token ids to logits: what is traced and exported."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.model = llama(hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def saved(kind: str, model: nn.Module, ids: torch.Tensor, folder: Path) -> Path:
    """Save the model as anybody would, without layerscope."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracer and exporter, about themselves
        if kind == "torchscript":
            torch.jit.save(torch.jit.trace(model, (ids,), check_trace=False), folder / "model.pt")
            return folder / "model.pt"
        if kind == "export":
            torch.export.save(torch.export.export(model, (ids,)), folder / "model.pt2")
            return folder / "model.pt2"
        torch.onnx.export(model, (ids,), folder / "model.onnx", dynamo=True, verbose=False)
        return folder / "model.onnx"


def untapped_call(kind: str, path: Path) -> Callable[[torch.Tensor], object]:
    """Return what runs the file with the library that made it."""
    if kind == "torchscript":
        return opened(path)
    if kind == "export":
        return opened(path).module()
    session = opened(path).session()
    return lambda ids: session.run({session.inputs[0]: ids})


def llama(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(hidden * 8 / 3),
        num_hidden_layers=4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=1000,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    sys.exit(main())
