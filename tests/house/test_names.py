"""One word, one thing: a class or a module is found by its name."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "layerscope"

# Classes that share a name on purpose.
SHARED = {
    "MonitorCallback": "Lightning's and Hugging Face's: users import it from the framework's own module",
}
# Modules that share a name because they have the same role: a file per tool, per runtime, per command or per page.
SIBLINGS = {
    "huggingface", "monitor", "neuron", "torchscript",  # what concerns one tool: models, dumps, callbacks, backends
    "document", "html_page", "page", "provenance", "run",  # how a thing is drawn, beside the thing
    "channels", "engine", "statistics", "quantised",  # the same idea in each engine, and in each judge
    "convert", "points",  # a command, and what it calls
}  # fmt: skip


def twice(names: list[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def classes(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_no_two_classes_share_a_name():
    found = [name for path in SOURCE.rglob("*.py") for name in classes(path.read_text("utf-8"))]
    assert twice(found) == set(SHARED)


def test_modules_share_a_name_only_as_siblings():
    found = [path.stem for path in SOURCE.rglob("*.py") if not path.stem.startswith("__")]
    assert twice(found) <= SIBLINGS
    assert twice(found) >= SIBLINGS, "a name that is no longer shared leaves the list"


def test_a_shared_name_is_seen():
    assert twice([*classes("class A: pass"), *classes("class B:\n  class A: pass")]) == {"A"}
