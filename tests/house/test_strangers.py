"""What could run somebody else's data as a program stands in a short list, each with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADERS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "marshal.load", "shelve.open", "dill.load"),
    *("joblib.load", "torch.load", "torch.jit.load", "torch.export.load", "numpy.load", "np.load"),
    *(
        "yaml.load",
        "yaml.unsafe_load",
        "sympy.sympify",
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "runpy.run_path",
    ),
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output", "ctypes.CDLL"),
    *("torch._inductor.aoti_load_package", "importlib.util.module_from_spec"),
}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("shell", True), ("trust_remote_code", True)}

# A call that says so loads tensors and nothing else.
HARMLESS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}

# Where, what, and why that may be.
ALLOWED = {
    ("src/layerscope/runtimes/model_files.py", "torch.jit.load"): "opens a program to run it: docs/strangers.md",
    ("src/layerscope/runtimes/model_files.py", "torch.export.load"): "opens a program to run it: docs/strangers.md",
    ("src/layerscope/runtimes/torchscript.py", "torch.jit.load"): "a copy of a module that is loaded already",
    ("src/layerscope/compile_taps/backends/aoti.py", "torch._inductor.aoti_load_package"): "opens a folder to run it",
    ("src/layerscope/models/functions.py", "importlib.util.module_from_spec"): "file.py:function, the user's own code",
}


def uses(text: str) -> set[str]:
    """Find what a source calls, or passes, that could run data."""
    found, harmless = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            said = {(each.arg, getattr(each.value, "value", None)) for each in node.keywords}
            harmless |= {node.func} if HARMLESS.get(_dotted(node.func)) in said else set()
        if isinstance(node, ast.Attribute) and node not in harmless and (name := _dotted(node)) in LOADERS:
            found.add(name)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{each.name}" for each in node.names} & LOADERS
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILT_IN:
            found.add(node.func.id)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            found |= {f"{name}={value}" for name, value in KEYWORDS if (node.arg, node.value.value) == (name, value)}
    if re.search(r"\b(inner|outer)HTML\b|insertAdjacentHTML|document\.write", text):
        found.add("innerHTML")
    return found


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_what_could_run_data_is_on_the_list_and_the_list_is_no_longer_than_that():
    found = set()
    for folder in ("src", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT).as_posix()
            found |= {(place, use) for use in uses(path.read_text("utf-8"))}
    assert found == set(ALLOWED)


def test_pages_have_no_html_made_of_text():
    pages = [path for kind in ("js", "html", "css") for path in (ROOT / "src").rglob(f"*.{kind}")]
    assert not [path.name for path in pages if re.search(r"innerHTML|outerHTML|eval\(|new Function", path.read_text())]


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("from pickle import loads", "pickle.loads"),
        ("import torch\nread = torch.load", "torch.load"),
        ("torch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=safely)", "torch.load"),
        ("np.load(f)", "np.load"),
        ("eval('1')", "eval"),
        ("np.load(f, allow_pickle=True)", "allow_pickle=True"),
        ("subprocess.run('ls', shell=True)", "shell=True"),
        ("page = 'x.innerHTML = y'", "innerHTML"),
        ("from sympy import sympify", "sympy.sympify"),
    ],
)
def test_a_use_that_is_not_listed_would_be_found(text, use):
    assert use in uses(text)
    assert not uses("model.eval()\nre.compile('x')\ntorch.compile(model)\njson.load(file)")
    assert not uses("torch.load(f, weights_only=True)\nnp.load(f, allow_pickle=False)")
