"""Text as the token ids of a checkpoint: by the tokenizer in its folder, or its bytes where there is none.

    tokens_of(Path("checkpoints/mamba-130m-hf"))("hello")       # None in place of the function: no tokenizer there

Nothing but files of that folder is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerscope.errors import BadModel, MissingExtra
from layerscope.models.quiet import quiet

__all__ = ["BYTES", "TOKENIZERS", "tokens_of"]

BYTES = 256  # a vocabulary beyond these has tokens that are no bytes
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def tokens_of(folder: Path) -> Callable[[str], list[int]] | None:
    """Return how the folder's tokenizer reads a text; None where the folder has none."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    return _fast(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else _by_transformers(folder)


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


def _by_transformers(folder: Path) -> Callable[[str], list[int]]:
    try:
        with quiet():
            from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(
            f"{str(folder)!r} has a tokenizer, and transformers is not installed: pip install layerscope[hf]"
        ) from error
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _refused(folder, error) from error
    return lambda text: list(tokenizer(text)["input_ids"])


def _refused(place: Path, error: Exception) -> BadModel:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return BadModel(f"{str(place)!r}: the tokenizer cannot be read: {said} (LAYERSCOPE_TRACEBACK=1 shows where).")
