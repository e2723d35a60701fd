"""The judged modules as the lines of a tree, with what agrees folded away.

    for line in lines_of(finding.rows):
        print("  " * line.depth + line.text, line.row.kind)

A module with nothing but agreement inside is one line, and so are several of them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from layerscope.diagnose.finding import Judged, Kind, called

AGREEING: tuple[Kind, ...] = ("same", "noise", "quantised")
BY_WEIGHT: tuple[Kind, ...] = ("nonfinite", "root", "random", "unplayed", "unpaired", "quantised", "noise", "same")
SIDE_BY_SIDE = 3  # so many neighbours that agree are one line


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a module, or several that agree; `row` is the worst call of all it stands for."""

    depth: int
    text: str
    modules: int
    row: Judged


@dataclass(slots=True)
class _Node:
    name: str
    text: str
    rows: list[Judged] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)

    def all_rows(self) -> Iterator[Judged]:
        yield from self.rows
        for child in self.children:
            yield from child.all_rows()

    @property
    def agrees(self) -> bool:
        return all(row.kind in AGREEING for row in self.all_rows())


def lines_of(rows: Sequence[Judged]) -> Iterator[Line]:
    """Draw the tree of the modules that were called, in the order they ran; the first level is always shown."""
    for top in _tree(rows):
        yield from _lines(top, 0)


def _tree(rows: Sequence[Judged]) -> list[_Node]:
    """Hang every module under the nearest one that contains it and was judged; a list of layers is not called."""
    nodes: dict[str, _Node] = {}
    for row in rows:
        nodes.setdefault(row.name, _Node(row.name, called(row.name))).rows.append(row)
    tops = []
    for name, node in nodes.items():
        above = _above(name, nodes)
        if above is None:
            tops.append(node)
        else:
            node.text = name[len(above) + 1 :] if above else name
            nodes[above].children.append(node)
    return tops


def _above(name: str, nodes: dict[str, _Node]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in nodes:
            return name
    return None


def _lines(node: _Node, depth: int) -> Iterator[Line]:
    if depth and node.agrees and node.children:
        yield _folded([node], depth)
        return
    yield Line(depth, node.text, 1, min(node.rows, key=_weight))
    alike: list[_Node] = []
    for child in node.children:
        if child.agrees:
            alike.append(child)
            continue
        yield from _agreeing(alike, depth + 1)
        alike = []
        yield from _lines(child, depth + 1)
    yield from _agreeing(alike, depth + 1)


def _agreeing(nodes: Sequence[_Node], depth: int) -> Iterator[Line]:
    if len(nodes) >= SIDE_BY_SIDE:
        yield _folded(nodes, depth)
    else:
        for node in nodes:
            yield from _lines(node, depth)


def _folded(nodes: Sequence[_Node], depth: int) -> Line:
    rows = [row for node in nodes for row in node.all_rows()]
    text = nodes[0].text if len(nodes) == 1 else f"{nodes[0].text} … {nodes[-1].text}"
    return Line(depth, text, len({row.name for row in rows}), min(rows, key=_weight))


def _weight(row: Judged) -> tuple[int, float]:
    ratio = row.ratio if row.ratio is not None and not math.isnan(row.ratio) else -1.0
    return BY_WEIGHT.index(row.kind), -ratio
