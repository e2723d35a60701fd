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

import numpy as np
import torch

from layerscope.errors import BadModel, BadText
from layerscope.models import BUILT_IN, Inputs, Loaded, is_model, load_model
from layerscope.models.huggingface import is_checkpoint
from layerscope.models.inputs import read_inputs
from layerscope.models.loading import load_own_mamba
from layerscope.models.mamba import Mamba, is_mamba, sample_batches, samples_of
from layerscope.models.mamba.text import excerpt
from layerscope.models.tokenizer import BYTES, tokens_of
from layerscope.modes.registry import Setting
from layerscope.store.joining import SAMPLES

CALIB_DATA_NUM, CALIB_SEQLEN = 10, 512
# Of one forward: from 1,000 to 5,000 a token takes the same time, of 8,000 a quarter more. The default is one forward.
TOKENS_AT_ONCE = CALIB_DATA_NUM * CALIB_SEQLEN
# What the users' documents write; few of them have the folder.
DEFAULT_DIR = "pretrained_models/Quamba1-pa9999/pa-0.9999"

_ALPHA = re.compile(r"(?:.*[-_])?pa-(0?\.\d+|1(?:\.0+)?|0)")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What there is to record: a model and where it came from, its inputs, how its modes are made.

    `batches` draws the inputs, when it is called; `settings` goes into every run; `notes` are for the user.
    """

    loaded: Loaded
    batches: Callable[[], Iterator[Inputs]]
    setting: Setting
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ran: str = ""  # which weights run, in a sentence; empty for a model without modes of its own

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
    calib_file: str | None = None,
    calib_data_num: int | None = None,
    calib_seqlen: int | None = None,
    usual: tuple[int, int] = (CALIB_DATA_NUM, CALIB_SEQLEN),
) -> Prepared:
    """Load the model that `text` names and what it is run on; `modes` says whether variants of it are wanted.

    Models with modes of their own are run on `calib_data_num` samples of `calib_seqlen` tokens of `calib_file` or of
    the text that comes with layerscope (`usual` by default), others too when one of the two is given; `inputs`
    and `prompt` take their place. `pretrained_dir` is a folder with weights, itself or in a folder of the model's name;
    `pa-0.9999` in its name is alpha, unless `percentile_alpha` says it.
    """
    found = _weighed(text, seed=seed, folder=pretrained_dir, modes=modes)
    loaded, notes = found.loaded, found.notes
    own = isinstance(loaded.model, Mamba)  # it has modes of its own
    if not own and percentile_alpha is not None:
        raise _without_modes("--percentile_alpha", text)
    if not own and calib_file is not None:
        raise _without_modes("--calib_file", text)
    settings: dict[str, Any] = {}
    setting = Setting()
    given = inputs is not None or prompt is not None
    sampled = calib_data_num is not None or calib_seqlen is not None
    if sampled and given:
        raise BadText(
            "--calib_data_num and --calib_seqlen are of the text that is recorded without --inputs or --prompt."
        )
    texts = None
    if own:
        texts = _texts(loaded.model, found.folder, calib_file, given=given)
        alpha = percentile_alpha or alpha_in(str(found.folder or pretrained_dir or found.weights))
        alpha = Setting().percentile_alpha if alpha is None else alpha
        setting = Setting(percentile_alpha=alpha, calibration=texts.calibration)
        settings |= {"weights": found.weights, "ran": found.ran, "percentile_alpha": setting.percentile_alpha}
        settings |= {"tokens": texts.said} if found.folder is not None or calib_file is not None else {}
        asked = {"pretrained_dir": pretrained_dir, "calib_file": calib_file, "prompt": prompt}
        settings |= {word: value for word, value in asked.items() if value is not None}
        notes += (texts.said,) if texts.as_bytes and found.folder is not None else ()
    if not sampled and (not own or given):
        batches = partial(loaded.batches, inputs=inputs, prompt=prompt)
        return Prepared(loaded, batches, setting, settings, notes, found.ran)
    count = usual[0] if calib_data_num is None else calib_data_num
    length = usual[1] if calib_seqlen is None else calib_seqlen
    settings |= {SAMPLES: count, "calib_seqlen": length}
    recorded = None if texts is None else texts.recorded
    return Prepared(loaded, partial(_sampled, loaded, count, length, recorded), setting, settings, notes, found.ran)


def alpha_in(folder: str) -> float | None:
    """Return the alpha that a folder's name states, the innermost first; None where no name does.

    >>> alpha_in("pretrained_models/Quamba1-pa9999/pa-0.9995"), alpha_in("weights")
    (0.9995, None)
    """
    for part in reversed(Path(folder).parts):
        if match := _ALPHA.fullmatch(part):
            return float(match[1])
    return None


class _Texts(NamedTuple):
    """Token ids to calibrate and to record on (None: bytes of the bundled text), and what they are."""

    calibration: torch.Tensor | None
    recorded: torch.Tensor | None
    said: str
    as_bytes: bool


def _texts(model: Mamba, folder: Path | None, calib_file: str | None, *, given: bool) -> _Texts:
    """Read the text in the model's tokens; what is calibrated on and what is recorded share none of it."""
    tokens = None if folder is None else tokens_of(folder)
    words = model.config.vocab_size
    said = f"token ids are by the tokenizer in {folder}" if tokens else "token ids are the bytes of the text"
    if calib_file is None:
        if tokens is None and words > BYTES and not (given and model.stored is not None):
            raise BadModel(
                f"{str(folder)!r} has a vocabulary of {words} and no tokenizer, and bytes are not its tokens: put "
                "tokenizer.json beside its weights, or give --calib_file with token ids (.npy, .npz, .pt, "
                ".safetensors) or a text whose bytes are to be the ids."
            )
        if tokens is None:
            return _Texts(None, None, said, as_bytes=True)
        split = (tokens(excerpt("calibration")), tokens(excerpt("recorded")))
        first, second = (_checked(torch.tensor(ids), words, "the text that comes with layerscope") for ids in split)
        return _Texts(first, second, said, as_bytes=False)
    path = Path(calib_file)
    if path.suffix.lower() in (".npy", ".npz", ".pt", ".pth", ".safetensors"):
        ids, said, tokens_are_bytes = _ids_in(path), f"token ids are those of {calib_file}", False
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadText(f"--calib_file {calib_file!r} cannot be read: {error.strerror or error}.") from error
        tokens_are_bytes = tokens is None
        row = tokens(content.decode("utf-8", "replace")) if tokens else list(content)
        ids, said = torch.tensor(row, dtype=torch.long), f"{said}, of {calib_file}"
    ids = _checked(ids, words, f"--calib_file {calib_file!r}")
    if given:
        return _Texts(ids, None, said, tokens_are_bytes)
    if len(ids) < 2:
        raise BadText(f"--calib_file {calib_file!r} has {len(ids)} token; its halves calibrate and are recorded.")
    half = len(ids) // 2
    return _Texts(ids[:half], ids[half:], said, tokens_are_bytes)


