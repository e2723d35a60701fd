"""The sizes of a Mamba, under the names of a Hugging Face `config.json`.

MambaConfig(hidden_size=768, num_hidden_layers=24)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """What decides the shape of every weight; the defaults are those of the state-spaces checkpoints, over bytes."""

    vocab_size: int = 256
    hidden_size: int = 768
    num_hidden_layers: int = 24
    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    time_step_rank: int = 48
    layer_norm_epsilon: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = True
    tie_word_embeddings: bool = True

    @property
    def intermediate_size(self) -> int:
        """The number of channels that are convolved and scanned."""
        return self.expand * self.hidden_size
