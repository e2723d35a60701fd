"""A diagnosis as a document: the sentence, what is to blame and why, then the tree of modules.

    terminal.render(document(finding), width=80)

JSON holds every row, whatever the page folds away. Beside `title` and `sentences` its keys are:

    verdict    same, noise or differs
    because    its reason
    root       the module to blame that runs first; null when healthy, "" for the model's own code
    cause      {kind, because, evidence} of the root, or null
    roots      one for each module to blame: name, kind, because, where, error, floor, ratio, cause, removed, made
    final      {error, floor, removed} of the model's output; `removed` when all to blame are put right at once
    ranking    {name, damage}, worst first, where all layers differ alike
    packed     one for each module with packed weights: name, kind, weight_sqnr, output_sqnr in dB
    notes      what could not be done, a sentence each
    provenance {reference, candidate, inputs, seed, versions} as text
    rows       one for each call of a module: name, call, counterpart, kind, because, where, error, floor, ratio, leaf

Numbers that JSON has no word for are the strings NaN, Infinity and -Infinity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

from layerscope.diagnose.causes import Cause
from layerscope.diagnose.finding import KINDS, Blame, Finding, Judged, Kind, called
from layerscope.report.parts import (
    Cell,
    Column,
    Data,
    Document,
    Fact,
    Facts,
    Heading,
    Notes,
    Part,
    Sentence,
    Table,
    Tone,
    Value,
)
from layerscope.report.writing import many, some

TONES: dict[Kind, Tone] = {
    "same": "good",
    "noise": "good",
    "root": "bad",
    "nonfinite": "bad",
    "random": "bad",
    "quantised": "warn",
    "unpaired": "warn",
    "unplayed": "warn",
}
NAMED = 3  # of many modules with one reason, so many are named
RANKED = 20  # so many layers of a ranking are shown


def document(finding: Finding, *, title: str = "diagnosis") -> Document:
    """Build the page of a finding; `title` says of which models."""
    parts: list[Part] = [*_opening(finding)]
    for number, blame in enumerate(finding.roots, start=1):
        parts += _blame(blame, number if len(finding.roots) > 1 else None)
    if finding.rows:
        parts += _tree(finding)
    if finding.ranking:
        parts += _ranking(finding)
    if finding.packed:
        parts += _packed(finding)
    parts += _not_judged(finding.rows)
    parts += _data(finding)
    return Document(title, tuple(parts))


def _opening(finding: Finding) -> Iterator[Part]:
    yield Sentence(finding.verdict.because, "bad" if finding.verdict.word == "differs" else "good")
    if finding.rows:
        yield Sentence(_counted(finding.rows), "quiet")
    for note in finding.notes:
        yield Sentence(note, "warn")


def _counted(rows: Sequence[Judged]) -> str:
    found = Counter(row.kind for row in rows)
    kinds = ", ".join(f"{found[kind]:,} {kind}" for kind in KINDS if found[kind])
    calls, modules = len(rows), len({row.name for row in rows})
    of = many(modules, "module") if calls == modules else f"{many(calls, 'call')} of {many(modules, 'module')}"
    return f"{of} run on the reference's inputs: {kinds}"


def _blame(blame: Blame, number: int | None) -> Iterator[Part]:
    row = blame.row
    yield Heading(f"{number}. {called(blame.name)}" if number else called(blame.name))
    facts = [Fact("cause", f"{blame.cause.kind}: {blame.cause.because}", tone="bad")]
    if row.counterpart is not None and row.counterpart != row.name:
        facts.append(Fact("in the candidate", called(row.counterpart), "name"))
    facts.append(Fact("where", row.where + (f", call {row.call}" if row.call else "")))
    facts.append(Fact("judged", row.because))
    if row.error is not None:
        facts.append(Fact("error", row.error, "number"))
    if row.floor is not None:
        facts.append(Fact("floor", row.floor, "number"))
    if blame.removed is not None:
        facts.append(
            Fact("confirmed", f"the reference's output in its place removes {_share(blame.removed)} of the final error")
        )
    if blame.made is not None:
        facts.append(Fact("conversely", f"it alone makes a final error of {blame.made:.3g} in the reference"))
    yield Facts("blame", tuple(facts), audience="page")


def _share(share: float) -> str:
    """Write a share of one in whole percents; a little less than all is not written as all."""
    if not math.isfinite(share):
        return "an unknown part"
    return f"{min(share, 0.99):.0%}" if 0.985 < share < 0.9995 else f"{share:.0%}"


# The modules ------------------------------------------------------------------------------------


def _tree(finding: Finding) -> Iterator[Part]:
    guilty = any(row.guilty for row in finding.rows)
    columns = [
        Column("module", "module", "name"),
        Column("kind", "verdict"),
        Column("ratio", "error / floor", "number"),
        Column("modules", "modules", "count", rank=1),
        Column("error", "error", "number", rank=2),
        Column("where", "where", rank=3, audience="page" if guilty else "data"),
        Column("floor", "floor", "number", rank=4),
    ]
    yield Heading("modules")
    yield Table.of("tree", columns, map(_line, lines_of(finding.rows)), audience="page")
    yield Sentence(
        "each is judged on what the reference gave it, one with others inside by its own code alone",
        "quiet",
        audience="page",
    )


def _line(line: TreeLine) -> Iterator[Cell | Value]:
    row, tone = line.row, TONES[line.row.kind]
    yield Cell(row.name, tone if tone != "good" else "plain", text=line.text, depth=line.depth)
    yield Cell(row.kind, tone)
    yield row.ratio
    yield Cell(line.modules, "quiet", text="" if line.modules == 1 else None)
    yield row.error
    yield Cell(row.where, "quiet", text=row.where if row.guilty else "")
    yield row.floor


def _ranking(finding: Finding) -> Iterator[Part]:
    columns = [
        Column("name", "layer", "name"),
        Column("damage", "final error it makes", "number"),
        Column("bar", "", "bar", rank=1, audience="page"),
    ]
    rows = [(called(name), damage, damage) for name, damage in finding.ranking]
    yield Heading("damage to the output: keep the first in high precision")
    yield Table.of("ranked", columns, rows, most=RANKED, audience="page")


def _packed(finding: Finding) -> Iterator[Part]:
    columns = [
        Column("name", "module", "name"),
        Column("kind", "packed as"),
        Column("weight_sqnr", "weights", "number"),
        Column("output_sqnr", "output", "number"),
    ]
    worst = sorted(finding.packed, key=lambda one: one.weight_sqnr)
    rows = [(called(one.name), one.kind, one.weight_sqnr, one.output_sqnr) for one in worst]
    yield Heading("packed weights: SQNR in dB against the reference's, the lowest first")
    yield Table.of("packed weights", columns, rows, most=RANKED, audience="page")


def _not_judged(rows: Sequence[Judged]) -> Iterator[Part]:
    """Say which modules were not run on the reference's inputs, and why: a line for each reason."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.kind in ("unpaired", "unplayed"):
            reasons.setdefault(row.because, {})[called(row.name)] = None
    if reasons:
        yield Heading("not judged by themselves")
        items = tuple(Sentence(f"{some([*names], NAMED)}: {because}", "warn") for because, names in reasons.items())
        yield Notes("unjudged", items, audience="page")