def _ids_in(path: Path) -> torch.Tensor:
    if path.suffix.lower() == ".npy":
        try:
            found: object = torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, TypeError) as error:
            raise BadText(f"--calib_file {str(path)!r} is no array of token ids: {error}.") from error
    else:
        found = read_inputs(str(path))
    if isinstance(found, dict):
        found = found.get("input_ids", next(iter(found.values()), None))
    if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.is_complex():
        raise BadText(f"--calib_file {str(path)!r} holds no token ids; it is to hold integers, as input_ids.")
    return found.flatten().long()


def _checked(ids: torch.Tensor, words: int, source: str) -> torch.Tensor:
    if not len(ids):
        raise BadText(f"{source} has no tokens; give at least two.")
    if int(ids.min()) < 0 or int(ids.max()) >= words:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise BadText(f"{source} has the token id {bad}, and the model knows {words}, from 0 on.")
    return ids


class _Weighed(NamedTuple):
    """A model, where its weights are from in a word and in a sentence, and what is worth saying of them."""

    loaded: Loaded
    weights: str
    ran: str
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def _weighed(text: str, *, seed: int, folder: str | None, modes: bool) -> _Weighed:
    """Load the model with the weights of a folder, where one is given, instead of its own."""
    if folder is None:
        if text in BUILT_IN:
            return _Weighed(load_model(text, seed=seed), "built-in", _own(text, seed))
        if modes and is_mamba(Path(text)):
            # transformers' Mamba calls no stage that a quantised one could take the place of; layerscope's does.
            return _of_folder(text, Path(text), seed=seed)
        return _Weighed(load_model(text, seed=seed), text, f"{text} runs with its own weights", _place(Path(text)))
    takes = text in BUILT_IN and BUILT_IN[text].takes_weights
    if is_model(text) and not takes:
        raise _without_modes("--pretrained_dir", text)
    joined = (Path(folder) / text, Path(folder)) if takes else (Path(folder) / text,)  # as Quamba's scripts join them
    place = next(filter(is_checkpoint, joined), None)
    if place is not None and is_mamba(place):
        return _of_folder(text, place, seed=seed)
    if place is not None:
        loaded = load_model(str(place), seed=seed)
        return _Weighed(loaded, str(place), f"{text} runs with the weights in {place}", place)
    if takes and Path(folder).is_dir():
        inside = sorted(each.name for each in Path(folder).iterdir() if is_checkpoint(each))
        there = f"it has {', '.join(inside[:5])}" if inside else "no folder in it is a checkpoint"
        raise BadModel(
            f"--pretrained_dir {folder!r} has no config.json, and no {text}/config.json: {there}. Name the folder that "
            "holds config.json and the weights, or the one above it and the model by its folder's name."
        )
    if takes and Path(folder) != Path(DEFAULT_DIR):
        raise BadModel(
            f"--pretrained_dir {folder!r} is not there; leave it out, and {text} runs with the weights that come with "
            "layerscope."
        )
    loaded = load_model(text, seed=seed)  # says what a MODEL is, where this is none
    ran = f"{folder} is not there: {_own(text, seed)}"
    return _Weighed(loaded, "built-in", ran, notes=(ran,))


