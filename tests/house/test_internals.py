"""What layerscope uses of torch's inside is listed, with what happens when it goes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
USED = re.compile(r"torch\._C\.(\w+)|getattr\(torch\._C, \"(\w+)\"")


def used():
    text = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    return {first or second for first, second in USED.findall(text)} - {"__file__"}


def listed():
    return set(re.findall(r"^\| `torch\._C\.(\w+)`", (ROOT / "docs/torch-internals.md").read_text("utf-8"), re.M))


def test_the_list_of_torchs_internals_is_whole():
    assert used() == listed()


def test_a_use_that_is_not_listed_would_be_found():
    assert USED.findall('x = torch._C._new()\ny = getattr(torch._C, "_other", None)') == [("_new", ""), ("", "_other")]