# For machines -----------------------------------------------------------------------------------


def _data(finding: Finding) -> Iterator[Data]:
    yield Data("verdict", finding.verdict.word)
    yield Data("because", finding.verdict.because)
    yield Data("root", finding.root)
    yield Data("cause", _cause(finding.cause) if finding.cause is not None else None)
    yield Data("roots", [_root(blame) for blame in finding.roots])
    yield Data("final", asdict(finding.final))
    yield Data("ranking", [{"name": name, "damage": damage} for name, damage in finding.ranking])
    yield Data("packed", [asdict(one) for one in finding.packed])
    yield Data("notes", finding.notes)
    yield Data("provenance", finding.provenance)
    yield Data("rows", lambda: [asdict(row) for row in finding.rows])


def _root(blame: Blame) -> dict[str, Value]:
    row = {key: value for key, value in asdict(blame.row).items() if key != "leaf"}
    return {**row, "name": blame.name, "cause": _cause(blame.cause), "removed": blame.removed, "made": blame.made}


def _cause(cause: Cause) -> dict[str, Value]:
    evidence = cast("Mapping[str, Value]", cause.evidence)  # plain values, as a cause promises
    return {"kind": cause.kind, "because": cause.because, "evidence": evidence}


AGREEING: tuple[Kind, ...] = ("same", "noise", "quantised")
BY_WEIGHT: tuple[Kind, ...] = ("nonfinite", "root", "random", "unplayed", "unpaired", "quantised", "noise", "same")
SIDE_BY_SIDE = 3  # so many neighbours that agree are one line


