"""`layerscope diagnose`: two models that should agree, and the module where they part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from layerscope.cli import options
from layerscope.cli.page import counting, leave, put, working
from layerscope.errors import BadModel, LayerscopeError

if TYPE_CHECKING:
    from layerscope.diagnose import Finding
    from layerscope.models import Inputs, Loaded

EXAMPLES = options.examples(
    "layerscope diagnose checkpoints/llama ports.py:llama --prompt 'Hello'",
    "layerscope diagnose make.py:model make.py:quantised --inputs batch.safetensors",
    "layerscope diagnose make.py:model make.py:fused --pairing pairs.txt --backward",
    "layerscope diagnose make.py:model make.py:port --json",
)


@click.command(short_help="Run two models: which module makes the difference, and why?", epilog=EXAMPLES)
@click.argument("reference", metavar="REF")
@click.argument("candidate", metavar="CAND")
@click.option("--backward", is_flag=True, help="Judge gradients too.")
@click.option("--pairing", metavar="FILE", help="Declared pairs: fused and split projections, other names.")
@options.model_inputs
@options.as_html
@options.as_json
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def command(
    reference: str,
    candidate: str,
    backward: bool,
    pairing: str | None,
    inputs: str | None,
    prompt: str | None,
    seed: int,
    html_to: str | None,
    as_json: bool,
    as_markdown: bool,
) -> int:
    """Run every module of CAND on what REF gave it, and name the one where the difference is made.

    REF and CAND are MODELs: a built-in name, file.py:function, package.module:function or a local Hugging Face
    checkpoint folder. Both run on the same inputs: those that are asked for, else REF's own, else CAND's; of several,
    the first. Functions, TorchScript, .pt2 files and compiled folders are programs, and are run.

    Exit code 0 when they are the same or differ by rounding alone, 1 when they differ, 2 when one cannot be run.
    """
    from layerscope.diagnose.page.document import document

    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown are two pages; ask for one of them.")
    with working(f"loading {reference} and {candidate}"):
        from layerscope.models import load_model

        pair = load_model(reference, seed=seed), load_model(candidate, seed=seed)
        batch = _inputs(pair, inputs, prompt)
    finding = _diagnosed(pair, batch, backward=backward, pairing=pairing)
    if html_to is not None:
        from layerscope.diagnose.page.html_page import page

        leave(page(finding, title=f"{reference} against {candidate}"), html_to)
    put(
        document(finding, title=f"{reference} against {candidate}"),
        "json" if as_json else "markdown" if as_markdown else "terminal",
    )
    return int(finding.verdict.word == "differs")


def _inputs(pair: tuple[Loaded, Loaded], inputs: str | None, prompt: str | None) -> Inputs:
    """Return the arguments of one forward, of the first model that has any."""
    reference, candidate = pair
    own = reference.given is not None or reference.speaks
    teller = reference if own or inputs is not None or prompt is not None or candidate.given is None else candidate
    batch = next(teller.batches(inputs=inputs, prompt=prompt), None)
    if batch is None:
        raise BadModel(f"the inputs of {teller.name!r} are an empty list; a diagnosis needs one forward.")
    return batch


def _diagnosed(pair: tuple[Loaded, Loaded], batch: Inputs, *, backward: bool, pairing: str | None) -> Finding:
    from layerscope.diagnose import diagnose

    reference, candidate = pair
    with counting("diagnosing") as progress:
        try:
            return diagnose(
                reference.model,
                candidate.model,
                batch.kwargs or batch.args,
                backward=backward,
                pairing=Path(pairing) if pairing is not None else (),
                progress=progress,
            )
        except (LayerscopeError, OSError):
            raise
        except (Exception, SystemExit) as error:
            message = " ".join(str(error).split())
            raise BadModel(
                f"diagnosing {candidate.name!r} raised {type(error).__name__}{': ' + message if message else ''} "
                "(LAYERSCOPE_TRACEBACK=1 shows where)."
            ) from error
