"""What the tests of `native/` play: a step of the recorder's, and tensors."""

from __future__ import annotations

import torch


class Step:
    """A step, as the recorder makes them."""

    def __init__(self, requests):
        self.calls = {}
        self.moments = {}
        self.requests = requests

    def at(self, call):
        return self.moments.setdefault(call, f"call {call}")


def bits(count):
    return torch.arange(count, dtype=torch.float32)
