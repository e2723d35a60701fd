"""`layerscope points`: what can be seen in a model, or was seen in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layerscope.cli import options
from layerscope.cli.choosing import by_depth
from layerscope.cli.completeness import completeness_parts, damage_of, run_facts
from layerscope.cli.page import Tell, counting, put, working
from layerscope.cli.statistics import shape_text
from layerscope.errors import Damaged, NewerFormat, NotARun
from layerscope.patterns import Place, select, split
from layerscope.points import escape
from layerscope.report.parts import Cell, Column, Document, Part, Sentence, Table, Value
from layerscope.report.writing import many
from layerscope.runtimes.files import kind_of

if TYPE_CHECKING:
    from layerscope.models import Loaded
    from layerscope.runtimes.runtime import Runtime
    from layerscope.store import Damage, Reader

__all__ = ["command"]

EXAMPLES = options.examples(
    "layerscope points tiny-transformer",
    "layerscope points tiny-transformer 'model.layers.{0,-1}.**'",
    "layerscope points model.onnx",
    "layerscope points runs/demo",
)


@click.command(short_help="List the points of a model or a run.", epilog=EXAMPLES)
@click.argument("of", metavar="MODEL|RUN")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@options.as_json
def command(of: str, patterns: tuple[str, ...], as_json: bool) -> int:
    """List the modules of MODEL, or the points recorded in RUN; with PATTERNs, what they select.

    Of a folder that a compiled model was saved to, its taps are listed; its graph is not loaded.

    Exit code 2 when something of RUN cannot be read; the rest is listed.
    """
    run = _run(of)
    damaged: list[Damage] = []
    if run is not None:
        with counting("reading") as tell:
            page, damaged = run_document(run, of, patterns, tell)
    elif kind_of(Path(of)) == "compiled":
        with working(f"reading {of}"):
            from layerscope.cli.tapped import tapped_document
            from layerscope.compiled.saving import read_table

            page = tapped_document(read_table(of), of, patterns)
    else:
        with working(f"loading {of}"):
            from layerscope.models import load_model

            loaded = load_model(of)
        page = selected_document(loaded, patterns) if patterns else model_document(loaded, folded=not as_json)
    put(page, "json" if as_json else "terminal")
    return 2 if damaged else 0


def _run(of: str) -> Reader | None:
    """Open a run; None where the text names a model, or nothing at all (which the models then say)."""
    from layerscope.models import is_model
    from layerscope.store import open_run

    if is_model(of):
        return None
    try:
        return open_run(of)
    except NewerFormat:
        raise
    except NotARun:
        if "://" in of:
            raise
        return None


# A run ------------------------------------------------------------------------------------------


def run_document(run: Reader, name: str, patterns: Sequence[str], tell: Tell) -> tuple[Document, list[Damage]]:
    """List what was recorded: point by point, how often, of what type and shape; and what cannot be read."""
    from layerscope.store import selected

    points = by_depth(selected(run, patterns))
    wanted = set(points)
    records: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    dtypes: dict[str, dict[str, None]] = {}
    shapes: dict[str, dict[tuple[int, ...], None]] = {}
    kept: dict[str, set[str]] = {}
    for done, entry in enumerate(run.records()):
        if done % 1000 == 0:
            tell("", done, run.manifest.completeness.records)
        if entry.point not in wanted:
            continue
        text = str(entry.point)
        records[text] += 1
        nbytes[text] += entry.nbytes
        try:
            summary = entry.summary
        except Damaged:  # which the run remembers
            summary = None
        dtype = entry.dtype or (summary.dtype if summary else None)
        shape = entry.shape if entry.shape is not None else summary.shape if summary else None
        if dtype is not None:
            dtypes.setdefault(text, {})[dtype] = None
        if shape is not None:
            shapes.setdefault(text, {})[tuple(shape)] = None
        what = {"tensor"} if entry.dtype else set()
        kept.setdefault(text, set()).update(what | ({"summary"} if summary else set()))
    columns = [
        Column("point", "point", "name"),
        Column("shape", "shape", rank=1),
        Column("dtype", "dtype", rank=2),
        Column("records", "records", "count"),
        Column("kept", "kept", rank=3),
        Column("nbytes", "size", "bytes", rank=4),
    ]
    rows = []
    for point in map(str, points):
        several = list(shapes.get(point, {}))
        text = shape_text(several[0]) if len(several) == 1 else f"{len(several)} shapes" if several else "-"
        rows.append(
            (
                point,
                Cell([list(s) for s in several] if len(several) != 1 else list(several[0]), text=text),
                ", ".join(dtypes.get(point, {})),
                records[point],
                " + ".join(sorted(kept.get(point, ()), reverse=True)),
                nbytes[point],
            )
        )
    damaged = damage_of(run)
    first = completeness_parts(run, name, damaged=damaged)
    return Document(name, (*first, run_facts(run), Table.of("points", columns, rows))), damaged


# A model ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """A module in the tree, with what makes it like its siblings."""

    name: str
    part: str
    kind: str
    parameters: int
    same_as: str | None = None
    children: list[_Node] = field(default_factory=list)

    @property
    def likeness(self) -> tuple[object, ...]:
        return (self.kind, self.parameters, self.same_as, tuple((c.part, c.likeness) for c in self.children))


def model_document(loaded: Loaded, *, folded: bool) -> Document:
    """Draw the module tree; `folded` shows numbered modules that are alike once, as a slice that selects them."""
    from layerscope.runtimes import find

    runtime = find(loaded.model)
    places, shared = runtime.points(loaded.model), runtime.shared(loaded.model)
    sizes = _sizes(runtime, loaded.model, places)
    root = _tree(places, shared, sizes)
    columns = [
        Column("name", "module", "name"),
        Column("type", "type"),
        Column("parameters", "parameters", "count", audience="all" if sizes else "data"),
        Column("same_as", "", audience="all" if shared else "data"),
    ]
    table = Table.of("modules", columns, _lines(root, folded=folded))
    total = sum(parameter.numel() for parameter in runtime.parameters(loaded.model))
    remark = runtime.remark(loaded.model)
    sentence = f"{many(len(places) - len(shared), 'point' if remark else 'module')}, {many(total, 'parameter')}"
    sentence += "" if runtime.NAME == "eager" else f"; recorded in {runtime.NAME}"
    parts: list[Part] = [Sentence(sentence), *([Sentence(remark, "warn")] if remark else []), table]
    if folded:
        parts.append(Sentence(_hint(table), "quiet"))
    return Document(loaded.name, tuple(parts))


def _hint(table: Table) -> str:
    """Show how a line of the tree is written as a pattern, by the first that stands for several modules."""
    names = [str(row[0].value) for row in table.rows]
    example = next((name for name in names if name.endswith("]")), names[-1])
    return f"each line is a pattern: '{example}'; `layerscope points MODEL PATTERN...` lists what one selects"


def selected_document(loaded: Loaded, patterns: Sequence[str]) -> Document:
    """List the points that patterns select, as a recording would see them."""
    from layerscope.runtimes import find

    runtime = find(loaded.model)
    places = runtime.points(loaded.model)
    sizes, kinds = _sizes(runtime, loaded.model, places), {place.name: _kind(place) for place in places}
    modules, ops = split(patterns)
    found = select(modules, places) if modules else []
    runtime.check(loaded.model, {point.name: {point.side} for point in found}, ops=bool(ops))
    columns = [
        Column("point", "point", "name"),
        Column("type", "type"),
        Column("parameters", "parameters", "count", audience="all" if sizes else "data"),
    ]
    rows = [(str(point), kinds[point.name], sizes.get(point.name, 0)) for point in found]
    parts: list[Part] = [Sentence(f"{many(len(found), 'point')} selected")]
    if ops:
        parts.append(
            Sentence(f"{', '.join(map(str, ops))}: operations are known once they run; record to see them.", "warn")
        )
    parts.append(Table.of("points", columns, rows))
    return Document(loaded.name, tuple(parts))


def _tree(places: Sequence[Place], shared: Mapping[str, str], sizes: Mapping[str, int]) -> _Node:
    root = _Node("", ".", "", sizes.get("", 0))
    nodes = {"": root}
    for place in places:
        if not place.name:
            root.kind = _kind(place)
            continue
        parent, _, part = place.name.rpartition(".")
        node = _Node(place.name, part, _kind(place), sizes.get(place.name, 0), shared.get(place.name))
        nodes[place.name] = node
        nodes.get(parent, root).children.append(node)
    return root


def _kind(place: Place) -> str:
    return place.types[0] if place.types else ""


def _sizes(runtime: Runtime, model: Any, places: Sequence[Place]) -> dict[str, int]:
    """Count the parameters of each module with those inside it, each once; empty where the weights are not known."""
    shared, own = runtime.shared(model), runtime.weights(model)
    if not own:
        return {}
    parameters = runtime.parameters(model)
    known = set(map(id, parameters))
    within: dict[str, dict[int, int]] = {place.name: {} for place in places}
    for name, module in {**{name: name for name in own}, **shared}.items():
        sizes = {id(tensor): tensor.numel() for _, tensor in own.get(module, ()) if id(tensor) in known}
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            within.setdefault(".".join(parts[:depth]), {}).update(sizes)
    return {name: sum(sizes.values()) for name, sizes in within.items()}


def _lines(
    node: _Node, *, folded: bool, name: str = ".", part: str = ".", times: int = 1, depth: int = 0
) -> Iterator[Sequence[Cell | Value]]:
    kind = f"{times} \u00d7 {node.kind}" if times > 1 else node.kind
    same = f"= {escape(node.same_as)}" if node.same_as is not None else ""
    each = f"{times} \u00d7 {node.parameters:,}" if times > 1 else None
    parameters = Cell(node.parameters, "plain" if node.parameters else "quiet", text=each)
    yield (
        Cell(name, text=part, depth=depth),
        Cell(node.kind, text=kind),
        parameters,
        Cell(node.same_as, "quiet", text=same),
    )
    for first, count in _groups(node.children, folded=folded):
        above = "" if name == "." else name
        if count > 1:
            below = f"[{first.part}:{int(first.part) + count}]"
            whole = f"{above or '.'}{below}"
        else:
            below = escape(first.part)
            whole = f"{above}.{below}" if above else below
        yield from _lines(first, folded=folded, name=whole, part=below, times=count, depth=depth + 1)


def _groups(children: Sequence[_Node], *, folded: bool) -> Iterator[tuple[_Node, int]]:
    """Take neighbours together that are numbered in a row and alike all the way down."""
    at = 0
    while at < len(children):
        first, count = children[at], 1
        while (
            folded
            and first.part.isdecimal()
            and at + count < len(children)
            and children[at + count].part == str(int(first.part) + count)
            and children[at + count].likeness == first.likeness
        ):
            count += 1
        yield first, count
        at += count
