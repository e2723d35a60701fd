"""Watch a program of torch.export, from its .pt2 file alone.

    program = torch.export.load("model.pt2")
    with watch(program, {"layers.3": {"output"}}, sink) as call:
        call(x)

A program cannot be called; what the block is given can. It is the program's own module with probes in its
graph, at the values that each module computed for others (`graph_calls.py`): the tensors are seen as they are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from layerscope.patterns import Place
from layerscope.points import Side
from layerscope.runtimes.archives.exports import NAME as NAME
from layerscope.runtimes.archives.exports import NOWHERE, places, refuse
from layerscope.runtimes.forwards import Forwards, tell
from layerscope.runtimes.graph_calls import GraphCall, ScopedNode, module_calls
from layerscope.runtimes.runtime import Wanted, Weights, no_notes, no_remark, nothing_shared
from layerscope.runtimes.sink import RuntimeSink
from layerscope.runtimes.values import leaves

notes, remark, shared = no_notes, no_remark, nothing_shared


def points(program: ExportedProgram) -> list[Place]:
    """Return the modules that the program remembers, with the class of those that computed something."""
    named = [entry.fqn for entry in program.module_call_graph if "@" not in entry.fqn]
    return places(named, (list(_stack(node).values()) for node in program.graph.nodes))


def parameters(program: ExportedProgram) -> list[torch.Tensor]:
    """Return the parameters."""
    return list({id(tensor): tensor for tensor in program.parameters()}.values())


def weights(program: ExportedProgram) -> Weights:
    """Return each module's own parameters and buffers."""
    own: Weights = {}
    for path, tensor in [*program.named_parameters(), *program.named_buffers()]:
        module, _, name = path.rpartition(".")
        own.setdefault(module, []).append((name, tensor))
    return own


def check(program: ExportedProgram, wanted: Wanted, *, ops: bool) -> None:
    """Refuse gradients, and a program whose operations have lost the names of their modules."""
    refuse(wanted, named=any(_stack(node) for node in program.graph.nodes))


@contextmanager
def watch(
    program: ExportedProgram, wanted: Wanted, sink: RuntimeSink, *, ops: Callable[[str], str | None] | None = None
) -> Iterator[Callable[..., Any]]:
    """Tell `sink` what passes the wanted sides of the wanted modules until the block ends."""
    forwards = Forwards(sink)
    plain, tapped = program.module(), program.module()
    taps = _ProgramTaps(forwards, program, tapped.graph)
    for name in sorted(wanted, key=lambda name: name.count(".")):  # a module is told around those inside it
        taps.around_module(name, wanted[name])
    if ops is not None:
        taps.around_ops(ops)
    tapped.graph.lint()
    tapped.recompile()
    names = _positional(program, plain)

    def call(*args: Any, **kwargs: Any) -> Any:
        named = [kwargs.pop(name) for name in takewhile(kwargs.__contains__, names[len(args) :])]
        return forwards.run(tapped, plain, wanted.get("", ()), (*args, *named), kwargs)

    yield call


def why_silent(program: ExportedProgram, names: Iterable[str]) -> dict[str, str]:
    """Say why each of these modules was never seen to run, from what the program does with its weights."""
    users = _users(program)
    return {name: _why_silent(users.get(name)) for name in names}


def _why_silent(user: str | None) -> str:
    if user is not None:
        return f"called functionally: {user or 'the model'} uses its weights without calling it"
    return (
        "not in the program: export met no call of it, or it computes nothing (an identity), "
        "or nothing used what it returned (a dead output)"
    )


