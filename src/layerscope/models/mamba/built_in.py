"""The two sizes of Mamba that come with layerscope.

    quamba_small()              # trained; its weights are in the package
    quamba_130m(seed=0)         # the shape of mamba-130m, weights drawn from the seed

Both read bytes: their vocabulary is 256, not the 50,280 words of the published 130m checkpoint. A prompt needs no
tokenizer then, and logits are no larger than the hidden states. What a layer computes does not depend on it.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.drawing import drawn_weights
from layerscope.models.mamba.mamba_config import MambaConfig
from layerscope.models.mamba.model import Mamba

LARGE = MambaConfig(hidden_size=768, time_step_rank=48)
SMALL = MambaConfig(hidden_size=128, time_step_rank=8)

_WEIGHTS = Path(__file__).parents[1] / "weights" / "quamba-small.safetensors"


def quamba_small() -> Mamba:
    """Return the trained model of 2.8 million parameters, in float32; `training/` says how it was trained."""
    return assembled(SMALL, load_file(_WEIGHTS), source=str(_WEIGHTS))


def quamba_130m(*, seed: int = 0) -> Mamba:
    """Return the model of 91 million parameters: mamba-130m's, less its table of words."""
    return assembled(LARGE, drawn_weights(LARGE, seed=seed), source="weights drawn from a seed")
