"""What an .onnx file tells of the modules it was made from: the metadata that `torch.onnx.export(dynamo=True)` writes.

    graph = OnnxGraph.of(proto)
    graph.kinds                     # module name -> class
    graph.calls["layers.3"]         # the calls of a module, with the values that go in and come out
    graph.unclear                   # modules whose calls cannot be told apart: they have none

The file does not tell the calls of one module apart (`call_numbers.py`). Nor does it tell that the exporter's optimiser
merged what two modules computed alike (a table of positions): one of them then seems to take it from the other. That is
seen from the text of the operation, which still names what it took in the source.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from layerscope.runtimes.graph_calls import GraphCall, ScopedNode, module_calls
from layerscope.runtimes.onnx.call_numbers import SIZES, OnnxNode, call_numbers, merged

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_FX_NODE = "pkg.torch.onnx.fx_node"
_INPUT_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_NOWHERE = "_empty_nn_module_stack_from_metadata_hook"  # what torch puts on nodes it made itself
_NAMED = re.compile(r"%(\w+)")


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """The modules of a graph, what they compute, and whose weights are used without a call."""

    kinds: dict[str, str]
    calls: dict[str, list[GraphCall]]
    ops: dict[tuple[str, str], tuple[str, GraphCall]]  # operation, and its name in the graph -> module, call
    users: dict[str, str]
    unclear: dict[str, int]  # module -> how often the same runs in a row
    has_names: bool

    @classmethod
    def of(cls, proto: Any) -> OnnxGraph:
        """Read the graph of a ModelProto."""
        graph = proto.graph
        weights = {each.name for each in graph.initializer}
        returned = {each.name for each in graph.output}
        classes: dict[str, str] = {}
        nodes = _settled([_read(node, weights, classes) for node in graph.node])
        kinds = {name: kind.rpartition(".")[2] for name, kind in classes.items()}
        owners = [each.name for each in [*graph.initializer, *graph.value_info] if _is_weight(each, weights)]
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in owners if "." in name):
            kinds.setdefault(owner, "")
        numbers, unclear = call_numbers(nodes, classes)
        calls = module_calls(_scoped(nodes, numbers), returned=returned)
        ops = module_calls(
            [ScopedNode(((n.op, n.fx),) if n.op else (), n.inputs, n.outputs) for n in nodes], returned=returned
        )
        within = {(node.op, node.fx): node.modules[-1] if node.modules else "" for node in nodes if node.op}
        following = {op: iter(calls) for op, calls in ops.items()}
        return cls(
            kinds,
            {name: made for name, made in calls.items() if name not in unclear},
            {(op, fx): (module, next(following[op])) for (op, fx), module in within.items()},
            _users(nodes, kinds),
            unclear,
            bool(classes),
        )


def _read(node: Any, weights: set[str], classes: dict[str, str]) -> OnnxNode:
    told = {each.key: each.value for each in node.metadata_props}
    scopes, kinds = (_texts(told.get(key, "[]")) for key in (_SCOPES, _CLASSES))
    for name, kind in zip(scopes[:-1], kinds[:-1], strict=False):
        if name != _NOWHERE:
            classes.setdefault(name, kind)
    text = told.get(_FX_NODE, "").partition(" = ")[2]
    named = _NAMED.findall(text)
    return OnnxNode(
        tuple(name for name in scopes[:-1] if name != _NOWHERE),
        kinds[-1] if scopes and kinds else "",
        scopes[-1] if scopes else "",
        _NAMED.sub("%", text),
        frozenset(named),
        frozenset(name for name in named if name.startswith("p_")),
        tuple(value for value in node.input if value and value not in weights),
        tuple(value for value in node.output if value),
    )


def _texts(written: str) -> list[str]:
    """Read the list of texts that the exporter wrote; what is none has nothing to say."""
    try:
        read = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return []
    return read if isinstance(read, list) and all(isinstance(each, str) for each in read) else []


def _settled(nodes: list[OnnxNode]) -> list[OnnxNode]:
    """Put the nodes that the exporter's optimiser made, and gave no module, where all their neighbours are."""
    users: dict[str, list[OnnxNode]] = {}
    for node in nodes:
        for value in node.inputs:
            users.setdefault(value, []).append(node)
    maker: dict[str, OnnxNode] = {}
    settled: list[OnnxNode] = []
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


def _scoped(nodes: list[OnnxNode], numbers: dict[str, dict[int, int]]) -> list[ScopedNode]:
    within = [
        tuple((name, str(numbers.get(name, {}).get(at, 0))) for name in node.modules) for at, node in enumerate(nodes)
    ]
    made = {value: at for at, node in enumerate(nodes) for value in node.outputs}
    makers = {value: nodes[at] for value, at in made.items()}

    def is_taken(value: str, at: int) -> bool:
        """Tell whether a node takes a tensor in the source too: no size, nor what another call only computed alike."""
        if value not in made:
            return True
        if makers[value].op.startswith(SIZES):
            return False
        return within[made[value]] == within[at] or not merged(value, makers[value], nodes[at], makers)

    return [
        ScopedNode(
            within[at],
            tuple(value for value in node.inputs if is_taken(value, at)),
            () if node.op.startswith(SIZES) else node.outputs,
        )
        for at, node in enumerate(nodes)
    ]


def _users(nodes: list[OnnxNode], kinds: dict[str, str]) -> dict[str, str]:
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
