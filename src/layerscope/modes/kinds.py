"""The modes that a model has of its own, beside the generic ones.

own_modes(model)                # () for all but layerscope's Mamba
"""

from __future__ import annotations

from functools import partial

from torch import nn

from layerscope.models.mamba import Mamba, sample_batches, samples_of
from layerscope.modes.quamba import QUAMBA_MODES, calibrate, quantised, stored_calibration, why_not
from layerscope.modes.registry import Mode, Setting

__all__ = ["QUAMBA", "own_modes"]

CALIBRATION = (8, 512)  # samples and tokens of each: scales of all the modes come from these, whatever is recorded
ESSENTIAL = ("0", "2-1", "2-2", "2-4")
BY_NAME = ("1",)  # an upper bound, not a way to run the model: in no group


def _quantised(model: nn.Module, setting: Setting, *, mode: str) -> nn.Module:
    assert isinstance(model, Mamba)
    if model.stored is not None:
        return quantised(model, mode, stored_calibration(model.stored))
    text = setting.calibration
    batches = sample_batches(*CALIBRATION, split="calibration") if text is None else samples_of(text, *CALIBRATION)
    return quantised(model, mode, calibrate(model, batches, percentile_alpha=setting.percentile_alpha))


def _quamba(name: str, about: str) -> Mode:
    groups = set() if name in BY_NAME else {"all", "quant_only"} | ({"essential"} if name in ESSENTIAL else set())
    return Mode(name, about, partial(_quantised, mode=name), why_not, frozenset(groups), quantised=True)


QUAMBA = tuple(_quamba(name, about) for name, about in QUAMBA_MODES.items())


def own_modes(model: nn.Module) -> tuple[Mode, ...]:
    """Return the modes of the model's own kind; none for one that has the generic modes alone."""
    return QUAMBA if isinstance(model, Mamba) else ()
