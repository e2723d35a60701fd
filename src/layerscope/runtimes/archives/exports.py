"""What a .pt2 file of torch.export says of its modules, read without torch and without evaluating anything in it.

    read_export(path).places

A program's sizes and guards are expressions, which torch evaluates as Python when it loads the file. None of them is
needed to list modules: names, classes and the shapes of parameters are plain text and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.runtimes.archives.zip_archive import Archive
from layerscope.runtimes.graph_calls import places_of
from layerscope.runtimes.listing import Listing, inside, sane
from layerscope.runtimes.runtime import Wanted, refuse_gradients

NAME = "export"
NOWHERE = "_empty_nn_module_stack_from_metadata_hook"  # what torch puts on nodes it made itself

# The graph is text: a hundred kilobytes for a layer of a transformer, and memory is twenty times the text.
_LARGEST = 64 << 20
_LEGACY = "serialized_exported_program.json"  # before torch 2.8
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_OPENING, _CLOSING = "[(", "])"


def read_export(path: Path) -> Listing:
    """List the modules of a program from the text in its archive."""
    archive = Archive(path)
    try:
        return _listing(json.loads(archive.read(_program(archive), most=_LARGEST)))
    except _UNREADABLE as error:
        if isinstance(error, (Unsupported, type(archive.damaged()))):
            raise
        raise archive.damaged() from error


def places(named: Iterable[str], stacks: Iterable[Sequence[tuple[str, str]]]) -> list[Place]:
    """Return the modules that a program remembers, with the class of those that computed something."""
    kinds = {name: kind for stack in stacks for name, kind in stack}
    return places_of({name: kinds.get(name, "") for name in dict.fromkeys([*named, *kinds])})


def refuse(wanted: Wanted, *, named: bool) -> None:
    """Refuse gradients, and modules of a program whose operations have lost the names of theirs."""
    refuse_gradients(wanted, "inside an exported program, which computes a forward alone")
    if any(wanted) and not named:
        raise Unsupported(
            "the operations of this exported program have lost the names of their modules, so no module can be found "
            "in it; record `op:...`, or compile it again with layerscope.compile(..., record_layer_outputs=True)."
        )


def _program(archive: Archive) -> str:
    found = [n for n in archive.names if n == _LEGACY or (n.startswith("models/") and n.endswith(".json"))]
    if len(found) != 1:
        raise archive.refused(f"holds {len(found)} programs")
    return found[0]


def _listing(program: dict[str, Any]) -> Listing:
    described = program["graph_module"]
    graph = described["graph"]
    stacks = [_stack(node["metadata"].get("nn_module_stack", "")) for node in graph["nodes"]]
    named = [str(entry["fqn"]) for entry in described["module_call_graph"] if "@" not in entry["fqn"]]
    sane({*named, *(name for stack in stacks for name, _ in stack)})
    found = places(named, stacks)
    own: dict[str, dict[object, int]] = {}
    for spec in described["signature"]["input_specs"]:
        if "parameter" in spec:
            name = str(spec["parameter"]["parameter_name"])
            sizes = graph["tensor_values"][spec["parameter"]["arg"]["name"]]["sizes"]
            own.setdefault(name.rpartition(".")[0], {})[name] = prod(_length(size) for size in sizes)
    sane(own)
    has_names = any(stacks)
    return Listing(
        NAME,
        found,
        shared={},
        sizes=inside(own, found),
        total=sum(count for each in own.values() for count in each.values()),
        refuse=lambda wanted, ops: refuse(wanted, named=has_names),
    )


def _length(size: dict[str, Any]) -> int:
    length = size["as_int"]
    if type(length) is not int or not 0 <= length < 1 << 63:
        raise ValueError("a parameter's size that is no number")
    return length


def _stack(text: str) -> list[tuple[str, str]]:
    """Read the calls a node ran in, `key,name,class;key,name,class`: module and class; a key may hold commas in []."""
    return [
        (name.partition("@")[0], kind.rpartition(".")[2])
        for _, name, kind in map(_parts, text.split(";") if text else ())
        if name != NOWHERE
    ]


def _parts(item: str) -> tuple[str, str, str]:
    parts, depth = [""], 0
    for letter in item:
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    key, name, kind = parts
    return key, name, kind
