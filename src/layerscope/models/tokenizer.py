"""Text as the token ids of a checkpoint: by the tokenizer in its folder, or its bytes where there is none.

    tokens_of(Path("checkpoints/mamba-130m-hf"))("hello")       # None in place of the function: no tokenizer there

Nothing but files of that folder is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerscope.errors import BadModel, MissingExtra, first_line
from layerscope.models.quiet import quiet

BYTES = 256  # a vocabulary beyond these has tokens that are no bytes
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def tokens_of(folder: Path) -> Callable[[str], list[int]] | None:
    """Return how the folder's tokenizer reads a text; None where the folder has none."""
    if not has_tokenizer(folder):
        return None
    if (folder / "tokenizer.json").is_file():
        return _fast(folder / "tokenizer.json")
    tokenizer = pretrained(folder)
    return lambda text: list(tokenizer(text)["input_ids"])


def has_tokenizer(folder: Path) -> bool:
    """Tell whether the folder has any of the files that make a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _fast(file: Path) -> Callable[[str], list[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra(
            f"{str(file)!r} is a tokenizer, and tokenizers is not installed: pip install layerscope[hf]"
        ) from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise _refused(file, error) from error
    return lambda text: list(tokenizer.encode(text).ids)


def pretrained(folder: Path) -> Any:
    """Return the folder's tokenizer as transformers has it."""
    try:
        with quiet():
            from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(
            f"{str(folder)!r} has a tokenizer, and transformers is not installed: pip install layerscope[hf]"
        ) from error
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _refused(folder, error) from error


def _refused(place: Path, error: Exception) -> BadModel:
    said = f"the tokenizer cannot be read: {first_line(error)}"
    return BadModel(f"{str(place)!r}: {said} (LAYERSCOPE_TRACEBACK=1 shows where).")
