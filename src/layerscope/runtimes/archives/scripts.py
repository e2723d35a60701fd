"""What a TorchScript file says of its modules, read without torch and without running its code.

    read_script(path).places

`torch.jit.load` runs what the file brings along: `__setstate__` methods, default arguments, custom classes. The modules
themselves are plain: objects with their attributes (`script_objects.py`), and the text of the classes, of which only
the lines that declare something are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerscope.errors import BadModel, Unsupported
from layerscope.patterns import Place
from layerscope.runtimes.archives.script_objects import ScriptObject, ScriptTensor, script_objects
from layerscope.runtimes.archives.zip_archive import Archive
from layerscope.runtimes.listing import Listing, inside, sane
from layerscope.runtimes.runtime import refuse_gradients

NAME = "torchscript"
INTERPRETER = "inside TorchScript, whose interpreter runs the backward pass as it likes"

# Operations that hand everything to an engine: what happens inside it cannot be seen from here.
ENGINES = {"neuron": "a Neuron NEFF", "tensorrt": "a TensorRT engine"}

_LARGEST = 64 << 20  # of the pickle of objects, and of all code: tensors lie elsewhere
_MOST = 1 << 17  # modules, each under every name it has
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, EOFError, OverflowError, RecursionError, Warning)

_CLASS = re.compile(r"class (\w+)\((\w*)\):")
_PARAMETERS = re.compile(r"  __parameters__ = \[(.*)\]")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_METHOD = re.compile(r"  def \w")
_ENGINE = re.compile(r"\bops\.(" + "|".join(ENGINES) + r")\.(\w+)")


def read_script(path: Path) -> Listing:
    """List the modules of a TorchScript file from its objects and the declarations of their classes."""
    archive = Archive(path)
    if "data.pkl" not in archive.names:
        raise archive.refused("holds no data.pkl, as torch wrote TorchScript before 1.4")
    try:
        classes = _classes(archive)
        root = script_objects(archive.read("data.pkl", most=_LARGEST))
        modules = dict(_modules(root, classes))
        return _listing(modules, classes)
    except _UNREADABLE as error:
        if isinstance(error, (Unsupported, BadModel)):
            raise
        raise archive.damaged() from error


# The text of the classes --------------------------------------------------------------------------


@dataclass(slots=True)
class ScriptClass:
    """A class that derives from Module, as far as its declarations go."""

    parameters: tuple[str, ...] = ()
    has_code: bool = False


def _classes(archive: Archive) -> dict[str, ScriptClass]:
    """Find the modules' classes by their full names; refuse a file that only hands its inputs to an engine."""
    found: dict[str, ScriptClass] = {}
    left = _LARGEST
    for name in archive.names:
        if not (name.startswith("code/") and name.endswith(".py")):
            continue
        content = archive.read(name, most=left)
        left -= len(content)
        text = content.decode("utf-8")
        if engine := _ENGINE.search(text):
            library, operation = engine.groups()
            raise Unsupported(
                f"{str(archive.path)!r} is TorchScript that needs {library}::{operation}, {ENGINES[library]}: machine "
                "code in which no layer is left to tap; compile the model again with layerscope.compile(..., "
                "record_layer_outputs=True)."
            )
        within = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
        declared = ScriptClass()  # of lines before the first class, which has none
        for line in text.splitlines():
            if match := _CLASS.match(line):
                declared = ScriptClass()
                if match[2] == "Module":
                    found[f"{within}.{match[1]}"] = declared
            elif match := _PARAMETERS.match(line):
                declared.parameters = tuple(_QUOTED.findall(match[1]))
            elif _METHOD.match(line):
                declared.has_code = True
    return found


# The objects --------------------------------------------------------------------------------------


def _modules(root: Any, classes: dict[str, ScriptClass]) -> Iterator[tuple[str, ScriptObject]]:
    """Yield every module under its name, a module before those inside it."""
    if not (isinstance(root, ScriptObject) and root.kind in classes):
        raise ValueError("the first object is no module")
    pending, left = [("", root)], _MOST
    while pending:
        name, module = pending.pop()
        left -= 1
        if left < 0:
            raise ValueError("modules within modules without end")
        yield name, module
        below = [(key, value) for key, value in module.attributes.items() if isinstance(value, ScriptObject)]
        inner = [(f"{name}.{key}" if name else key, value) for key, value in below if value.kind in classes]
        left -= sum(len(one) for one, _ in inner) // 256  # a module within itself has names that only grow
        pending += reversed(inner)


def _listing(modules: dict[str, ScriptObject], classes: dict[str, ScriptClass]) -> Listing:
    sane(modules)
    places = [Place(name, (module.kind.rpartition(".")[2],)) for name, module in modules.items()]
    own: dict[str, dict[object, int]] = {}
    first: dict[tuple[object, ...], str] = {}
    shared: dict[str, str] = {}
    for name, module in modules.items():
        declared = classes[module.kind]
        tensors = [module.attributes.get(each) for each in declared.parameters]
        held = {tensor.identity: tensor.count for tensor in tensors if isinstance(tensor, ScriptTensor)}
        if held:
            own[name] = dict(held)
        key = tuple(held)
        if key and declared.has_code:
            first.setdefault(key, name)
        elif key in first:
            shared[name] = first[key]
    return Listing(
        NAME,
        places,
        shared,
        sizes=inside(own, places),
        total=sum({identity: n for each in own.values() for identity, n in each.items()}.values()),
        refuse=lambda wanted, ops: refuse_gradients(wanted, INTERPRETER),
        remark=_remark(modules, classes, weighs=bool(own)),
    )


def _remark(modules: dict[str, ScriptObject], classes: dict[str, ScriptClass], *, weighs: bool) -> str:
    if len(modules) == 1 and not weighs and classes[modules[""].kind].has_code:
        return (
            "It has no modules and no parameters left, as after torch.jit.freeze: its operations are the points, and "
            "are known once torch has loaded it, which can run code in the file; `--trust` does."
        )
    closed = [name or "." for name, module in modules.items() if module.opaque]
    if not closed:
        return ""
    return (
        f"{closed[0]}{f' and {len(closed) - 1} more are' if len(closed) > 1 else ' is'} restored by code in the file, "
        "and what is inside is known once that has run; `--trust` runs it."
    )
