"""Read the graphs of TorchScript methods, and put probes in them.

    for node in nodes_of(module._c._get_method("forward").graph): ...
    add_probe(graph, node, forwards.number, probe, value, after=True)

A probe is an operation, `layerscope::tell`, that the JIT knows to have effects: it is neither removed nor moved.
It takes any value, so tuples, lists and dicts arrive in Python as what they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from layerscope.runtimes.forwards import tell

Graph = Any  # torch._C.Graph, which has no stubs
Node = Any


@contextmanager
def quiet_jit() -> Iterator[None]:
    """Keep what torch says of TorchScript's future out of the user's log, for calls of our own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.", category=DeprecationWarning)
        yield


def nodes_of(block: Any) -> Iterator[Node]:
    """Yield the nodes of a graph in the order they run, with those of its branches and loops."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_of(inner)


def attribute_path(value: Any, graph: Graph) -> str | None:
    """Return the dotted name by which a method reaches a module from its own; None where it is not an attribute."""
    parts: list[str] = []
    while (node := value.node()).kind() == "prim::GetAttr":
        parts.append(node.s("name"))
        value = next(node.inputs())
    return ".".join(reversed(parts)) if value.debugName() == next(graph.inputs()).debugName() else None


def is_call(method: str) -> bool:
    """Tell whether a method is a module's call; the second and third call of a traced module have a number."""
    return method.rstrip("0123456789") == "forward"


def is_traced(node: Node) -> bool:
    """Tell whether a call was met by a tracer, which knows no place in the source for it.

    A traced module gives back every value that others use, in a tuple: not what the source returned.
    """
    return str(node).rstrip().endswith("# :0:0")


def qualified_name(node: Node) -> str | None:
    """Return an operation's name as the dispatcher prints it, `aten.add.Tensor`; None for what is not one."""
    kind = node.kind()
    if kind.startswith("prim::") or not any(map(_holds_tensors, node.outputs())):
        return None
    overload = str(node.schema()).split("(")[0].partition(".")[2]
    return f"{kind.replace('::', '.')}.{overload or 'default'}"


class Value(NamedTuple):
    """What one operation of a graph computes, under the name that is left of it."""

    name: str
    op: str
    node: Node


def values_of(graph: Graph) -> list[Value]:
    """List what the operations of a graph compute; a value that lost its name is called after its operation."""
    found: dict[str, Value] = {}
    counts: dict[str, int] = {}
    for node in nodes_of(graph):
        if qualified_name(node) is None:
            continue
        op = node.kind().split("::")[1]
        name = next(node.outputs()).debugName().replace(".", "_")
        while name.isdecimal() or name in found:
            counts[op] = counts.get(op, -1) + 1
            name = f"{op}_{counts[op]}"
        found[name] = Value(name, op, node)
    return list(found.values())


def tensors_of(node: Node) -> list[Any]:
    """Return the inputs of an operation that hold tensors."""
    return [value for value in node.inputs() if _holds_tensors(value)]


def add_probe(graph: Graph, node: Node, forwards: int, probe: int, values: Sequence[Any] | Any, *, after: bool) -> None:
    """Have the graph tell `probe` a value, or several as a tuple, before or after a node runs."""
    _define()
    told = graph.create("layerscope::tell", [], 0)
    (told.insertAfter if after else told.insertBefore)(node)
    graph.setInsertPoint(told)
    if isinstance(values, Sequence):
        packed = graph.create("prim::TupleConstruct", list(values), 1)
        packed.output().setType(torch._C.TupleType([value.type() for value in values]))
        packed.insertBefore(told)
        values = packed.output()
    for constant in (forwards, probe):
        told.addInput(graph.insertConstant(constant))
    told.addInput(graph.insertConstant(None) if values is None else values)
    graph.setInsertPoint(graph.return_node())


def _holds_tensors(value: Any) -> bool:
    return "Tensor" in str(value.type())


@cache
def _define() -> Any:
    library: Any = torch.library.Library("layerscope", "DEF")  # type: ignore[no-untyped-call]
    library.define("tell(int forwards, int probe, Any value) -> ()", alias_analysis="CONSERVATIVE")
    library.impl("tell", tell, "CompositeExplicitAutograd")
    return library
