"""What is left of the modules in an .onnx file without metadata: the names of its nodes, else the order they run in.

    read = read_names(graph, weights) or read_order(graph, weights)
    read.nodes, read.numbers, read.kinds

The exporter of TorchScript calls nodes by the modules they ran in, `/layers.0/up/MatMul`, and the nodes of a second
call `/layers.0/up_1/MatMul`. Where names are lost, each operation is a point of its own: `MatMul3` is the fourth
product, with the bias that is added to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from layerscope.runtimes.onnx.call_numbers import SIZES, OnnxNode

_REPEATED = re.compile(r"(.+)_\d+")
_QUANTISERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
# Of these, what is made of sizes and constants alone is a size again.
_OF_SIZES = (
    *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Identity", "Mod"),
    *("Mul", "Range", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
)
_OF_WEIGHTS = ("QuantizeLinear", "DequantizeLinear", "Identity", "Transpose", "Cast")
_FOLLOWING = ("Add", "Cast", "Mul")  # what goes on with a product's result: a bias, or a scale


class NamesRead(NamedTuple):
    """Nodes with the modules they ran in, the number of each module's call by the place of a node, and classes."""

    nodes: list[OnnxNode]
    numbers: dict[str, dict[int, int]]
    kinds: dict[str, str]


def read_names(graph: Any, weights: Collection[str]) -> NamesRead | None:
    """Read the modules from the names of nodes; None where no name has any."""
    paths = [_path(node.name) for node in graph.node]
    if not any(paths):
        return None
    owned = {name.rpartition(".")[0] for name in weights}
    known = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
    called: dict[tuple[str, ...], str] = {(): ""}  # the module of each path
    calls: dict[str, dict[tuple[str, ...], int]] = {}
    for path in sorted(known, key=len):
        *parent, last = path
        repeated = _REPEATED.fullmatch(last)
        again = repeated is not None and (*parent, repeated[1]) in known
        stem = repeated[1] if repeated is not None and again else last
        above = called[tuple(parent)]
        own = f"{above}.{last}".lstrip(".")
        if again and any(f"{owner}.".startswith(f"{own}.") for owner in owned):
            stem = last  # it has weights of its own
        called[path] = f"{above}.{stem}".lstrip(".")
    for path in paths:
        for depth in range(1, len(path) + 1):
            of = calls.setdefault(called[path[:depth]], {})
            of.setdefault(path[:depth], len(of))
    nodes = []
    numbers: dict[str, dict[int, int]] = {}
    aside = values_aside(graph, weights)
    for at, (node, path) in enumerate(zip(graph.node, paths, strict=True)):
        prefixes = [path[:depth] for depth in range(1, len(path) + 1)]
        for prefix in prefixes:
            numbers.setdefault(called[prefix], {})[at] = calls[called[prefix]][prefix]
        within = ("", *(called[prefix] for prefix in prefixes)) if node.name.startswith("/") else ()
        nodes.append(_node(node, at, within, weights, aside))
    return NamesRead(nodes, numbers, dict.fromkeys(filter(None, called.values()), "Module"))


def read_order(graph: Any, weights: Collection[str]) -> NamesRead:
    """Number the operations in the order they run; what quantises a value is none by itself."""
    aside = values_aside(graph, weights)
    users = Counter(value for node in graph.node for value in node.input)
    counts: Counter[str] = Counter()
    product: dict[str, str] = {}  # of a value that one operation alone goes on with
    nodes, kinds = [], {}
    for at, node in enumerate(graph.node):
        kind = node.op_type.removeprefix("QLinear").removesuffix("Integer")
        follows = next((product[value] for value in node.input if value in product), "")
        others = [value for value in node.input if value and value not in product and value not in weights]
        if node.op_type in _QUANTISERS or set(node.output) <= aside:
            name = ""
        elif follows and kind in _FOLLOWING and set(others) <= aside:
            name = follows
        else:
            name = f"{kind}{counts[kind]}"  # no number of a layer, by which names are paired
            kinds[name] = kind
            counts[kind] += 1
        nodes.append(_node(node, at, ("", name) if name else (), weights, aside))
        if kinds.get(name) in ("MatMul", "Gemm", "Conv") and users[node.output[0]] == 1:
            product[node.output[0]] = name
    return NamesRead(nodes, {}, kinds)


def without_metadata(node: Any, at: int, weights: Collection[str], aside: Collection[str]) -> OnnxNode:
    """Read a node that an optimiser made, in a file whose other nodes have metadata."""
    read = _node(node, at, (), weights, aside)
    return read if read.op.startswith(SIZES) else replace(read, op="", fx="")


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.strip("/").split("/")[:-1]) if name.startswith("/") else ()


def _node(node: Any, at: int, within: tuple[str, ...], weights: Collection[str], aside: Collection[str]) -> OnnxNode:
    op = f"{SIZES[0]}{node.op_type}" if set(node.output) <= set(aside) else node.op_type
    inputs = tuple(value for value in node.input if value and value not in weights and value not in aside)
    outputs = tuple(value for value in node.output if value and value not in aside)
    return OnnxNode(within, op, f"{at}", "", frozenset(), frozenset(), inputs, outputs)


def weights_of(graph: Any) -> set[str]:
    """Return the initializers, and what is made of them alone."""
    found = {each.name for each in graph.initializer}
    for node in graph.node:
        given = [value for value in node.input if value]
        if node.op_type in _OF_WEIGHTS and given and found.issuperset(given):
            found.update(node.output)
    return found


def values_aside(graph: Any, weights: Collection[str]) -> set[str]:
    """Return the values that are no tensors of the model: sizes, constants, scales, and what is made of these."""
    found: set[str] = set()
    small = {each.name for each in graph.initializer if len(each.dims) < 2}
    for node in graph.node:
        given = [value for value in node.input if value]
        made = [value for value in node.output if value]
        if node.op_type in ("Constant", "Shape", "Size"):
            found.update(made)
        elif node.op_type == "DynamicQuantizeLinear":
            found.update(made[1:])
        elif not found.isdisjoint(given) and (
            (node.op_type in _OF_SIZES and _all(given, found, small))
            or (node.op_type == "Mul" and _all(given, found, weights))
        ):
            found.update(made)
    return found


def _all(values: Iterable[str], *among: Collection[str]) -> bool:
    return all(any(value in some for some in among) for value in values)
