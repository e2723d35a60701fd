"""What may be imported when: nothing heavy to look, nothing upwards, and every name where it is said to be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import layerscope

SOURCE = Path(layerscope.__file__).parent


def modules_after(statement: str) -> set[str]:
    """Return what a fresh interpreter has imported after a statement."""
    code = f"import sys; {statement}; print(*sys.modules, sep='\\n')"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import layerscope",
        "import layerscope.store, layerscope.stats, layerscope.patterns, layerscope.schedules, layerscope.report",
        "import layerscope.cli",
        "import layerscope.compare, layerscope.pytest_plugin",
        "from layerscope import open_run, Summary, Point, every",
    ],
)
def test_looking_imports_no_torch(statement):
    heavy = {"torch", "numba", "transformers", "pandas", "safetensors.torch"}
    assert not heavy & modules_after(statement)


def test_the_check_for_torch_can_fail():
    assert "torch" in modules_after("import layerscope.recorder")


def test_every_public_name_resolves():
    assert not [name for name in layerscope.__all__ if getattr(layerscope, name) is None]


def test_the_public_names_are_those_the_type_checker_sees():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(layerscope.__all__) == set(layerscope._HOME)


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="it has Comparison, Finding, LayerscopeError"):
        _ = layerscope.recrod


def faults_of(source: str, *, package: bool) -> list[str]:
    """Return what a module's source lacks: a docstring, and a sorted `__all__` where it is a package."""
    tree = ast.parse(source)
    exported = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ),
        None,
    )
    faults = [] if ast.get_docstring(tree) else ["opens with nothing"]
    if exported is None and package:
        faults.append("has no __all__")
    if exported is not None and exported != sorted(exported, key=_like_ruff):
        faults.append("__all__ is not sorted")
    return faults


def test_every_module_says_what_it_is_for_and_every_package_what_it_offers():
    found = {
        path.relative_to(SOURCE): faults_of(path.read_text(), package=path.name == "__init__.py")
        for path in SOURCE.rglob("*.py")
        if path.name != "__main__.py"
    }
    assert len(found) > 100
    assert not {path: faults for path, faults in found.items() if faults}


def test_the_check_of_modules_can_fail():
    assert faults_of("x = 1", package=True) == ["opens with nothing", "has no __all__"]
    assert faults_of('"""Says."""\n__all__ = ["b", "A"]', package=False) == ["__all__ is not sorted"]


def _like_ruff(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions: the order ruff's RUF022 keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_there_are_no_drawer_files():
    drawers = {"utils", "util", "common", "helpers", "helper", "misc", "const", "constants"}
    assert not {path.stem for path in SOURCE.rglob("*.py")} & drawers


@pytest.mark.parametrize("first", ["import layerscope.compare.measure.metrics", "pass"])
def test_compare_is_called_whatever_was_imported_before(first):
    call = "layerscope.compare('nowhere', 'nor here')"
    code = f"{first}; import layerscope\ntry: {call}\nexcept layerscope.LayerscopeError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nowhere is not a run: there is nothing there" in done.stdout
