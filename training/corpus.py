"""The Python standard library's sources as bytes, split by file into what is trained on and what is held out.

    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))

Which side a file is on is decided by its name alone, so that it is the same on every machine and, for files that keep
their name, in every version of Python.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

__all__ = ["Corpus", "is_held_out", "read_corpus"]

# Tables that no person wrote, and what pip installed beside the library.
SKIPPED = ("site-packages/", "dist-packages/", "encodings/", "pydoc_data/", "_sysconfigdata")


class Corpus(NamedTuple):
    """Two texts that share no file, and how many files each has."""

    train: bytes
    held_out: bytes
    train_files: int
    held_out_files: int

    def __str__(self) -> str:
        digest = hashlib.sha256(self.train + self.held_out).hexdigest()[:16]
        return (
            f"{len(self.train):,} bytes of {self.train_files} files to train on, {len(self.held_out):,} of "
            f"{self.held_out_files} held out, sha256 {digest}"
        )


def is_held_out(name: str) -> bool:
    """Tell the side of a file by its path below the library's folder; one in twenty is held out."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def read_corpus(folder: Path, *, tests: bool = True) -> Corpus:
    """Read every module below the folder that is UTF-8; `tests` says whether Python's own tests belong to it."""
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(SKIPPED) or (not tests and {"test", "tests"} & set(name.split("/"))):
            continue
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        sides[is_held_out(name)].append(text)
    return Corpus(b"\n".join(sides[False]), b"\n".join(sides[True]), len(sides[False]), len(sides[True]))
