"""What an .onnx file tells of the modules it was made from: the metadata that `torch.onnx.export(dynamo=True)` writes.

A file without it is read by the names of its nodes, else by the order of its operations (`names.py`).

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from layerscope.runtimes.graph_calls import GraphCall, ScopedNode, module_calls
from layerscope.runtimes.onnx.call_numbers import SIZES, OnnxNode, call_numbers, merged
from layerscope.runtimes.onnx.node_names import read_names, read_order, values_aside, weights_of, without_metadata
from layerscope.runtimes.onnx.scales import PRODUCTS, quantised_values_alone

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
    unclear: dict[str, int]  # module -> how often the same runs in a row; 0 where its last operations are not known
    told_by: Literal["metadata", "names", "order"]

    @classmethod
    def of(cls, proto: Any) -> OnnxGraph:
        """Read the graph of a ModelProto."""
        graph = quantised_values_alone(proto.graph)
        weights = weights_of(graph)
        returned = {each.name for each in graph.output}
        classes: dict[str, str] = {}
        aside = values_aside(graph, weights)
        nodes = [_read(node, weights, classes) for node in graph.node]
        kinds = {name: kind.rpartition(".")[2] for name, kind in classes.items()}
        told_by: Literal["metadata", "names", "order"] = "metadata"
        numbers: dict[str, dict[int, int]] = {}
        unclear: dict[str, int] = {}
        if not classes:
            read = read_names(graph, weights)
            told_by = "names" if read is not None else "order"
            nodes, numbers, kinds = read if read is not None else read_order(graph, weights)
        else:
            nodes = [
                node if made.metadata_props else without_metadata(made, at, weights, aside)
                for at, (node, made) in enumerate(zip(nodes, graph.node, strict=True))
            ]
        nodes = _settled(nodes, graph, weights)
        if classes:
            numbers, unclear = call_numbers(nodes, classes)
            unclear |= dict.fromkeys(_open_ended(nodes, graph), 0)
        owners = [each.name for each in [*graph.initializer, *graph.value_info] if _is_weight(each, weights)]
        named = [name.rpartition(".")[0] for name in owners if "." in name and "/" not in name]
        for owner in named if told_by != "order" else ():
            kinds.setdefault(owner, "")
        calls = module_calls(_scoped(nodes, numbers), returned=returned)
        _forget_folded(calls, nodes, graph)
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
            told_by,
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


def _settled(nodes: list[OnnxNode], graph: Any, weights: set[str]) -> list[OnnxNode]:
    """Put the nodes without a module, which optimisers made, where all that lies before and behind them is.

    A product and what rescales it are inside the module that takes the result; with a module's bias, they are its own.
    """
    users: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        for value in node.inputs:
            users.setdefault(value, []).append(at)
    maker = {value: at for at, node in enumerate(nodes) for value in node.outputs}
    scopes = {name: node.modules[: at + 1] for node in nodes for at, name in enumerate(node.modules)}
    owned = [_owner(node, weights) for node in graph.node]
    nodes = [
        replace(node, modules=_chain(name, scopes)) if name and not node.modules else node
        for node, name in zip(nodes, owned, strict=True)
    ]
    named = {name for node in nodes for name in node.modules}
    before: list[list[tuple[str, ...]]] = []
    scaled: set[int] = set()  # what products give, until it is a value of the model
    for at, (node, made) in enumerate(zip(nodes, graph.node, strict=True)):
        makers = [maker[value] for value in node.inputs if maker.get(value, at) < at]
        before.append([node.modules] if node.modules else _together(before[other] for other in makers))
        goes_on = made.op_type in ("Cast", "Mul") and not scaled.isdisjoint(makers)
        if not node.modules and (goes_on or made.op_type in PRODUCTS):
            scaled.add(at)
    after: dict[int, list[tuple[str, ...]]] = {}
    settled = list(nodes)
    holders = {name.rpartition(".")[0] for name in named}
    for at, node in reversed([*enumerate(nodes)]):
        takers = [user for value in node.outputs for user in users.get(value, ()) if user > at]
        ahead = _together(after[user] for user in takers)
        modules = node.modules or _common([*before[at], *ahead])
        if at in scaled and ahead:
            modules = ahead[0]
            own = all(owned[user] == modules[-1] or user in scaled for user in takers) if modules else False
            while len(modules) > 1 and not own and modules[-1] not in holders:
                modules = modules[:-1]
        settled[at] = replace(node, modules=modules)
        after[at] = [modules] if node.modules or at in scaled else ahead
    return settled


def _open_ended(nodes: Sequence[OnnxNode], graph: Any) -> Iterator[str]:
    """Yield the modules that hold others and after which a quantised operation runs that may still be theirs."""
    maker = {value: node for node in nodes for value in node.outputs}
    holders = {name.rpartition(".")[0] for node in nodes for name in node.modules}
    for node, made in zip(nodes, graph.node, strict=True):
        if made.op_type.startswith("QLinear") and made.op_type not in PRODUCTS and not made.metadata_props:
            scopes = [maker[value].modules for value in node.inputs if value in maker]
            yield from (name for scope in scopes for name in scope[len(node.modules) :] if name in holders)


def _forget_folded(calls: Mapping[str, list[GraphCall]], nodes: Sequence[OnnxNode], graph: Any) -> None:
    """Take the inputs from norms that the exporter folded into the product before them: what goes in is that one's."""
    for at, (node, made) in enumerate(zip(nodes, graph.node, strict=True)):
        if made.op_type in ("Conv", "ConvTranspose", "Gemm") and "norm" in node.op and node.modules:
            for call in calls.get(node.modules[-1], ()):
                if call.first <= at <= call.last:
                    call.inputs = [value for value in call.inputs if value not in node.inputs]


def _owner(node: Any, weights: set[str]) -> str:
    """Return the module whose weight a quantised product takes, or whose bias is added; nothing where none is named."""
    if node.op_type not in (*PRODUCTS, "Add", "QLinearAdd"):
        return ""
    parts = ("bias",) if node.op_type.endswith("Add") else ("bias", "weight")
    named = (value.rpartition(".") for value in node.input if value in weights and "/" not in value)
    return next((owner for owner, _, name in named if name.startswith(parts)), "")


def _chain(name: str, scopes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return a module with those around it, as far as other nodes name them."""
    above = name
    while above and above not in scopes:
        above = above.rpartition(".")[0]
    return (*scopes.get(above, ("",)), *([name] if above != name else []))


def _together(around: Iterable[list[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    every = [scope for scopes in around for scope in scopes]
    return [_common(every)] if every else []


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
