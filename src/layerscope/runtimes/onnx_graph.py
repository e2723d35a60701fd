"""What an .onnx file tells of the modules it was made from: the metadata that `torch.onnx.export(dynamo=True)` writes.

    graph = OnnxGraph.of(proto)
    graph.kinds                     # module name -> class
    graph.calls["layers.3"]         # the calls of a module, with the values that go in and come out

The file does not tell the calls of one module apart. A call is over when the module computes from something that was
computed from its own result outside it, or when it uses its weights again.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from layerscope.runtimes.scopes import ModuleCall, ScopedNode, module_calls

__all__ = ["OnnxGraph"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_FX_NODE = "pkg.torch.onnx.fx_node"
_INPUT_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_WEIGHT = re.compile(r"%(p_\w+)")


@dataclass(frozen=True, slots=True)
class _Node:
    """One node: the modules it ran in, the operation of torch it is part of, and the weights that one names."""

    modules: tuple[str, ...]
    op: str
    fx: str
    weights: frozenset[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """The modules of a graph, what they compute, and whose weights are used without a call."""

    kinds: dict[str, str]
    calls: dict[str, list[ModuleCall]]
    ops: dict[tuple[str, str], tuple[str, ModuleCall]]  # operation, and its name in the graph -> module, call
    users: dict[str, str]
    has_names: bool

    @classmethod
    def of(cls, proto: Any) -> OnnxGraph:
        """Read the graph of a ModelProto."""
        graph = proto.graph
        weights = {each.name for each in graph.initializer}
        returned = {each.name for each in graph.output}
        kinds: dict[str, str] = {}
        nodes = _settled([_read(node, weights, kinds) for node in graph.node])
        has_names = bool(kinds)
        owners = [each.name for each in [*graph.initializer, *graph.value_info] if _is_weight(each, weights)]
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in owners if "." in name):
            kinds.setdefault(owner, "")
        scoped = _scoped(nodes)
        ops = module_calls(
            [ScopedNode(((n.op, n.fx),) if n.op else (), n.inputs, n.outputs) for n in nodes], returned=returned
        )
        within = {(node.op, node.fx): node.modules[-1] if node.modules else "" for node in nodes if node.op}
        following = {op: iter(calls) for op, calls in ops.items()}
        return cls(
            kinds,
            module_calls(scoped, returned=returned),
            {(op, fx): (module, next(following[op])) for (op, fx), module in within.items()},
            _users(nodes, kinds),
            has_names,
        )


def _read(node: Any, weights: set[str], kinds: dict[str, str]) -> _Node:
    told = {each.key: each.value for each in node.metadata_props}
    scopes, classes = (ast.literal_eval(told.get(key, "[]")) for key in (_SCOPES, _CLASSES))
    for name, kind in zip(scopes[:-1], classes[:-1], strict=False):
        kinds.setdefault(name, kind.rpartition(".")[2])
    return _Node(
        tuple(scopes[:-1]),
        classes[-1] if scopes and classes else "",
        scopes[-1] if scopes else "",
        frozenset(_WEIGHT.findall(told.get(_FX_NODE, ""))),
        tuple(value for value in node.input if value and value not in weights),
        tuple(value for value in node.output if value),
    )


def _settled(nodes: list[_Node]) -> list[_Node]:
    """Put the nodes that the exporter's optimiser made, and gave no module, where all their neighbours are."""
    users: dict[str, list[_Node]] = {}
    for node in nodes:
        for value in node.inputs:
            users.setdefault(value, []).append(node)
    maker: dict[str, _Node] = {}
    settled: list[_Node] = []
    for node in nodes:
        if not node.modules:
            around = [maker[value].modules for value in node.inputs if value in maker]
            around += [user.modules for value in node.outputs for user in users.get(value, ()) if user.modules]
            node = replace(node, modules=_common(around))
        settled.append(node)
        maker.update(dict.fromkeys(node.outputs, node))
    return settled


def _common(scopes: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*scopes, strict=False)))


def _is_weight(value: Any, initializers: set[str]) -> bool:
    """Tell whether a value has a parameter's name; constants that the exporter made have names of their own."""
    kind = {each.key: each.value for each in value.metadata_props}.get(_INPUT_KIND)
    return kind in ("PARAMETER", "BUFFER") or (kind is None and value.name in initializers)


def _scoped(nodes: list[_Node]) -> list[ScopedNode]:
    members: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        for name in node.modules:
            members.setdefault(name, []).append(at)
    numbers = {name: _call_numbers(nodes, name, own) if name else {} for name, own in members.items()}
    return [
        ScopedNode(tuple((name, str(numbers[name].get(at, 0))) for name in node.modules), node.inputs, node.outputs)
        for at, node in enumerate(nodes)
    ]


def _call_numbers(nodes: list[_Node], name: str, own: list[int]) -> dict[int, int]:
    """Tell for each node of a module which of its calls it belongs to."""
    inside = set(own)
    numbers: dict[int, int] = {}
    number = 0
    made: set[str] = set()  # by this call
    derived: set[str] = set()  # from that, outside it
    used: dict[tuple[str, frozenset[str]], str] = {}  # its weights, and by which operation
    for at in range(own[0], own[-1] + 1):
        node = nodes[at]
        if at not in inside:
            if not made.isdisjoint(node.inputs) or not derived.isdisjoint(node.inputs):
                derived.update(node.outputs)
            continue
        key = (node.op, node.weights)
        again = node.modules[-1] == name and node.weights and used.get(key, node.fx) != node.fx
        if again or not derived.isdisjoint(node.inputs):
            number += 1
            made, derived, used = set(), set(), {}
        if node.modules[-1] == name:
            used[key] = node.fx
        made.update(node.outputs)
        numbers[at] = number
    return numbers


def _users(nodes: list[_Node], kinds: dict[str, str]) -> dict[str, str]:
    """Find the modules whose weights an operation of another one uses, and whose operation that is."""
    found: dict[str, str] = {}
    ran = {name for node in nodes for name in node.modules}
    for name in kinds:
        if name and name not in ran:
            prefix = f"p_{name.replace('.', '_')}_"
            for node in nodes:
                if any(weight.startswith(prefix) for weight in node.weights):
                    found.setdefault(name, node.modules[-1] if node.modules else "")
    return found
