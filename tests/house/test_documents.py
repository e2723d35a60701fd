"""The documents name files that are there: a map that leads nowhere is worse than none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "layerscope"
EXCERPTS = SOURCE / "models" / "mamba" / "excerpts" / "README.md"  # it names files of Python
DOCUMENTS = [ROOT / "ARCHITECTURE.md", *sorted({*SOURCE.rglob("README.md")} - {EXCERPTS})]


def named(text: str) -> set[str]:
    """Return the Python files that a document names in backticks."""
    return set(re.findall(r"`([\w./-]+\.py)`", text))


def stands(name: str, below: Path) -> bool:
    """Tell whether a file is there: below the document's package, or from the top of the sources or the repository."""
    return any(below.rglob(name)) or any((place / name).is_file() for place in (SOURCE, ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(document):
    below = SOURCE if document.parent == ROOT else document.parent
    assert [name for name in sorted(named(document.read_text("utf-8"))) if not stands(name, below)] == []


def test_a_file_that_is_not_there_is_seen():
    assert named("see `nowhere.py` and `a/b.py`, not nothing.py") == {"nowhere.py", "a/b.py"}
    assert not stands("nowhere.py", SOURCE)
    assert stands("points.py", SOURCE)