def _place(folder: Path) -> Path | None:
    return folder if is_checkpoint(folder) else None


def _of_folder(text: str, place: Path, *, seed: int) -> _Weighed:
    loaded = load_own_mamba(text, place, seed=seed)
    ran = f"{text} runs with the weights in {place}"
    if loaded.model.stored is not None:
        ran += ", which are INT8: modes compute with its codes and scales, fp32 and fp16 with the floats they stand for"
    return _Weighed(loaded, str(place), ran, place)


def _own(text: str, seed: int) -> str:
    """Say what the weights of a built-in model are."""
    if text == "quamba-130m-w8a8":
        return f"{text} runs with weights drawn from seed {seed}, not trained"
    return f"{text} runs with the weights that come with layerscope"


def _without_modes(flag: str, text: str) -> BadModel:
    return BadModel(
        f"{flag} is for models with modes of their own, which {text!r} is not; a checkpoint folder is given as MODEL."
    )


def _sampled(loaded: Loaded, count: int, length: int, ids: torch.Tensor | None) -> Iterator[Inputs]:
    """Yield the samples a few at a time, each batch as (samples, tokens); the same batches for every mode."""
    if loaded.name not in BUILT_IN and not isinstance(loaded.model, Mamba):
        raise BadModel(
            f"samples of text are cut for built-in models, which {loaded.name!r} is not; leave out their number and "
            "length, and it runs on inputs of its own."
        )
    cut = sample_batches(count, length, split="recorded") if ids is None else samples_of(ids, count, length)
    samples = torch.cat(cut)
    return (Inputs((few,)) for few in torch.split(samples, max(1, TOKENS_AT_ONCE // length)))
