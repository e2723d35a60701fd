"""The table of faults names tests that are there, and no fault is left out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "faults.md").read_text("utf-8")


def missing(text: str) -> list[str]:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    return [
        f"{file}::{test}"
        for file, test in named
        if not (TESTS / file.removeprefix("tests/")).is_file()
        or not re.search(rf"def {test or 'test_'}", (TESTS / file.removeprefix("tests/")).read_text("utf-8"))
    ]


def test_every_fault_is_there_with_a_test_that_is():
    assert re.findall(r"^\| (\d+) \|", TABLE, re.M) == [str(number) for number in range(1, 41)]
    assert missing(TABLE) == []
    assert [row for row in re.findall(r"^\| \d+ \|.*$", TABLE, re.M) if "`" not in row.rpartition(" | ")[2]] == []


def test_a_test_that_is_gone_would_be_found():
    assert missing("`faults/test_guards.py::test_that_was_deleted`, `faults/test_nowhere.py`") == [
        "faults/test_guards.py::test_that_was_deleted",
        "faults/test_nowhere.py::",
    ]