@dataclass(frozen=True, slots=True)
class TreeLine:
    """One line: a module, or several that agree; `row` is the worst call of all it stands for."""

    depth: int
    text: str
    modules: int
    row: Judged


@dataclass(slots=True)
class _Branch:
    name: str
    text: str
    rows: list[Judged] = field(default_factory=list)
    children: list[_Branch] = field(default_factory=list)

    def all_rows(self) -> Iterator[Judged]:
        yield from self.rows
        for child in self.children:
            yield from child.all_rows()

    @property
    def agrees(self) -> bool:
        return all(row.kind in AGREEING for row in self.all_rows())


def lines_of(rows: Sequence[Judged]) -> Iterator[TreeLine]:
    """Draw the tree of the modules that were called, in the order they ran; the first level is always shown."""
    for top in _branches(rows):
        yield from _drawn(top, 0)


def _branches(rows: Sequence[Judged]) -> list[_Branch]:
    """Hang every module under the nearest one that contains it and was judged; a list of layers is not called."""
    nodes: dict[str, _Branch] = {}
    for row in rows:
        nodes.setdefault(row.name, _Branch(row.name, called(row.name))).rows.append(row)
    tops = []
    for name, node in nodes.items():
        above = _above(name, nodes)
        if above is None:
            tops.append(node)
        else:
            node.text = name[len(above) + 1 :] if above else name
            nodes[above].children.append(node)
    return tops


def _above(name: str, nodes: dict[str, _Branch]) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        if name in nodes:
            return name
    return None


def _drawn(node: _Branch, depth: int) -> Iterator[TreeLine]:
    if depth and node.agrees and node.children:
        yield _folded([node], depth)
        return
    yield TreeLine(depth, node.text, 1, min(node.rows, key=_weight))
    alike: list[_Branch] = []
    for child in node.children:
        if child.agrees:
            alike.append(child)
            continue
        yield from _agreeing(alike, depth + 1)
        alike = []
        yield from _drawn(child, depth + 1)
    yield from _agreeing(alike, depth + 1)


def _agreeing(nodes: Sequence[_Branch], depth: int) -> Iterator[TreeLine]:
    if len(nodes) >= SIDE_BY_SIDE:
        yield _folded(nodes, depth)
    else:
        for node in nodes:
            yield from _drawn(node, depth)


def _folded(nodes: Sequence[_Branch], depth: int) -> TreeLine:
    rows = [row for node in nodes for row in node.all_rows()]
    text = nodes[0].text if len(nodes) == 1 else f"{nodes[0].text} … {nodes[-1].text}"
    return TreeLine(depth, text, len({row.name for row in rows}), min(rows, key=_weight))


def _weight(row: Judged) -> tuple[int, float]:
    ratio = row.ratio if row.ratio is not None and not math.isnan(row.ratio) else -1.0
    return BY_WEIGHT.index(row.kind), -ratio
