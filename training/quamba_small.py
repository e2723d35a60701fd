"""Train `quamba-small` on the Python standard library's sources, on one GPU.

    python -m training.quamba_small --minutes 8 --to FOLDER [--sources FOLDER]

Leaves `quamba-small.safetensors` (bfloat16), `quamba_small.csv` (the log of losses) and `quamba_small.log` (what it was
trained on and how it does on held-out text against a trigram model) in the folder.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F  # noqa: N812

from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.built_in import SMALL
from layerscope.models.mamba.drawing import drawn_weights
from layerscope.models.mamba.model import Mamba
from training.corpus import read_corpus
from training.trigram import Trigram

WINDOW = 512
BATCH = 64
PEAK_RATE, LAST_RATE, WARMUP = 4e-3, 1e-5, 100
DECAY = 0.1


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=8.0)
    options.add_argument("--to", type=Path, required=True)
    options.add_argument("--sources", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    options.add_argument("--batch", type=int, default=BATCH)
    args = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    args.to.mkdir(parents=True, exist_ok=True)

    with (args.to / "quamba_small.log").open("w") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
        say(f"{name}, torch {torch.__version__}, Python {platform.python_version()}")
        corpus = read_corpus(args.sources)
        say(f"{args.sources.name}: {corpus}")
        model = assembled(SMALL, drawn_weights(SMALL, seed=0), source="weights drawn from a seed").to(device).train()
        say(f"model: {SMALL}, {sum(p.numel() for p in model.parameters()):,} parameters")
        held_out = windows(corpus.held_out)
        trigram = float(Trigram.of(corpus.train).bits(held_out).mean())
        say(f"trigram with Witten-Bell backoff on held-out text: {trigram:.4f} bits per byte")

        with (args.to / "quamba_small.csv").open("w") as csv:
            csv.write("step,seconds,bytes,train_bits_per_byte,held_out_bits_per_byte\n")
            for line in train(model, corpus.train, held_out, minutes=args.minutes, batch=args.batch):
                print(line, flush=True)
                csv.write(line + "\n")
                csv.flush()

        weights = {
            key: value.detach().to(torch.bfloat16).cpu().contiguous() for key, value in model.state_dict().items()
        }
        del weights["lm_head.weight"]  # the embeddings, seen from the other end
        save_file(weights, args.to / "quamba-small.safetensors", metadata={"format": "pt"})
        model.load_state_dict(weights, strict=False)
        mine = mean_bits(model, held_out)
        say(f"quamba-small, rounded to bfloat16, on held-out text: {mine:.4f} bits per byte")
        say(f"that is {trigram - mine:.4f} bits per byte better than the trigram model")
    return 0 if mine < trigram else 1


def train(model: Mamba, text: bytes, held_out: np.ndarray, *, minutes: float, batch: int) -> Iterator[str]:
    """Train for so many minutes, and yield a line of the log now and then.

    The learning rate follows the clock: it rises over the first steps and falls as a cosine to the end of the time.
    """
    device = next(model.parameters()).device
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.endswith("A_log")]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or name.endswith("A_log")]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    offsets = torch.arange(WINDOW + 1, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    began, step, losses = time.monotonic(), 0, []
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        rate = LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP)
        starts = torch.randint(len(data) - WINDOW, (batch, 1), device=device, generator=generator)
        ids = data[starts + offsets].long()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        step += 1
        if step % 100 == 0 or step == 10:
            learnt = torch.stack(losses).mean().item() / math.log(2)
            checked = mean_bits(model, held_out[:: max(1, len(held_out) // 128)])
            seconds = time.monotonic() - began
            yield f"{step},{seconds:.1f},{step * batch * WINDOW},{learnt:.4f},{checked:.4f}"
            losses.clear()
            if not math.isfinite(learnt):
                raise FloatingPointError(f"the loss is {learnt} at step {step}; a lower learning rate may help.")


def windows(text: bytes) -> np.ndarray:
    """Cut a text into windows, (number, 512)."""
    return np.frombuffer(text, np.uint8)[: len(text) // WINDOW * WINDOW].reshape(-1, WINDOW)


@torch.no_grad()
def mean_bits(model: Mamba, texts: np.ndarray) -> float:
    """Return the model's bits per byte over the bytes from the third of each window on, the trigram model's too."""
    device = next(model.parameters()).device
    total = 0.0
    for some in np.array_split(texts, math.ceil(len(texts) / 64)):
        ids = torch.from_numpy(some.copy()).to(device).long()
        logits = model(ids)[:, 1:-1]
        total += F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten(), reduction="sum").item()
    return total / math.log(2) / (len(texts) * (WINDOW - 2))


if __name__ == "__main__":
    sys.exit(main())
