"""`layerscope convert`: a run in another layout, with what was written and what had no place there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from layerscope.cli import options
from layerscope.cli.page import counting, put
from layerscope.pages.completeness import MOST
from layerscope.pages.statistics import shape_text
from layerscope.report.parts import Cell, Column, Document, Fact, Facts, Part, Sentence, Table
from layerscope.report.writing import NOTHING, many

if TYPE_CHECKING:
    from layerscope.store import Converted

LAYOUTS = ("layerscope", "quamba", "first-layer", "neuron", "monitor")
WINDOWS = ("model-explorer", "tensorboard")  # what other tools look at, and nothing reads back

EXAMPLES = options.examples(
    "layerscope convert runs/2-1 layer_outputs --to quamba --mode 2-1",
    "layerscope convert layer_outputs:2-1 runs/2-1 --to layerscope",
    "layerscope convert runs/bf16 full_model --to neuron --step 0",
    "layerscope convert comparison.json overlays --to model-explorer",
    "layerscope convert runs/train board --to tensorboard",
)

Command = TypeVar("Command", bound=Callable[..., Any])


def moments(command: Command) -> Command:
    """Which records are meant, where the layout holds one moment."""
    for word in ("rank", "call", "batch", "epoch", "step"):
        meaning = f"Only records of this {word}."
        command = click.option(f"--{word}", type=click.IntRange(min=0), metavar="N", help=meaning)(command)
    return command


@click.command(short_help="Write a run in another layout.", epilog=EXAMPLES)
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--to", "layout", type=click.Choice([*LAYOUTS, *WINDOWS]), required=True, help="The layout to write.")
@click.option("--mode", metavar="M", help="The mode's name in TARGET; default: SOURCE's own.")
@click.option("--overwrite", is_flag=True, help="Replace what TARGET has of this mode.")
@moments
@options.as_json
def command(
    source: str,
    target: str,
    patterns: tuple[str, ...],
    layout: Any,
    mode: str | None,
    overwrite: bool,
    as_json: bool,
    **given: int | None,
) -> int:
    """Write SOURCE, a run or a dump in any layout that is read, as TARGET, of the points that PATTERNs name.

    A layout that numbers its layers takes the outputs of the decoder layers. What has no place in it is listed.

    For model-explorer and tensorboard, SOURCE is a run, or a comparison that `compare --save_comparison` saved, and
    TARGET a folder.
    """
    if layout in WINDOWS:
        if patterns or mode or overwrite or any(n is not None for n in given.values()):
            raise click.UsageError(f"--to {layout} writes all of SOURCE; leave out PATTERN and the other options.")
        put(_shown(source, Path(target), layout), "json" if as_json else "terminal")
        return 0
    from layerscope.store import convert

    with counting("writing") as progress:
        done = convert(
            source, target, layout=layout, mode=mode, points=patterns, overwrite=overwrite, progress=progress, **given
        )
    put(document(done, target), "json" if as_json else "terminal")
    return 0


def _shown(source: str, target: Path, layout: str) -> Document:
    """Write what another tool looks at, and say what was written."""
    from layerscope.compare.page.saved import loads
    from layerscope.store import Run, open_run

    saved = source.endswith(".json") and Path(source).is_file()
    result = loads(Path(source).read_bytes()) if saved else open_run(source)
    if layout == "model-explorer":
        from layerscope.integrations.modelexplorer import write_overlays

        files, left_out = write_overlays(result, target)
        parts = [
            Sentence(f"{many(len(files), 'overlay')} written for Model Explorer; nodes are modules' names", "good")
        ]
        if left_out:
            parts.append(Sentence(f"{many(left_out, 'number')} left out, not finite", "warn"))
        return Document(str(target), (*parts, Table.of("written", [Column("file", "as")], [(str(f),) for f in files])))
    from layerscope.integrations import tensorboard

    if isinstance(result, Run):
        said = many(tensorboard.write_run(result, target), "record")
    else:
        said = many(tensorboard.write_comparison(result, target), "row")
    return Document(str(target), (Sentence(f"{said} written; look with: tensorboard --logdir {target}", "good"),))


def document(done: Converted, name: str) -> Document:
    """Build the page of a conversion."""
    return Document(name, tuple(_parts(done)))


def _parts(done: Converted) -> Iterator[Part]:
    tensors = [each for each in done.written if each.dtype is not None]
    mode = f", mode {done.mode}" if done.mode is not None else ""
    wrote = f"{many(len(tensors), 'tensor')} written in the {done.layout} layout{mode}"
    summaries = len(done.written) - len(tensors)
    wrote += f", and statistics alone of {many(summaries, 'other')}" if summaries else ""
    left = sum(each.records for each in done.left_out)
    wrote += f"; {many(left, 'record')} left out" if left else ""
    yield Sentence(wrote, "warn" if left else "good")
    changed = sorted({(w.recorded_dtype, w.dtype) for w in tensors if w.dtype != w.recorded_dtype})
    for recorded, written in changed:
        yield Sentence(f"{recorded} is written as {written}, because the files have no word for it", "warn")
    for note in done.notes:
        yield Sentence(note, "warn")
    facts = {"source": done.source, "target": done.target, "layout": done.layout, "mode": done.mode}
    yield Facts("converted", tuple(Fact(label, value, audience="data") for label, value in facts.items()))
    columns = [
        Column("point", "written", "name"),
        Column("file", "as"),
        Column("dtype", "dtype", rank=1),
        Column("shape", "shape", rank=1),
        Column("moment", "at", rank=2),
        Column("recorded_dtype", "recorded dtype", audience="data"),
    ]
    rows = [
        (str(w.point), w.file or None, w.dtype, _shape(w.shape), str(w.moment), w.recorded_dtype) for w in done.written
    ]
    yield Table.of("written", columns, rows, most=MOST)
    if done.left_out:
        columns = [
            Column("point", "left out", "name"),
            Column("records", "records", "count"),
            Column("reason", "because"),
        ]
        yield Table.of("left_out", columns, [(str(e.point), e.records, e.reason) for e in done.left_out], most=MOST)


def _shape(shape: tuple[int, ...] | None) -> Cell:
    return Cell(None, text=NOTHING) if shape is None else Cell(list(shape), text=shape_text(shape))
