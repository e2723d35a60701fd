"""A Mamba put together from its sizes and its weights, with every weight in its place.

model = assembled(config, weights, source="folder/model.safetensors")
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from layerscope.errors import BadModel
from layerscope.models.mamba.mamba_config import MambaConfig
from layerscope.models.mamba.model import Mamba
from layerscope.report.writing import some

_HEAD, _EMBEDDINGS = "lm_head.weight", "backbone.embeddings.weight"


def assembled(config: MambaConfig, weights: Mapping[str, torch.Tensor], *, source: str) -> Mamba:
    """Return the model in float32 and evaluation mode; `source` is named when the weights do not fit.

    A weight that is missing is an error, never drawn at random: a recording of that would look like one of the model.
    """
    wanted = shapes(config)
    # A tied head is the embeddings seen from the other end; some writers store it twice.
    given = {name: w for name, w in weights.items() if name != _HEAD or not config.tie_word_embeddings}
    if missing := [name for name in wanted if name not in given]:
        raise BadModel(
            f"{source!r} lacks {some(missing)} of a Mamba with {_sizes(config)}; save the whole model again."
        )
    if unknown := [name for name in given if name not in wanted]:
        raise BadModel(
            f"{source!r} has {some(unknown)}, for which a Mamba with {_sizes(config)} has no place; "
            "the config.json beside it may belong to another model."
        )
    if misshapen := [name for name in wanted if tuple(given[name].shape) != wanted[name]]:
        name = misshapen[0]
        raise BadModel(
            f"{source!r} has {name} of shape {tuple(given[name].shape)}, and a Mamba with {_sizes(config)} takes "
            f"{wanted[name]}; the config.json beside it may belong to another model."
        )
    model = _hollow(config)
    model.load_state_dict({name: w.to(torch.float32) for name, w in given.items()}, strict=False, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.backbone.embeddings.weight
    return model.eval()


def shapes(config: MambaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name; a tied head is not one of them."""
    return {name: tuple(parameter.shape) for name, parameter in _hollow(config).named_parameters()}


def _hollow(config: MambaConfig) -> Mamba:
    with torch.device("meta"):  # no memory, and no draws from the caller's random state
        return Mamba(config)


def _sizes(config: MambaConfig) -> str:
    return f"{config.num_hidden_layers} layers of width {config.hidden_size}"
