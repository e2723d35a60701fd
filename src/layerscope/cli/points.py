"""`layerscope points`: what can be seen in a model, or was seen in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerscope.cli import options
from layerscope.cli.page import counting, put, working
from layerscope.errors import Damaged, NewerFormat, NoSuchPoint, NotARun
from layerscope.pages.completeness import completeness_parts, damage_of, run_facts
from layerscope.pages.selection import by_depth
from layerscope.pages.statistics import shape_text
from layerscope.patterns import Place, select, split
from layerscope.points import escape
from layerscope.progress import Progress
from layerscope.report.parts import Cell, Column, Document, Part, Sentence, Table, Value
from layerscope.report.writing import many
from layerscope.runtimes.listing import Listing
from layerscope.runtimes.model_files import is_file, kind_of, listed

if TYPE_CHECKING:
    from layerscope.store import Damage, Run

EXAMPLES = options.examples(
    "layerscope points tiny-transformer",
    "layerscope points tiny-transformer 'model.layers.{0,-1}.**'",
    "layerscope points model.onnx",
    "layerscope points runs/demo",
)


@click.command(short_help="List the points of a model or a run.", epilog=EXAMPLES)
@click.argument("of", metavar="MODEL|RUN")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--trust", is_flag=True, help="Load a TorchScript or .pt2 file to list it, which can run code in it.")
@options.as_json
def command(of: str, patterns: tuple[str, ...], trust: bool, as_json: bool) -> int:
    """List the modules of MODEL, or the points recorded in RUN; with PATTERNs, what they select.

    Of a folder that a compiled model was saved to, its taps are listed; its graph is not loaded. To list a run,
    such a folder, or a TorchScript, .pt2 or .onnx file runs nothing in it; file.py:function is a program, and called.

    Exit code 2 when something of RUN cannot be read; the rest is listed.
    """
    run = _run(of)
    damaged: list[Damage] = []
    if run is not None:
        with counting("reading") as progress:
            page, damaged = run_document(run, of, patterns, progress)
    elif kind_of(Path(of)) == "compiled":
        with working(f"reading {of}"):
            from layerscope.cli.tapped import tapped_document
            from layerscope.compile_taps.compiled_folder import read_table

            page = tapped_document(read_table(of), of, patterns)
    else:
        with working(f"loading {of}"):
            listing = (None if trust or not is_file(of) else listed(Path(of))) or _loaded(of)
        page = selected_document(listing, of, patterns) if patterns else model_document(listing, of, folded=not as_json)
    put(page, "json" if as_json else "terminal")
    return 2 if damaged else 0


def _loaded(of: str) -> Listing:
    from layerscope.models import load_model
    from layerscope.runtimes import find

    model = load_model(of).model
    return Listing.of(find(model), model)


def _run(of: str) -> Run | None:
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


def run_document(run: Run, name: str, patterns: Sequence[str], progress: Progress) -> tuple[Document, list[Damage]]:
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
            progress("", done, run.manifest.completeness.records)
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


def model_document(listing: Listing, name: str, *, folded: bool) -> Document:
    """Draw the module tree; `folded` shows numbered modules that are alike once, as a slice that selects them."""
    places, shared, sizes, remark = listing.places, listing.shared, listing.sizes, listing.remark
    root = _tree(places, shared, sizes)
    columns = [
        Column("name", "module", "name"),
        Column("type", "type"),
        Column("parameters", "parameters", "count", audience="all" if sizes else "data"),
        Column("same_as", "", audience="all" if shared else "data"),
    ]
    table = Table.of("modules", columns, _lines(root, folded=folded))
    modules = len(places) - len(shared)
    sentence = f"{many(modules, 'point' if remark else 'module')}, {many(listing.total, 'parameter')}"
    sentence += "" if listing.runtime == "eager" else f"; recorded in {listing.runtime}"
    parts: list[Part] = [Sentence(sentence), *([Sentence(remark, "warn")] if remark else []), table]
    if folded:
        parts.append(Sentence(_hint(table), "quiet"))
    return Document(name, tuple(parts))


def _hint(table: Table) -> str:
    """Show how a line of the tree is written as a pattern, by the first that stands for several modules."""
    names = [str(row[0].value) for row in table.rows]
    example = next((name for name in names if name.endswith("]")), names[-1])
    return f"each line is a pattern: '{example}'; `layerscope points MODEL PATTERN...` lists what one selects"


def selected_document(listing: Listing, name: str, patterns: Sequence[str]) -> Document:
    """List the points that patterns select, as a recording would see them."""
    sizes, kinds = listing.sizes, {place.name: _kind(place) for place in listing.places}
    modules, ops = split(patterns)
    try:
        found = select(modules, listing.places) if modules else []
    except NoSuchPoint as error:
        raise NoSuchPoint(f"{error} {listing.remark}".rstrip()) from None
    listing.refuse({point.name: {point.side} for point in found}, bool(ops))
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
    return Document(name, tuple(parts))


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
