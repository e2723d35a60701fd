"""What the scripts here begin and end with: a Python that has layerscope, and one sentence where they cannot go on.

try:
    from layerscope.modes import choose
except ModuleNotFoundError as error:
    hand_over(error)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

__all__ = ["HERE", "give_up", "hand_over", "one_sentence", "tell_user"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NEEDED = ("layerscope", "torch", "numpy", "click", "rich", "fsspec", "safetensors", "google_crc32c")


def hand_over(error: ModuleNotFoundError) -> NoReturn:
    """Run the same command line with the Python of the checkout; where there is none, say how to get it."""
    if error.name not in NEEDED:
        raise error
    own = ROOT / ".venv" / "bin" / "python"
    if not own.exists() or Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        sys.stderr.write(f"this Python has no {error.name}: run `make setup` in {ROOT}, or `pip install layerscope`\n")
        sys.exit(2)
    os.execv(own, [str(own), *sys.argv])


@contextmanager
def one_sentence() -> Iterator[None]:
    """Tell in a sentence what layerscope or the disk refuses, and leave with exit code 2; 130 after Ctrl-C.

    Whose reader is gone (`| head`) leaves with 141 and without a word, as any program does.
    """
    from layerscope.cli.page import ReaderGone
    from layerscope.errors import LayerscopeError

    try:
        yield
        sys.stdout.flush()
    except (ReaderGone, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would complain when it flushes at its end
        sys.exit(141)
    except (LayerscopeError, OSError) as error:
        give_up(str(error))
    except KeyboardInterrupt:
        tell_user("interrupted")
        sys.exit(130)


def tell_user(sentence: str) -> None:
    """Write a sentence to stderr."""
    from layerscope.report.writing import printable

    sys.stderr.write(f"{Path(sys.argv[0]).stem}: {printable(sentence)}\n")


def give_up(sentence: str) -> NoReturn:
    """Say why it does not go on."""
    tell_user(sentence)
    sys.exit(2)
