"""The hidden states of this thread's last call of a compiled model.

compiled(**inputs)
get_layer_hidden_states()           # the embedding, then each decoder layer that was asked for
"""

from __future__ import annotations

import threading

import torch


class _Last(threading.local):
    states: list[torch.Tensor] | None = None


_last = _Last()


def get_layer_hidden_states() -> list[torch.Tensor] | None:
    """Return what the last call on this thread computed: the embedding first, then the layers in order of depth.

    None before the first call, and after one of a model that was compiled with `record_layer_outputs=False`.
    """
    return None if _last.states is None else list(_last.states)


def remember(states: list[torch.Tensor] | None) -> None:
    """Take the place of what the last call on this thread left."""
    _last.states = states
