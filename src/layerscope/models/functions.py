"""`file.py:function` and `package.module:function`, as text on a command line.

    function_at("models/mine.py:make")()

This runs the user's own code. So does, apart from it, what opens a file of a program: `runtimes/files.py`, `compiled/`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from layerscope.errors import BadModel

_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<in_file>\w+)|(?P<module>\w+(?:\.\w+)*):(?P<in_module>\w+)")


def is_function(text: str) -> bool:
    """Tell whether the text has the form of a function's address; `s3://...` has not."""
    return _FUNCTION.fullmatch(text) is not None


def function_at(text: str) -> Callable[[], Any]:
    """Return a call of the function at that address; what goes wrong inside it is told in one sentence.

    The folder of the file (or the current one, for a package) is put first on the import path and stays
    there, as it does when Python runs a script: models import their neighbours, some of them late.
    """
    match = _FUNCTION.fullmatch(text)
    if match is None:
        raise BadModel(f"{text!r} is not file.py:function or package.module:function.")
    file, in_file, module_name, in_module = match.groups()
    module = _module_in(Path(file), text) if file else _module_named(module_name, text)
    name = in_file or in_module
    found = getattr(module, name, None)
    if found is None:
        near = get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=3, cutoff=0.5)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise BadModel(f"{text!r}: there is no {name!r} in {file or module_name}{hint}.")
    return lambda: _call(found, text)


def run_file(file: str) -> None:
    """Run a Python file of the user's for what it declares; what goes wrong in it is told in one sentence."""
    _module_in(Path(file), file)


def _call(found: Any, text: str) -> Any:
    if not callable(found) or _is_module(found):
        return found
    try:
        return found()
    except BadModel:
        raise
    except (Exception, SystemExit) as error:
        raise _told(text, "raised", error) from error


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _module_in(file: Path, text: str) -> ModuleType:
    if not file.is_file():
        raise BadModel(f"{text!r}: there is no file {str(file)!r} (looked in {Path.cwd()}).")
    _first_on_path(file.resolve().parent)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise BadModel(f"{text!r}: Python cannot import {str(file)!r}.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name; one of that name that is imported already is not replaced.
    known = sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if known is module:
            del sys.modules[file.stem]
        if isinstance(error, Exception | SystemExit):
            raise _told(text, "failed to import with", error) from error
        raise
    return module


def _module_named(name: str, text: str) -> ModuleType:
    _first_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise BadModel(f"{text!r}: there is no module {error.name!r} on the import path.") from error
        raise _told(text, "failed to import with", error) from error
    except (Exception, SystemExit) as error:
        raise _told(text, "failed to import with", error) from error


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _told(text: str, what: str, error: BaseException) -> BadModel:
    message = " ".join(str(error).split())
    return BadModel(
        f"{text!r} {what} {type(error).__name__}{': ' + message if message else ''}"
        " (LAYERSCOPE_TRACEBACK=1 shows where)."
    )
