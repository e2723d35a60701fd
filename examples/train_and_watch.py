"""Train a small transformer on text that is always at hand, and watch what its layers do.

    python examples/train_and_watch.py                      # half a minute, no network
    python examples/train_and_watch.py --to runs/watched    # and keep statistics and maps: layerscope show runs/watched

The text is the source of Python's own argparse, byte by byte. The first training is healthy: every layer is watched at
every tenth step, and the attention of one block is drawn at three epochs. In the second, the learning rate jumps to a
thousandfold in the middle, as a faulty schedule would have it; a rule names the layer and stops.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from layerscope import Tap, batches, epochs
from layerscope.errors import Stopped
from layerscope.monitor.watching import Watch, watch
from layerscope.rules import Alarm, Frame, dead, exploding, nonfinite, saturated, stuck, vanishing

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 64, 4, 3, 64, 16
EPOCHS = 6
SHOWN = 28  # bytes of the map that is drawn
SHADES = " .:-=+*#%@"


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        # need_weights: the map is computed, and returned beside the output, where `watch` can see it.
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=True, average_attn_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predict the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).triu(1).bool())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return self.head(self.norm(x))


class Terminal:
    """A sink that draws attention maps as they come, and says what is wrong."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def write(self, frame: Frame) -> None:
        for name, weights in frame.images.items():
            print(f"\nattention of {name} at {frame.moment}: mean of {len(weights)} heads, a query in each row")
            print(drawn(weights.mean(0), self.text))

    def alarm(self, alarm: Alarm) -> None:
        print(f"alarm: {alarm}")

    def close(self) -> None:
        print(flush=True)


def drawn(weights: torch.Tensor, text: torch.Tensor) -> str:
    """Draw a map in ten shades, each row from nothing to its largest weight."""
    shown = weights[:SHOWN, :SHOWN]
    shades = (shown / shown.amax(-1, keepdim=True) * (len(SHADES) - 1)).round().int().tolist()
    letters = [chr(byte) if 32 < byte < 127 else "·" for byte in text[:SHOWN].tolist()]
    rows = [f"{letter} |{''.join(SHADES[s] for s in row)}|" for letter, row in zip(letters, shades, strict=True)]
    return "\n".join([f"   {''.join(letters)}", *rows])


def train(
    watching: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
    *,
    steps: int,
    fault: int = -1,
) -> None:
    """Train on random cuts of the text; the first sample is always its beginning, so that maps can be compared.

    In the middle of epoch `fault`, the learning rate becomes a thousand times what it was.
    """
    generator = torch.Generator().manual_seed(0)
    for epoch in range(EPOCHS):
        watching.moment(epoch=epoch)
        total = 0.0
        for step in range(steps):
            starts = torch.randint(0, len(text) - CONTEXT, (BATCH,), generator=generator)
            starts[0] = 0
            cuts = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
            loss = functional.cross_entropy(model(cuts[:, :-1]).flatten(0, 1), cuts[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            if (epoch, step) == (fault, steps // 2):
                for group in optimizer.param_groups:
                    group["lr"] *= 1000
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / steps:.3f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the training, to see that it works")
    parser.add_argument("--to", type=Path, help="keep statistics and maps in this run")
    options = parser.parse_args(argv)
    logging.getLogger("layerscope").setLevel(logging.ERROR)  # the sink says it already
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    steps = 8 if options.quick else 80
    torch.set_num_threads(1)  # a model this small is slower on several
    began = time.perf_counter()

    model, optimizer = fresh()
    rules = [nonfinite(), exploding(), vanishing(), dead(), saturated(), stuck()]
    maps = Tap(f"blocks.{BLOCKS - 1}.attn", when=epochs(0, EPOCHS // 2, EPOCHS - 1) & batches(0))
    with watch(
        model, optimizer, every=10, gradients=True, attention=maps, rules=rules, sinks=[Terminal(text)], to=options.to
    ) as watching:
        train(watching, model, optimizer, text, steps=steps)
    said = f"{len(watching.alarms)} alarms" if watching.alarms else "no alarm"
    print(f"the healthy training raised {said}")

    print("\nonce more, and the learning rate jumps in the middle of epoch 1")
    model, optimizer = fresh()
    try:
        with watch(
            model, optimizer, rules=[exploding(limit=100.0, growth=20.0, action="stop"), nonfinite()]
        ) as watching:
            train(watching, model, optimizer, text, steps=steps, fault=1)
    except Stopped as stopped:
        print(f"caught: {stopped}")
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    return 0 if watching.alarms else 1


def fresh() -> tuple[Transformer, torch.optim.Optimizer]:
    """Return the same model every time, untrained."""
    torch.manual_seed(0)
    model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


if __name__ == "__main__":
    raise SystemExit(main())
