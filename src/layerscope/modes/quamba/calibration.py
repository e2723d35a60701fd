"""Static scales: what each INT8 site of a model sees on text it will not be measured on, clipped at a percentile.

    calibration = calibrate(model, batches, percentile_alpha=0.9999)
    calibration.layers[0].u                 # the step of the grid that layer 0's convolution rounds to

A site's scale is the alpha-quantile of |x| over everything it saw, exactly, over 127. What was calibrated is remembered
in the cache folder under everything that decides it: weights, token ids and alpha.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from layerscope.errors import BadText, Damaged, Unsupported
from layerscope.log import log
from layerscope.models.mamba import Grids, Mamba
from layerscope.modes.quamba.int8 import LIMIT
from layerscope.store import cache_folder, strictjson
from layerscope.store.address import LocalFolder
from layerscope.store.checksum import crc32c, text

# Counts up when other scales come of the same settings.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Scales:
    """The steps of one mixer's INT8 grids, by the tensor they are for.

    u is what the convolution gives and both x_proj and the scan take: one tensor, one grid.
    """

    in_proj: float
    conv1d: float
    u: float
    dt_proj: float
    delta: float
    B: float
    C: float
    out_proj: float


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides a calibration; weights and inputs by their fingerprints."""

    weights: str
    inputs: str
    samples: int
    tokens: int
    percentile_alpha: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The scales of each layer, and what they came of."""

    settings: Settings
    layers: tuple[Scales, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"settings": asdict(self.settings), "layers": [asdict(scales) for scales in self.layers]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """Read what `as_dict` gave; raises ValueError for anything else."""
        try:
            return cls(Settings(**values["settings"]), tuple(Scales(**layer) for layer in values["layers"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no calibration: {error}") from error


def calibrate(model: Mamba, batches: Sequence[torch.Tensor], *, percentile_alpha: float = 0.9999) -> Calibration:
    """Return the scales of `model` on `batches` of token ids, (samples, tokens) each; from the cache where it has them.

    Give it other text than what is recorded: scales that have seen the test are better than they will be in use.
    """
    if not 0 < percentile_alpha <= 1:
        raise BadText(
            f"percentile_alpha is {percentile_alpha:g}: it is the share of activations that is not clipped, above 0 "
            "and at most 1, such as 0.9999"
        )
    if not sum(ids.numel() for ids in batches):
        raise BadText("calibration was given no tokens; give at least one batch of token ids, (samples, tokens)")
    settings = Settings(
        weights=_fingerprint(model.state_dict(), repr(model.config)),
        inputs=_fingerprint({str(at): ids for at, ids in enumerate(batches)}),
        samples=sum(len(ids) for ids in batches),
        tokens=sum(ids.numel() for ids in batches),
        percentile_alpha=percentile_alpha,
    )
    place = _place(settings)
    known = None if place is None else _remembered(place, settings)
    if known is not None:
        return known
    found = Calibration(settings, _measured(model, batches, settings))
    if place is not None:
        _remember(place, found)
    return found


def stored_calibration(grids: Sequence[Grids]) -> Calibration:
    """Return the scales that a checkpoint in W8A8 states; nothing is measured.

    delta has no grid of its own there: it is INT8 where `dt_proj` gives it.
    """
    layers = tuple(
        Scales(
            in_proj=grid.inputs["in_proj"],
            conv1d=grid.inputs["conv1d"],
            u=grid.u,
            dt_proj=grid.inputs["dt_proj"],
            delta=grid.outputs["dt_proj"],
            B=grid.B,
            C=grid.C,
            out_proj=grid.inputs["out_proj"],
        )
        for grid in grids
    )
    return Calibration(Settings("stored", "stored", 0, 0, 1.0), layers)


# Measuring --------------------------------------------------------------------------------------


def _measured(model: Mamba, batches: Sequence[torch.Tensor], settings: Settings) -> tuple[Scales, ...]:
    """Run the float model over all batches, and keep of each site just enough to know its quantile."""
    sites = [
        {field.name: _Tail(f"backbone.layers.{at}.mixer: {field.name}", settings) for field in fields(Scales)}
        for at in range(len(model.backbone.layers))
    ]
    with ExitStack() as attached, torch.no_grad():
        for layer, tails in zip(model.backbone.layers, sites, strict=True):
            for stage, names in _TAKES.items():
                hook = _hook([tails[name] if name else None for name in names])
                attached.callback(getattr(layer.mixer, stage).register_forward_pre_hook(hook).remove)
        for ids in batches:
            model(ids)
    return tuple(Scales(**{name: tail.scale() for name, tail in tails.items()}) for tails in sites)


# What each stage of a mixer is called with, by the names of the scales; u is seen at x_proj.
_TAKES: dict[str, tuple[str | None, ...]] = {
    "in_proj": ("in_proj",),
    "conv1d": ("conv1d",),
    "x_proj": ("u",),
    "dt_proj": ("dt_proj",),
    "scan": (None, "delta", None, "B", "C"),
    "out_proj": ("out_proj",),
}


def _hook(tails: Sequence[_Tail | None]) -> Any:
    def see(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        for tail, tensor in zip(tails, args, strict=False):
            if tail is not None:
                tail.see(tensor)

    return see


@final
class _Tail:
    """The largest magnitudes of a site: as many as lie at or above the quantile, and no more."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self._largest: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def see(self, x: torch.Tensor) -> None:
        """Take in one batch."""
        sizes = x.detach().abs().flatten()
        if not math.isfinite(float(sizes.max())):
            raise Unsupported(
                f"{self._name} has values that are not finite, which no INT8 grid reaches; `layerscope record` with "
                "mode fp32 shows the layer they come from"
            )
        many = self._settings.tokens * x.shape[-1]
        keep = many - math.ceil(self._settings.percentile_alpha * many) + 1
        if len(self._largest) == keep:
            sizes = sizes[sizes > float(self._largest.min())]
        joined = np.concatenate((self._largest, sizes.cpu().numpy()))
        self._largest = np.partition(joined, -keep)[-keep:] if len(joined) > keep else joined

    def scale(self) -> float:
        """Return the step that puts the quantile on the last code, as float32 has it; 1 where all was zero."""
        quantile = self._largest.min()
        return float(quantile / np.float32(LIMIT)) if quantile > 0 else 1.0


# Remembering ------------------------------------------------------------------------------------


def _fingerprint(tensors: Mapping[str, torch.Tensor], said: str = "") -> str:
    digest = hashlib.sha256(said.encode())
    for name, tensor in tensors.items():
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _place(settings: Settings) -> Path | None:
    folder = cache_folder()
    key = hashlib.sha256(f"{_VERSION} {settings}".encode()).hexdigest()[:32]
    return None if folder is None else folder / f"{key}.calibration"


def _remembered(place: Path, settings: Settings) -> Calibration | None:
    """Return what the cache has for these settings; a damaged file is as good as none, and is said."""
    try:
        checksum, body = place.read_bytes().split(b"\n", 1)
        if checksum.decode() != text(crc32c(body)):
            raise Damaged("its checksum does not fit")
        known = Calibration.from_dict(strictjson.loads(body))
        if known.settings != settings:
            raise Damaged("it is of other settings")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the calibration remembered in %s cannot be used (%s); calibrating anew", place, error)
        return None
    return known


def _remember(place: Path, found: Calibration) -> None:
    body = strictjson.dumps(found.as_dict()).encode()
    with suppress(OSError):  # a full disk costs the next calibration its time, not this one its result
        LocalFolder(place.parent).put(place.name, text(crc32c(body)).encode() + b"\n" + body)
