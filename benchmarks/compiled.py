"""What taps cost that are compiled in: each backend with every decoder layer tapped, against the same one untapped.

The clone of each tap and the Python around a call are included. CPU time, the two interleaved in one process.
`python -m benchmarks.compiled torchscript export --rounds 5` runs some, shorter. The limits are those we promise.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerscope as ls
from benchmarks.timing import interleave, machine, table

LIMITS = {"inductor": 1.05, "aoti": 1.05, "torchscript": 1.08, "export": 1.10, "onnx": 1.08}
SIZES = {"Llama, hidden 768, 4 layers, 128 tokens": (768, 128), "Llama, hidden 256, 4 layers, 64 tokens": (256, 64)}


def main() -> int:
    parser = argparse.ArgumentParser(description="What taps cost that are compiled in.")
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
            ratio = measured(backend, title, hidden, length, asked.rounds)
            limit = f" (limit {LIMITS[backend]:.2f})" if at == 0 else " (reported)"
            print(f"{backend}: CPU ratio {ratio:.3f}{limit}\n", flush=True)
            over = over or (at == 0 and ratio > LIMITS[backend])
    return 1 if over else 0


def measured(backend: str, title: str, hidden: int, length: int, rounds: int) -> float:
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
    print(table(f"{backend}: {title}, float32", rows))
    return rows[-1].cpu_ratio


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
