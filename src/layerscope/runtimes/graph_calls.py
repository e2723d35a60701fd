"""Which values of a flat graph are a module's inputs and outputs, when each node knows the modules it ran in.

    calls = module_calls(nodes, returned={"linear_1"})
    calls["layers.3"][0].outputs        # the values of its first call

A module's output is what is computed inside its call and used outside it; or computed from its inputs and used nowhere,
because the caller threw it away: that one is the output of the innermost module alone. What only passes an input on (a
cast to the type it has) is an output where there is no other. A module's inputs are what it uses and did not compute.
Both stand in the order of the graph, which need not be that of the tuple which the source returned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from layerscope.patterns import Place


def places_of(kinds: Mapping[str, str]) -> list[Place]:
    """Return the modules a graph tells of, by name and class, and those that must be there to hold them.

    A module without a class computed nothing; where others are inside it, it is a list of them.
    """
    names: dict[str, None] = {"": None}
    for name in kinds:
        parts = name.split(".")
        names.update(dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts) + 1)))
    holders = {name.rpartition(".")[0] for name in names if "." in name}
    return [Place(name, _types(kinds.get(name, ""), name in holders)) for name in names]


def _types(kind: str, holds: bool) -> tuple[str, ...]:
    return (kind,) if kind else ("ModuleList",) if holds else ()


@dataclass(frozen=True, slots=True)
class ScopedNode:
    """One operation: the calls it ran in, outermost first, and the values it takes and makes.

    A call is named by its module and by what tells the calls of one module apart. Weights are no values. `passes` is
    the input that comes out again as it is.
    """

    calls: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    passes: str | None = None


@dataclass(slots=True)
class GraphCall:
    """One call of a module: the values that go in and come out, and the first and last of its nodes."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    first: int = 0
    last: int = 0


def module_calls(nodes: Sequence[ScopedNode], *, returned: Collection[str]) -> dict[str, list[GraphCall]]:
    """Return the calls of each module in the order they begin; `returned` are the values that the graph gives back."""
    inside: dict[tuple[str, str], list[int]] = {}
    users: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        for call in node.calls:
            inside.setdefault(call, []).append(at)
        for value in node.inputs:
            users.setdefault(value, []).append(at)
    found: dict[str, list[GraphCall]] = {}
    for call, members in inside.items():
        own = set(members)
        made = {value: at for at in members for value in nodes[at].outputs}
        used = dict.fromkeys(value for at in members for value in nodes[at].inputs)
        derived = _derived(members, made, nodes)
        outputs = [
            value
            for value, at in made.items()
            if value in returned
            or any(user not in own for user in users.get(value, ()))
            or (value not in users and nodes[at].calls[-1] == call and value in derived)
        ]
        passed = [value for value in outputs if _origin(value, made, nodes) not in made]
        if len(passed) < len(outputs):
            outputs = [value for value in outputs if value not in passed]
        inputs = [value for value in used if value not in made]
        found.setdefault(call[0], []).append(GraphCall(inputs, outputs, members[0], members[-1]))
    return found


def _derived(members: Sequence[int], made: Mapping[str, int], nodes: Sequence[ScopedNode]) -> set[str]:
    """Return what a call makes of its inputs; the rest it makes of nothing, such as a table of positions."""
    found: set[str] = set()
    for at in members:
        if any(value not in made or value in found for value in nodes[at].inputs):
            found.update(nodes[at].outputs)
    return found


def _origin(value: str, made: Mapping[str, int], nodes: Sequence[ScopedNode]) -> str:
    """Go back from a value that was only passed on to the one that was."""
    while value in made and (before := nodes[made[value]].passes) is not None:
        value = before
    return value
