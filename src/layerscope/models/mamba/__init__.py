"""A built-in state-space model in plain torch, with trained weights of its own.

    model = quamba_small()
    logits = model(torch.tensor([list(b"hello")]))

To import this package loads torch.
"""

from __future__ import annotations

from layerscope.models.mamba.built_in import quamba_130m, quamba_small
from layerscope.models.mamba.checkpoint import is_mamba, is_state_spaces, load_mamba
from layerscope.models.mamba.mamba_config import MambaConfig
from layerscope.models.mamba.model import CausalConv, Mamba, MambaBlock, Mixer, RMSNorm, Scan
from layerscope.models.mamba.scan import selective_scan
from layerscope.models.mamba.text import sample_batches, samples_of
from layerscope.models.mamba.w8a8 import Grids

__all__ = [
    "CausalConv",
    "Grids",
    "Mamba",
    "MambaBlock",
    "MambaConfig",
    "Mixer",
    "RMSNorm",
    "Scan",
    "is_mamba",
    "is_state_spaces",
    "load_mamba",
    "quamba_130m",
    "quamba_small",
    "sample_batches",
    "samples_of",
    "selective_scan",
]
