"""Rules about the tests: each one asserts something, and the rules themselves can fail."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def asserts_something(function: ast.FunctionDef) -> bool:
    """Tell whether a test can fail by itself: an assert, pytest.raises/warns, or a helper called assert_*/check_*."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("raises", "warns") or name.startswith(("assert_", "check_")):
                return True
    return False


def functions_in(source: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]


def test_every_test_asserts():
    idle = [
        f"{path.relative_to(ROOT)}::{test.name}"
        for path in ROOT.rglob("*.py")
        for test in functions_in(path.read_text())
        if not asserts_something(test)
    ]
    assert idle == []


def test_the_rule_that_every_test_asserts_can_fail():
    [empty, good] = functions_in("def test_a(): run()\ndef test_b(): assert run()")
    assert not asserts_something(empty)
    assert asserts_something(good)
