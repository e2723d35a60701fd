"""Which axis of an output holds a layer's units: the channels of a convolution, the features of a linear layer.

    unit_axes(model)            # {"conv": -2, "norm": 1, "head": -1}
    unit_axis(shape, known)     # of one output

A module's type tells, where it is one of torch's. What has no axis of its own (an activation, a container) has that of
the output before it, where the shape is the same; else the last, or the second of four axes and more.
"""

from __future__ import annotations

import torch
from torch import nn

from layerscope.runtimes import eager

_IMAGE = 4  # axes from which on the second is the units', where nothing else is known

# Channels stand before as many axes as the name says; a batch before them may be left out.
_SPATIAL = ("Conv", "ConvTranspose", "InstanceNorm", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
_CHANNELS = {getattr(nn, f"{kind}{n}d"): -1 - n for kind in _SPATIAL for n in (1, 2, 3)}
_SECOND = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)
_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.RNNBase)


def unit_axes(model: nn.Module) -> dict[str, int]:
    """Return the axis of the units for each module whose type tells."""
    found: dict[str, int] = {}
    for name, module in eager.modules_of(model).by_name.items():
        if isinstance(module, _SECOND):
            found[name] = 1
        elif isinstance(module, _LAST):
            found[name] = -1
        else:
            axes = (axis for kind, axis in _CHANNELS.items() if isinstance(module, kind))
            axis = next(axes, None)
            if axis is not None:
                found[name] = axis
    return found


def unit_axis(shape: torch.Size, known: int | None, before: tuple[torch.Size, int] | None = None) -> int:
    """Return the axis of the units of an output, from 0; `before` is the shape and the axis of the one before it."""
    if known is not None and -len(shape) <= known < len(shape):
        return known % len(shape)
    if before is not None and before[0] == shape:
        return before[1]
    return 1 if len(shape) >= _IMAGE else len(shape) - 1
