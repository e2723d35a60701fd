"""A model with its weights, its inputs and its settings, as the command line and the scripts ask for them.

ready = prepare("quamba-130m-w8a8", pretrained_dir="pretrained_models/pa-0.9999", calib_data_num=10)
ready.model, list(ready.batches()), ready.setting, ready.settings
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from layerscope.errors import BadModel, BadText
from layerscope.models import BUILT_IN, Inputs, Loaded, is_model, load_model
from layerscope.models.huggingface import Checkpoint
from layerscope.models.mamba import is_mamba, load_mamba, sample_batches
from layerscope.modes.kinds import kind_of
from layerscope.modes.registry import Setting
from layerscope.store.joining import SAMPLES

__all__ = ["CALIB_DATA_NUM", "CALIB_SEQLEN", "DEFAULT_DIR", "TOKENS_AT_ONCE", "Prepared", "alpha_in", "prepare"]

CALIB_DATA_NUM, CALIB_SEQLEN = 10, 512
# Of one forward: from 1,000 to 5,000 a token takes the same time, of 8,000 a quarter more. The default is one forward.
TOKENS_AT_ONCE = CALIB_DATA_NUM * CALIB_SEQLEN
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
    modes: bool = True,
    inputs: str | None = None,
    prompt: str | None = None,
    pretrained_dir: str | None = None,
    percentile_alpha: float | None = None,
    calib_data_num: int | None = None,
    calib_seqlen: int | None = None,
    usual: tuple[int, int] = (CALIB_DATA_NUM, CALIB_SEQLEN),
) -> Prepared:
    """Load the model that `text` names and what it is run on; `modes` says whether variants of it are wanted.

    Models with modes of their own are run on `calib_data_num` samples of `calib_seqlen` tokens of the text that comes
    with layerscope (`usual` where nobody says), others too when one of the two is given; `inputs` and `prompt` take
    their place. `pretrained_dir` is a folder with weights for a built-in model; `pa-0.9999` in its name is alpha,
    unless `percentile_alpha` says it.
    """
    found = _weighed(text, seed=seed, folder=pretrained_dir, modes=modes)
    loaded, notes = found.loaded, found.notes
    kind = kind_of(loaded.model)
    if kind is None and percentile_alpha is not None:
        raise _without_modes("--percentile_alpha", text)
    settings: dict[str, Any] = {}
    setting = Setting()
    if kind is not None:
        alpha = percentile_alpha or alpha_in(pretrained_dir or found.weights)
        setting = setting if alpha is None else Setting(percentile_alpha=alpha)
        settings |= {"weights": found.weights, "percentile_alpha": setting.percentile_alpha}
        settings |= {"pretrained_dir": pretrained_dir} if pretrained_dir is not None else {}
    sampled = calib_data_num is not None or calib_seqlen is not None
    if sampled and (inputs is not None or prompt is not None):
        raise BadText(
            "--calib_data_num and --calib_seqlen are of the text that is recorded without --inputs or --prompt."
        )
    if not sampled and (kind is None or inputs is not None or prompt is not None):
        batches = partial(loaded.batches, inputs=inputs, prompt=prompt)
        return Prepared(loaded, batches, setting, settings, notes)
    count = usual[0] if calib_data_num is None else calib_data_num
    length = usual[1] if calib_seqlen is None else calib_seqlen
    settings |= {SAMPLES: count, "calib_seqlen": length}
    return Prepared(loaded, partial(_sampled, loaded, count, length), setting, settings, notes)


def alpha_in(folder: str) -> float | None:
    """Return the alpha that a folder's name states, the innermost first; None where no name does.

    >>> alpha_in("pretrained_models/Quamba1-pa9999/pa-0.9995"), alpha_in("weights")
    (0.9995, None)
    """
    for part in reversed(Path(folder).parts):
        if match := _ALPHA.fullmatch(part):
            return float(match[1])
    return None


class _Weighed(NamedTuple):
    """A model, where its weights are from, and what is worth saying of them."""

    loaded: Loaded
    weights: str
    notes: tuple[str, ...] = ()


def _weighed(text: str, *, seed: int, folder: str | None, modes: bool) -> _Weighed:
    """Load the model with the weights of a folder, where one is given, instead of its own."""
    if folder is None:
        if modes and text not in BUILT_IN and is_mamba(Path(text)):
            # transformers' Mamba calls no stage that a quantised one could take the place of; layerscope's does.
            own = Checkpoint(load_mamba(Path(text)), Path(text))
            return _Weighed(Loaded(text, own.model, seed, encode=own.encode, speaks=True), text)
        return _Weighed(load_model(text, seed=seed), "built-in" if text in BUILT_IN else text)
    takes = text in BUILT_IN and BUILT_IN[text].load is not None
    if is_model(text) and not takes:
        raise _without_modes("--pretrained_dir", text)
    if Path(folder).is_dir():
        return _Weighed(load_model(text, seed=seed, weights=Path(folder)), folder)
    if takes and Path(folder) != Path(DEFAULT_DIR):
        raise BadModel(
            f"--pretrained_dir {folder!r} is not there; leave it out, and {text} runs with the weights that come with "
            "layerscope."
        )
    said = f"{folder} is not there: {text} runs with the weights that come with layerscope"
    return _Weighed(load_model(text, seed=seed), "built-in", (said,))


def _without_modes(flag: str, text: str) -> BadModel:
    return BadModel(
        f"{flag} is for models with modes of their own, which {text!r} is not; a checkpoint folder is given as MODEL."
    )


def _sampled(loaded: Loaded, count: int, length: int) -> Iterator[Inputs]:
    """Yield the samples a few at a time, each batch as (samples, tokens); the same batches for every mode."""
    if loaded.name not in BUILT_IN and kind_of(loaded.model) is None:
        raise BadModel(
            f"samples of text are cut for built-in models, which {loaded.name!r} is not; leave out their number and "
            "length, and it runs on inputs of its own."
        )
    samples = torch.cat(sample_batches(count, length, split="recorded"))
    return (Inputs((few,)) for few in torch.split(samples, max(1, TOKENS_AT_ONCE // length)))