class _ProgramTaps:
    """Puts probes into the graph of a program's module."""

    def __init__(self, forwards: Forwards, program: ExportedProgram, graph: Graph) -> None:
        self.forwards = forwards
        self.graph = graph
        self.by_name = {node.name: node for node in graph.nodes}
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        self.calls = module_calls([_scoped(node) for node in self.nodes], returned=_returned(graph))
        self.signatures = {e.fqn: e.signature for e in program.module_call_graph if e.fqn and e.signature is not None}

    def around_module(self, name: str, sides: Collection[Side]) -> None:
        """Have the inputs and outputs of each call of a module told; those of the whole model are the call's own."""
        for number, call in enumerate(self.calls.get(name, ()) if name else ()):
            given = tuple(self.by_name[value] for value in call.inputs)
            first, last = self.nodes[call.first], self.nodes[call.last]
            if any(self.order[node] > self.order[first] for node in given):  # not in the order it was traced in
                first = max(given, key=self.order.__getitem__).next
            value = self._output(name, number, call) if "output" in sides else ()
            self._around(first, last, (name, number), name, sides, None, given, value)

    def around_ops(self, ops: Callable[[str], str | None]) -> None:
        """Have the inputs and outputs of the operations told that `ops` gives a name."""
        for node in self.nodes:
            name = ops(str(node.target)) if _makes_tensors(node) else None
            if name is not None:
                stack = list(_stack(node).values())
                given = tuple(each for each in node.all_input_nodes if _makes_tensors(each))
                within = stack[-1][0] if stack else ""
                self._around(node, node, node.name, name, ("input", "output"), within, given, node)

    def _output(self, name: str, number: int, call: GraphCall) -> Any:
        """Return what a call gives back: as its signature says, where the program was told to keep it."""
        signature = self.signatures.get(f"{name}@{number}" if number else name)
        if signature is not None:
            nodes = [self.by_name.get(getattr(each, "name", "")) for each in signature.outputs]
            return pytree.tree_unflatten(nodes, signature.out_spec)
        nodes = [self.by_name[value] for value in call.outputs]
        return nodes[0] if len(nodes) == 1 else tuple(nodes)

    def _around(
        self,
        first: Node,
        last: Node,
        key: object,
        name: str,
        sides: Collection[Side],
        within: str | None,
        given: tuple[Node, ...],
        value: Any,
    ) -> None:
        """Put a probe before the first node of a call, and one after its last."""
        forwards = self.forwards
        ends: tuple[tuple[Side, Any], ...] = ("input", given), ("output", value)
        for side, told in ends:
            probe = forwards.probe(partial(forwards.tell_end, key, name, side, side in sides, within))
            with self.graph.inserting_before(first) if side == "input" else self.graph.inserting_after(last):
                self.graph.call_function(tell, (forwards.number, probe, told))


def _scoped(node: Node) -> ScopedNode:
    calls = tuple((name, key) for key, (name, _) in _stack(node).items())
    inputs = tuple(each.name for each in node.all_input_nodes if each.op != "get_attr" and _makes_tensors(each))
    thrown_away = not node.users and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    outputs = (node.name,) if _makes_tensors(node) and not thrown_away else ()
    return ScopedNode(calls, inputs, outputs, _passed(node))


def _stack(node: Node) -> dict[str, tuple[str, str]]:
    """Return the calls a node ran in: key -> module name and class; the n-th call of a module has `@n` in its key."""
    stack = node.meta.get("nn_module_stack") or {}
    return {
        key: (name.partition("@")[0], kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)
        for key, (name, kind) in stack.items()
        if name != NOWHERE
    }


def _passed(node: Node) -> str | None:
    """Return the input that an operation gives back: a cast to the type it has, dropout that is switched off."""
    name, given = str(node.target).split(".")[1:2], node.args[0] if node.args else None
    if name not in (["to"], ["type_as"], ["contiguous"], ["alias"], ["dropout"]) or not isinstance(given, Node):
        return None
    before, after = given.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    switched_on = name == ["dropout"] and node.args[2] is True
    same = (before.dtype, before.device) == (after.dtype, after.device)
    return given.name if same and not switched_on else None


def _makes_tensors(node: Node) -> bool:
    return bool(leaves(node.meta.get("val")))


def _positional(program: ExportedProgram, module: torch.nn.Module) -> list[str]:
    """Return the names of the arguments that were given by position: a program does not take those by name."""
    spec = program.call_spec.in_spec
    count = spec.child(0).num_children if spec is not None else 0
    return list(inspect.signature(module.forward).parameters)[:count]


def _returned(graph: Graph) -> set[str]:
    return {node.name for node in graph.output_node().all_input_nodes}


def _users(program: ExportedProgram) -> dict[str, str]:
    """Find the modules whose weights an operation of another module uses, and whose operation that is."""
    signature = program.graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        owner = weights.get(node.name, "").rpartition(".")[0]
        stacks = [list(_stack(user).values()) for user in node.users]
        inside = {name for stack in stacks for name, _ in stack}
        if owner and stacks and owner not in inside:
            found.setdefault(owner, stacks[0][-1][0] if stacks[0] else "")
    return found
