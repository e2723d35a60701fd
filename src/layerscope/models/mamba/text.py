"""Samples of bundled text as tokens, the same on every machine.

    for ids in sample_batches(10, 512, split="recorded"):
        model(ids)

A token is a byte. What is calibrated on and what is recorded come from different files (`excerpts/README.md`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from layerscope.errors import BadText

Split = Literal["calibration", "recorded"]


def sample_batches(num: int, seqlen: int, *, split: Split) -> list[torch.Tensor]:
    """Return `num` samples of `seqlen` tokens, each (1, seqlen), spread evenly over the text.

    Each text has about 130,000 bytes. Samples overlap only when more is asked for than that, and one that reaches the
    end of the text goes on at its beginning.
    """
    text = torch.frombuffer(bytearray(_file(split).read_bytes()), dtype=torch.uint8).long()
    return samples_of(text, num, seqlen)


def samples_of(ids: torch.Tensor, num: int, seqlen: int) -> list[torch.Tensor]:
    """Cut `num` samples of `seqlen` tokens from a row of token ids, as `sample_batches` does."""
    if num < 1 or seqlen < 1:
        raise BadText(f"{num} samples of {seqlen} tokens were asked for; there is at least 1 of each.")
    starts = torch.arange(num)[:, None] * len(ids) // num
    return list(ids[(starts + torch.arange(seqlen)) % len(ids)][:, None])


def excerpt(split: Split) -> str:
    """Return a bundled text, for a tokenizer."""
    return _file(split).read_text("utf-8")


def _file(split: Split) -> Path:
    return Path(__file__).parent / "excerpts" / f"{split}.txt"
