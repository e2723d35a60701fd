"""`layerscope record`: run a model once and keep what its layers computed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from layerscope.cli import options
from layerscope.cli.page import counting, put, working
from layerscope.errors import BadModel, BadText, LayerscopeError, RunBusy, RunExists
from layerscope.pages.completeness import completeness_parts
from layerscope.patterns import Pattern
from layerscope.points import SIDES, Side
from layerscope.progress import Progress
from layerscope.ranks import rank
from layerscope.report.parts import Document, Fact, Facts, Part
from layerscope.report.writing import printable

if TYPE_CHECKING:
    import torch

    from layerscope.models import Inputs
    from layerscope.modes.preparing import Prepared

EXAMPLES = options.examples(
    "layerscope record tiny-transformer 'model.layers.*' -o runs/tiny",
    "layerscope record make.py:model 'type:Linear' --side input,output -o runs/linears",
    "layerscope record checkpoints/llama 'model.layers.*:output,grad_output' --prompt 'Hello' -o runs/llama",
    "layerscope record tiny-transformer 'type:Linear' --keep summary --statistics channels -o runs/channels",
    "layerscope record tiny-transformer --mode fp32,bf16,int8-weight --layers all -o runs",
    "layerscope record quamba-small --mode essential --layers first,last --side input,output -o layer_outputs",
    "layerscope record quamba-small --mode fp32,2-1 --layers first,last --components conv,ssm -o components",
)


@click.command(short_help="Run a model and keep what its layers compute.", epilog=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@options.to(required=True)
@click.option(
    "--keep",
    type=click.Choice(["tensor", "summary", "both"]),
    default="both",
    show_default=True,
    help="Tensors, their statistics, or both.",
)
@click.option(
    "--statistics",
    metavar="WHICH",
    default="full",
    show_default=True,
    help="full; moments, without quantiles and fingerprints; channels, full and of each channel along the last axis, "
    "or along another: 'channels(axis=1)'.",
)
@click.option("--when", metavar="SCHEDULE", help="Which forwards: 'every(100) | first(3)'; default: all.")
@click.option("--side", metavar="SIDE,...", help=f"Sides of patterns that name none: {', '.join(SIDES)}.")
@click.option("--layers", metavar="WHICH", help="Decoder layers: first, last, all, numbers with commas; or a PATTERN.")
@click.option("--components", metavar="WHICH", help="Of those layers, what goes in and out of: conv, ssm; with commas.")
@click.option(
    "--stop-after",
    metavar="LAYER",
    help="End each forward after this layer: first, a number, a module's name; never. Default: after the first layer, "
    "where --layers names no other.",
)
@options.modes("Record variants: names or all, fp_only, quant_only, essential; each into RUN/MODE.")
@options.prepared
@options.model_inputs
@click.option("--append", is_flag=True, help="Add steps to a run that is there already.")
@click.option(
    "--observer",
    type=click.Choice(["measure", "skip"]),
    default="measure",
    show_default=True,
    help="Of a model that torch.compile runs: run the first forward untapped as well, to see what the taps change.",
)
@click.option("--precision-faithful", is_flag=True, help="Of such a model: have Inductor round where the source does.")
@click.option("--no-floors", is_flag=True, help="Do not measure what rounding does, by which others are judged.")
@options.as_json
def command(
    model: str,
    patterns: tuple[str, ...],
    to: str,
    keep: Literal["tensor", "summary", "both"],
    statistics: str,
    when: str | None,
    side: str | None,
    layers: str | None,
    components: str | None,
    stop_after: str | None,
    modes: tuple[str, ...],
    modes_file: str | None,
    append: bool,
    observer: Literal["measure", "skip"],
    precision_faithful: bool,
    no_floors: bool,
    as_json: bool,
    seed: int,
    **asked: Any,
) -> int:
    """Run MODEL on its inputs and write what PATTERNs name to a run.

    MODEL is a built-in name, file.py:function, package.module:function, a local Hugging Face checkpoint folder, a file
    (TorchScript, .pt2 of torch.export, .onnx), or a folder that a compiled model was saved to. Functions, TorchScript,
    .pt2 files and compiled folders are programs, and are run; to list a file with `layerscope points` runs nothing.

    One forward is run for each input; a backward pass follows where a gradient is asked for, from the model's own
    loss or, where it returns none, from the mean square of its first output.

    With --mode, each variant of the model is recorded on the same inputs, into a folder of its own: RUN/MODE. Words
    after --mode that are modes are meant as such: --mode 0 2-1. `layerscope modes MODEL` lists them.
    """
    _refuse_unknown(statistics)
    if not patterns and layers is None:
        raise click.UsageError("say what to record: PATTERN..., or --layers first,last")
    if modes and (precision_faithful or observer == "skip"):
        raise click.UsageError("--observer and --precision-faithful are for one compiled model; leave out --mode")
    sided(patterns, side)
    if not append and not modes:
        _refuse_existing(to)
    ready = loaded_model(model, modes_file=modes_file, seed=seed, modes=bool(modes), **asked)
    ready.settings["command"] = click.get_current_context().obj
    batches = _guarded(ready.batches(), model)
    if modes:
        from layerscope.cli.mode_recordings import record_variants, told_apart

        modes, patterns = told_apart(modes, patterns, ready.model)
    taps = [*sided(patterns, side), *_layers(ready, layers, side), *_components(ready, layers, components)]
    gradients = any(s.startswith("grad") for tap in taps if not tap.exclude for s in tap.sides)
    texts = [str(tap) for tap in taps]
    forward = partial(_forward, gradients=gradients, name=model)
    stop = _stop(ready, stop_after, gradients=gradients, alone=None if patterns else layers)
    if modes:
        page, code = record_variants(
            ready, modes, list(batches), texts,
            to=to, keep=keep, statistics=statistics, when=when, append=append, forward=forward, stop_after=stop,
            floors=not no_floors,
        )  # fmt: skip
    else:
        how: dict[str, Any] = {"when": when, "statistics": statistics, "stop_after": stop}
        how |= {"observer": observer, "precision_faithful": precision_faithful}
        how["floors"] = not (no_floors or append or stop or keep == "summary")
        page, code = _record(ready, batches, texts, to=to, keep=keep, append=append, forward=forward, **how), 0
    put(page, "json" if as_json else "terminal")
    return code


def loaded_model(model: str, *, modes_file: str | None, seed: int, **asked: Any) -> Prepared:
    """Load the model and what is asked of its inputs and weights; what is worth saying of them goes to stderr."""
    with working(f"loading {model}"):
        from layerscope.models.functions import run_file
        from layerscope.modes.preparing import prepare

        if modes_file is not None:
            run_file(modes_file)
        ready = prepare(model, seed=seed, **asked)
    for note in ready.notes:
        click.echo(f"layerscope: {printable(note)}", err=True)
    return ready


def _layers(ready: Prepared, layers: str | None, side: str | None) -> list[Pattern]:
    if layers is None:
        return []
    from layerscope.modes.layer_taps import chosen_layers

    return sided(chosen_layers(ready.model, layers), side)


def _stop(ready: Prepared, text: str | None, *, gradients: bool, alone: str | None) -> str | None:
    """Return the module after which a forward may end; a backward pass needs all of it."""
    from layerscope.modes.stopping import NEVER, stop_of

    if gradients and text not in (None, NEVER):
        raise click.UsageError("--stop-after ends the forward, and a gradient needs the rest of it; leave one out")
    return None if gradients else stop_of(ready.model, text, alone=alone)


def _components(ready: Prepared, layers: str | None, components: str | None) -> list[Pattern]:
    if components is None:
        return []
    if layers is None:
        raise click.UsageError("--components are parts of layers: say which, as --layers first,last")
    from layerscope.modes.layer_taps import component_taps

    return sided(component_taps(ready.model, layers, components), None)


def _record(
    ready: Prepared,
    batches: Iterator[Inputs],
    taps: list[str],
    *,
    to: str,
    keep: Any,
    append: bool,
    forward: Callable[[Any, Inputs], None],
    stop_after: str | None,
    observer: Literal["measure", "skip"],
    precision_faithful: bool,
    **how: Any,
) -> Document:
    from layerscope.modes.stopping import ending
    from layerscope.recorder import RecordOptions, record

    name = ready.loaded.name
    is_new = not append and "://" not in to and not os.path.lexists(to)
    settings = ready.settings | ({} if stop_after is None else {"stop_after": stop_after})
    try:
        with counting("recording") as progress:
            options = RecordOptions(
                name=name,
                settings=settings,
                observer=observer,
                precision_faithful=precision_faithful,
                progress=progress,
            )
            recording = record(ready.model, taps, to=to, keep=keep, append=append, options=options, **how)
            with recording, ending(ready.model, stop_after):
                _forwards(recording.model, batches, forward, progress)
    except (RunExists, RunBusy):
        raise
    except BaseException:
        if is_new:
            withdraw(Path(to))
        raise
    parts: list[Part] = [*completeness_parts(recording.run, to)]
    facts = [Fact("run", to, "name"), Fact("model", name), Fact("taps", " ".join(taps))]
    facts += [] if stop_after is None else [Fact("stop_after", stop_after, "name")]
    floors = recording.run.floors.sentences()
    facts += [Fact("floors", "; ".join(floors))] if floors else []
    parts.append(Facts("recorded", (*facts, Fact("look", f"layerscope show {to}"))))
    return Document(f"recorded {name}", tuple(parts))


def _forwards(
    model: Any, batches: Iterator[Inputs], forward: Callable[[Any, Inputs], None], progress: Progress
) -> None:
    from layerscope.modes.stopping import Enough

    for done, batch in enumerate(batches):
        progress(f"forward {done}", done, 0)
        with suppress(Enough):
            forward(model, batch)


def _refuse_unknown(statistics: str) -> None:
    """Refuse before the model is loaded, which may take minutes."""
    from layerscope.recorder.taps import level_of

    try:
        level_of(statistics)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _refuse_existing(to: str) -> None:
    """Refuse before the model is loaded, which may take minutes; the writer looks again, and at other places too."""
    from layerscope.store.address import LocalFolder, rank_folder
    from layerscope.store.destination import holds_records

    if "://" not in to and holds_records(LocalFolder(Path(to)), rank_folder(rank())):
        raise RunExists(f"{to} holds a run already; give another name, or --append to add steps to it.")


def withdraw(run: Path) -> None:
    """Remove the run this command made, when it holds no record: left there, it would be in the way of a second try.

    Only the files a writer makes before its first record are removed; when anything else is there, all of it stays.
    """
    from layerscope.store import open_run
    from layerscope.store.address import rank_folder
    from layerscope.store.manifest import NAME
    from layerscope.store.rank_lock import LOCK

    own = run / rank_folder(rank())
    made = {run / NAME, own, own / NAME, own / LOCK}
    with suppress(OSError, LayerscopeError):
        if not made.issuperset(run.rglob("*")):
            return
        opened = open_run(run)
        holds = len(opened) or opened.damaged or opened.notes
        if not holds:
            for path in (own / LOCK, own / NAME, run / NAME):
                path.unlink(missing_ok=True)
            own.rmdir()
            run.rmdir()


def sided(patterns: Sequence[str], side: str | None) -> list[Pattern]:
    """Read the patterns; those that name no side get the sides of `--side`."""
    parsed = [Pattern.parse(text) for text in patterns]
    if side is None:
        return parsed
    wanted: list[Side] = [s for s in SIDES if s in side.split(",")]
    unknown = [s for s in side.split(",") if s not in SIDES]
    if unknown:
        raise BadText(f"--side has no {unknown[0]!r}; the sides are {', '.join(SIDES)}, several with commas.")
    return [
        pattern if pattern.exclude or _names_a_side(text, pattern) else replace(pattern, sides=tuple(wanted))
        for text, pattern in zip(patterns, parsed, strict=True)
    ]


def _names_a_side(text: str, pattern: Pattern) -> bool:
    # A colon that belongs to a name has a backslash before it.
    return pattern.sides != ("output",) or re.search(r"(?<!\\):output(?=\[|\Z)", text) is not None


def _guarded(batches: Iterator[Inputs], name: str) -> Iterator[Inputs]:
    """Pass the inputs on; what goes wrong while they are made is told in one sentence."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (Exception, SystemExit) as error:
            raise _failed(f"the inputs of {name!r}", error) from error
        yield batch


def _forward(model: torch.nn.Module, batch: Inputs, *, gradients: bool, name: str) -> None:
    import torch

    with nullcontext() if gradients else torch.no_grad():
        output = _guard(f"the forward of {name!r}", lambda: model(*batch.args, **batch.kwargs))
    if gradients:
        _guard(f"the backward pass of {name!r}", lambda: backward(output))


def backward(output: Any) -> None:
    """Go back from the model's loss, or from the mean square of its first floating-point output."""
    from layerscope.runtimes.values import leaves

    differentiable = {path: t for path, t in leaves(output) if t.requires_grad and t.is_floating_point()}
    if not differentiable:
        raise BadModel("a gradient is asked for, and nothing the model returns depends on anything that has one.")
    loss = differentiable.get(("loss",))
    if loss is None:
        loss = next(iter(differentiable.values())).float().square().mean()
    loss.sum().backward()  # type: ignore[no-untyped-call]


def _guard(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BadModel:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(what, error) from error


def _failed(what: str, error: BaseException) -> BadModel:
    message = " ".join(str(error).split())
    return BadModel(
        f"{what} raised {type(error).__name__}{': ' + message if message else ''} (LAYERSCOPE_TRACEBACK=1 shows where)."
    )
