"""Which call of a module each node of an ONNX graph belongs to: the file names modules, not their calls.

    numbers, unclear = call_numbers(nodes, classes)
    numbers["layers.3"]         # place of a node -> the number of the call
    unclear["block"]            # how often the same runs in a row, where the file does not tell whose loop it is

Nodes stand in the order they were traced in, so a call is over when something else ran, and the module goes on with
what became of its result, or does the same again. What runs several times in a row is as many calls where the module
and all inside it are torch.nn's, which do nothing twice. Any other may loop in one call: both give the same file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

SIZES = ("aten.sym_", "_operator.", "math.")  # operations on sizes, which are no tensors in torch
_UNNAMED = "val_"  # what the exporter calls values in the middle of an operation
_LIBRARY = "torch.nn.modules."
_LOOPS = "torch.nn.modules.rnn."  # which use their weights for one step after the other
_Kind = tuple[tuple[str, ...], str, str, frozenset[str]]  # modules, operation, its text, weights


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One node: the modules it ran in, and the operation of torch it is part of.

    Of that operation it knows its text without the names of values, the values it names, and the weights among them.
    """

    modules: tuple[str, ...]
    op: str
    fx: str
    text: str
    named: frozenset[str]
    weights: frozenset[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(slots=True)
class _Piece:
    """Nodes of a module that nothing outside it parts, and whether they go on with what became of its result."""

    places: list[int]
    follows: bool = False


def call_numbers(
    nodes: Sequence[OnnxNode], classes: Mapping[str, str]
) -> tuple[dict[str, dict[int, int]], dict[str, int]]:
    """Number the calls of each module; of those whose calls cannot be told apart, say how often the same runs."""
    members: dict[str, dict[int, None]] = {}
    for at, node in enumerate(nodes):
        for name in node.modules:
            members.setdefault(name, {})[at] = None
    members.pop("", None)
    live = _live(nodes)
    telling = live - _shared(nodes)
    library = {name for name, kind in classes.items() if kind.startswith(_LIBRARY) and not kind.startswith(_LOOPS)}
    numbers: dict[str, dict[int, int]] = {}
    unclear: dict[str, int] = {}
    for name, places in members.items():
        calls = _Calls(nodes, name, live, telling)
        for piece in _pieces(nodes, list(places), telling):
            calls.add(piece)
        calls.part(library)
        if calls.unclear:
            unclear[name] = calls.unclear
        else:
            numbers[name] = {at: number for number, call in enumerate(calls.places) for at in call}
    return numbers, unclear


def merged(value: str, made: OnnxNode, user: OnnxNode, makers: Mapping[str, OnnxNode]) -> bool:
    """Tell whether the exporter's optimiser gave a node the value of another one that computed the same."""
    if not user.named or value in user.named:
        return False
    if value.startswith(_UNNAMED):
        return made.fx != user.fx
    return any(_stem(name) == _stem(value) and name not in makers for name in user.named)


def _stem(name: str) -> str:
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name


def _live(nodes: Sequence[OnnxNode]) -> set[int]:
    """Return the operations that compute from inputs: the others make tables, which are made once for all calls."""
    makers = {value for node in nodes for value in node.outputs}
    found: set[str] = set()
    for node in nodes:
        if not node.op.startswith(SIZES) and any(value not in makers or value in found for value in node.inputs):
            found.update(node.outputs)
    return {at for at, node in enumerate(nodes) if node.op and not found.isdisjoint(node.outputs)}


def _shared(nodes: Sequence[OnnxNode]) -> set[int]:
    """Return the nodes that may stand for several calls: users call what they make by different names."""
    makers = {value: node for node in nodes for value in node.outputs}
    known = makers.keys() | {value for node in nodes for value in node.inputs}
    users: dict[str, list[OnnxNode]] = {}
    for node in nodes:
        for value in node.inputs:
            users.setdefault(value, []).append(node)
    found: set[str] = set()
    for value, made in makers.items():
        around = [user for user in users.get(value, ()) if user.named and (user.fx != made.fx or not made.fx)]
        names = [{value} if value in user.named else set(user.named - user.weights - known) for user in around]
        if any(merged(value, made, user, makers) for user in around) or (all(names) and not _common(names)):
            found.add(value)
    for node in reversed(nodes):  # what was made for a shared value alone, in the same module, is shared too
        next_to = [user for value in node.outputs for user in users.get(value, ())]
        near = all(node.modules[: len(user.modules)] == user.modules for user in next_to)
        if next_to and near and all(not found.isdisjoint(user.outputs) for user in next_to):
            found.update(node.outputs)
    return {at for at, node in enumerate(nodes) if not found.isdisjoint(node.outputs)}


def _common(names: list[set[str]]) -> bool:
    return len(names) < 2 or bool(set.intersection(*names))


def _pieces(nodes: Sequence[OnnxNode], places: list[int], telling: set[int]) -> Iterator[_Piece]:
    """Part the nodes of a module where something else ran in between."""
    inside = set(places)
    made: set[str] = set()  # by the module
    derived: set[str] = set()  # from that, outside it
    piece = _Piece([])
    parted = False
    for at in range(places[0], places[-1] + 1):
        node = nodes[at]
        if at not in inside:
            goes_on = not made.isdisjoint(node.inputs) or not derived.isdisjoint(node.inputs)
            if goes_on and not node.op.startswith(SIZES):
                derived.update(node.outputs)
                parted = True
            parted = parted or at in telling
            continue
        if parted:
            yield piece
            piece, parted = _Piece([]), False
        piece.places.append(at)
        piece.follows = piece.follows or not derived.isdisjoint(node.inputs)
        made.update(node.outputs)
    yield piece


class _Calls:
    """The calls of one module, as its pieces come."""

    def __init__(self, nodes: Sequence[OnnxNode], name: str, live: set[int], telling: set[int]) -> None:
        self.nodes = nodes
        self.name = name
        self.live = live
        self.telling = telling  # those which every call has
        self.places: list[list[int]] = []
        self.unclear = 0  # how often the same runs, where that may be one call

    def add(self, piece: _Piece) -> None:
        """Take a piece for a call, or for the rest of the last one: what that did already, it does not do again."""
        here, before = (set(self._counts(some)) for some in (piece.places, self.places[-1] if self.places else ()))
        if not self.places or piece.follows or (here and here == before):
            self.places.append(piece.places)
        elif here.isdisjoint(before):
            self.places[-1] = self.places[-1] + piece.places
        else:
            self.unclear = 2

    def part(self, library: set[str]) -> None:
        """Part the calls in which the same runs several times in a row, where these are calls for certain."""
        parts = [self._in_a_row(call, library) for call in self.places]
        self.places = [call for part in parts for call in part]

    def _in_a_row(self, places: list[int], library: set[str]) -> list[list[int]]:
        counts = self._counts(places, among=self.live)
        times = max(min(each.values(), default=1) for each in (counts, self._counts(places)))
        if times == 1:
            return [places]
        steps = self._steps(places, among=self.live)
        kinds = [kind for kind, _ in steps]
        length = len(kinds) // times
        starts = [places.index(at) for _, at in steps[::length]] if set(counts.values()) == {times} else []
        modules = {name for at in places for name in self._within(at)}
        if (
            not starts
            or kinds != kinds[:length] * times
            or not modules <= library
            or any(places[start - 1] not in self.live for start in starts[1:])  # which may belong to either
        ):
            self.unclear = max(self.unclear, times)
            return [places]
        return [places[start:end] for start, end in zip([0, *starts[1:]], [*starts[1:], None], strict=True)]

    def _counts(self, places: Iterable[int], among: set[int] | None = None) -> Counter[_Kind]:
        """Count the operations of each kind; where some use weights, those alone: no optimiser takes them out."""
        kinds = [kind for kind, _ in self._steps(places, among)]
        return Counter([kind for kind in kinds if kind[-1]] or kinds)

    def _steps(self, places: Iterable[int], among: set[int] | None = None) -> list[tuple[_Kind, int]]:
        """Return the operations in their order: what kind each is, and its first node."""
        steps: dict[str, tuple[_Kind, int]] = {}
        for at in places:
            node = self.nodes[at]
            if at in (self.telling if among is None else among):
                steps.setdefault(node.fx, ((self._within(at), node.op, node.text, node.weights), at))
        return list(steps.values())

    def _within(self, at: int) -> tuple[str, ...]:
        modules = self.nodes[at].modules
        return modules[modules.index(self.name) :]
