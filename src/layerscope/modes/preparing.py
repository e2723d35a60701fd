"""A model with its weights, its inputs and its settings, as the command line and the scripts ask for them.

ready = prepare("quamba-130m-w8a8", pretrained_dir="pretrained_models/pa-0.9999", calib_data_num=10)
ready.model, list(ready.batches()), ready.setting, ready.settings
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from layerscope.errors import BadModel, BadText
from layerscope.models import BUILT_IN, Inputs, Loaded, load_model
from layerscope.models.mamba import load_mamba, sample_batches
from layerscope.modes.kinds import kind_of
from layerscope.modes.registry import Setting

__all__ = ["CALIB_DATA_NUM", "CALIB_SEQLEN", "DEFAULT_DIR", "Prepared", "alpha_in", "prepare"]

CALIB_DATA_NUM, CALIB_SEQLEN = 10, 512
# What the users' documents write; few of them have the folder.
DEFAULT_DIR = "pretrained_models/Quamba1-pa9999/pa-0.9999"

_ALPHA = re.compile(r"(?:.*[-_])?pa-(0?\.\d+|1(?:\.0+)?|0)")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What there is to record: a model and where it came from, its inputs, how its modes are made.

    `batches` draws the inputs, when it is called; `settings` goes into every run; `notes` is for whoever is watching.
    """

    loaded: Loaded
    batches: Callable[[], Iterator[Inputs]]
    setting: Setting
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> Any:
        """The model that the modes are variants of, where it is a torch.nn.Module; files hold others."""
        return self.loaded.model


def prepare(
    text: str,
    *,
    seed: int = 0,
    inputs: str | None = None,
    prompt: str | None = None,
    pretrained_dir: str | None = None,
    percentile_alpha: float | None = None,
    calib_data_num: int | None = None,
    calib_seqlen: int | None = None,
    usual: tuple[int, int] = (CALIB_DATA_NUM, CALIB_SEQLEN),
) -> Prepared:
    """Load the model that `text` names and what it is run on.

    Models with modes of their own are run on `calib_data_num` samples of `calib_seqlen` tokens of the text that comes
    with layerscope (`usual` where nobody says), others too when one of the two is given; `inputs` and `prompt` take
    their place. `pretrained_dir` is a folder with weights for a built-in model; `pa-0.9999` in its name is alpha,
    unless `percentile_alpha` says it.
    """
    loaded = load_model(text, seed=seed)
    kind = kind_of(loaded.model)
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if kind is None and (pretrained_dir is not None or percentile_alpha is not None):
        raise BadModel(
            f"--pretrained_dir and --percentile_alpha are for models with modes of their own, which {text!r} is not; "
            "a checkpoint folder is given as MODEL."
        )
    if kind is not None:
        loaded, weights, said = _with_weights(loaded, pretrained_dir)
        notes += said
        alpha = percentile_alpha or (alpha_in(pretrained_dir) if pretrained_dir is not None else None)
        setting = Setting() if alpha is None else Setting(percentile_alpha=alpha)
        settings |= {"weights": weights, "percentile_alpha": setting.percentile_alpha}
        settings |= {"pretrained_dir": pretrained_dir} if pretrained_dir is not None else {}
    else:
        setting = Setting()
    sampled = calib_data_num is not None or calib_seqlen is not None
    if sampled and (inputs is not None or prompt is not None):
        raise BadText(
            "--calib_data_num and --calib_seqlen are of the text that is recorded without --inputs or --prompt."
        )
    if not sampled and (kind is None or inputs is not None or prompt is not None):
        batches = partial(loaded.batches, inputs=inputs, prompt=prompt)
        return Prepared(loaded, batches, setting, settings, tuple(notes))
    count = usual[0] if calib_data_num is None else calib_data_num
    length = usual[1] if calib_seqlen is None else calib_seqlen
    settings |= {"calib_data_num": count, "calib_seqlen": length}
    return Prepared(loaded, partial(_sampled, loaded, count, length), setting, settings, tuple(notes))


def alpha_in(folder: str) -> float | None:
    """Return the alpha that a folder's name states, the innermost first; None where no name does.

    >>> alpha_in("pretrained_models/Quamba1-pa9999/pa-0.9995"), alpha_in("weights")
    (0.9995, None)
    """
    for part in reversed(Path(folder).parts):
        if match := _ALPHA.fullmatch(part):
            return float(match[1])
    return None


def _with_weights(loaded: Loaded, folder: str | None) -> tuple[Loaded, str, list[str]]:
    """Put the weights of a folder into a model; return where they are from, and what is worth saying."""
    if folder is None:
        return loaded, "built-in", []
    if not Path(folder).is_dir():
        if Path(folder) == Path(DEFAULT_DIR):
            said = f"{folder} is not there: {loaded.name} runs with the weights that come with layerscope"
            return loaded, "built-in", [said]
        raise BadModel(
            f"--pretrained_dir {folder!r} is not there; leave it out, and {loaded.name} runs with the weights that "
            "come with layerscope."
        )
    return replace(loaded, model=load_mamba(Path(folder))), folder, []


def _sampled(loaded: Loaded, count: int, length: int) -> Iterator[Inputs]:
    """Yield all samples as one batch, so that a recorded tensor has them all: (samples, tokens, ...)."""
    if loaded.name not in BUILT_IN and kind_of(loaded.model) is None:
        raise BadModel(
            f"--calib_data_num and --calib_seqlen cut samples of bytes for built-in models, which {loaded.name!r} is "
            "not; give --prompt or --inputs."
        )
    return iter([Inputs((torch.cat(sample_batches(count, length, split="recorded")),))])
