"""`layerscope record`: run a model once and keep what its layers computed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from layerscope.cli import options
from layerscope.cli.completeness import completeness_parts
from layerscope.cli.page import counting, put, working
from layerscope.errors import BadModel, BadText, LayerscopeError, RunBusy, RunExists
from layerscope.patterns import Pattern
from layerscope.points import SIDES, Side
from layerscope.ranks import rank
from layerscope.report.parts import Document, Fact, Facts, Part

if TYPE_CHECKING:
    import torch

    from layerscope.models import Inputs

__all__ = ["backward", "command", "sided"]

EXAMPLES = options.examples(
    "layerscope record tiny-transformer 'model.layers.*' -o runs/tiny",
    "layerscope record make.py:model 'type:Linear' --side input,output -o runs/linears",
    "layerscope record checkpoints/llama 'model.layers.*:output,grad_output' --prompt 'Hello' -o runs/llama",
)


@click.command(short_help="Run a model and keep what its layers compute.", epilog=EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.argument("patterns", metavar="PATTERN...", nargs=-1, required=True)
@options.to(required=True)
@click.option(
    "--keep",
    type=click.Choice(["tensor", "summary", "both"]),
    default="both",
    show_default=True,
    help="Tensors, their statistics, or both.",
)
@click.option("--when", metavar="SCHEDULE", help="Which forwards: 'every(100) | first(3)'; default: all.")
@click.option("--side", metavar="SIDE,...", help=f"Sides of patterns that name none: {', '.join(SIDES)}.")
@options.model_inputs
@click.option("--append", is_flag=True, help="Add steps to a run that is there already.")
@options.as_json
def command(
    model: str,
    patterns: tuple[str, ...],
    to: str,
    keep: Literal["tensor", "summary", "both"],
    when: str | None,
    side: str | None,
    inputs: str | None,
    prompt: str | None,
    seed: int,
    append: bool,
    as_json: bool,
) -> None:
    """Run MODEL on its inputs and write what PATTERNs name to a run.

    MODEL is a built-in name, file.py:function, package.module:function or a local Hugging Face checkpoint folder.
    One forward is run for each input; a backward pass follows where a gradient is asked for, from the model's own
    loss or, where it returns none, from the mean square of its first output.
    """
    taps = sided(patterns, side)
    if not append:
        _refuse_existing(to)
    with working(f"loading {model}"):
        from layerscope.models import load_model
        from layerscope.recorder import record

        loaded = load_model(model, seed=seed)
        batches = loaded.batches(inputs=inputs, prompt=prompt)
    gradients = any(s.startswith("grad") for tap in taps if not tap.exclude for s in tap.sides)
    texts = [str(tap) for tap in taps]
    is_new = not append and "://" not in to and not os.path.lexists(to)
    recording = record(loaded.model, texts, to=to, keep=keep, when=when, append=append, name=loaded.name)
    try:
        with recording, counting("recording") as tell:
            for done, batch in enumerate(_guarded(batches, model)):
                tell(f"forward {done}", done, 0)
                _forward(loaded.model, batch, gradients=gradients, name=model)
    except (RunExists, RunBusy):
        raise
    except BaseException:
        if is_new:
            _withdraw(Path(to))
        raise
    run = recording.run
    parts: list[Part] = [*completeness_parts(run, to)]
    parts.append(
        Facts(
            "recorded",
            (
                Fact("run", to, "name"),
                Fact("model", loaded.name),
                Fact("taps", " ".join(map(str, taps))),
                Fact("look", f"layerscope show {to}"),
            ),
        )
    )
    put(Document(f"recorded {loaded.name}", tuple(parts)), "json" if as_json else "terminal")


def _refuse_existing(to: str) -> None:
    """Refuse before the model is loaded, which may take minutes; the writer looks again, and at other places too."""
    from layerscope.store.address import rank_folder
    from layerscope.store.appender import JOURNAL

    if "://" not in to and (Path(to) / rank_folder(rank()) / JOURNAL).exists():
        raise RunExists(f"{to} holds a run already; give another name, or --append to add steps to it.")


def _withdraw(run: Path) -> None:
    """Remove the run this command made, when it holds no record: left there, it would be in the way of a second try.

    Only the files a writer makes before its first record are removed; when anything else is there, all of it stays.
    """
    from layerscope.store import Run
    from layerscope.store.address import folder, rank_folder
    from layerscope.store.appender import JOURNAL
    from layerscope.store.manifest import NAME

    own = run / rank_folder(rank())
    made = {run / NAME, own, own / NAME, own / JOURNAL}
    with suppress(OSError, LayerscopeError):
        if not made.issuperset(run.rglob("*")):
            return
        opened = Run(folder(run))
        holds = len(opened) or opened.damaged or opened.notes
        opened.close()
        if not holds:
            for path in (own / JOURNAL, own / NAME, run / NAME):
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
