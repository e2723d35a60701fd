"""The options that several commands share, so that one word means one thing in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print strict JSON for machines.")
as_html = click.option("--html", "html_to", metavar="FILE", help="Write a report to look at too: one HTML file.")
# What torch's generators take.
SEEDS = click.IntRange(-(1 << 63), (1 << 64) - 1)
seed = click.option("--seed", type=SEEDS, default=0, show_default=True, help="Seed of weights and inputs.")


def examples(*lines: str) -> str:
    """Write lines for the end of a help page, which click would otherwise fill into a paragraph."""
    return "\b\n" + "\n".join(lines)


def to(*, required: bool) -> Callable[[Command], Command]:
    """Where the run is written."""
    return click.option("-o", "--to", "to", metavar="RUN", required=required, help="Where to write the run.")


def model_inputs(command: Command) -> Command:
    """What the model is called with."""
    command = seed(command)
    command = click.option("--prompt", metavar="TEXT", help="Text to run the model on.")(command)
    return click.option(
        "--inputs", metavar="FILE", help="FILE.safetensors, .npz, .pt or file.py:function with the inputs."
    )(command)


def modes(help: str) -> Callable[[Command], Command]:
    """Which variants of the model; several with commas, or the option again."""

    def split(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word for value in values for word in value.split(",") if word)

    named = click.option("--mode", "modes", metavar="MODE", multiple=True, callback=split, help=help)
    return lambda command: named(declared(command))


declared = click.option("--modes-file", metavar="FILE.py", help="A file that declares modes with @layerscope.mode.")


def prepared(command: Command) -> Command:
    """Where a model with modes of its own gets weights, scales and samples from; in the words of its users."""
    count, alpha = click.IntRange(min=1), click.FloatRange(0, 1, min_open=True)
    for option in (
        click.option("--calib_seqlen", type=count, metavar="N", help="Tokens of each recorded sample."),
        click.option("--calib_data_num", type=count, metavar="N", help="Samples of the built-in text to record."),
        click.option("--calib_file", metavar="FILE", help="Text, or token ids, to calibrate and to record on."),
        click.option("--percentile_alpha", type=alpha, metavar="X", help="Share of activations that is not clipped."),
        click.option("--pretrained_dir", metavar="FOLDER", help="Weights for a built-in Mamba, instead of its own."),
    ):
        command = option(command)
    return command


def moments(command: Command) -> Command:
    """Which records of a point are meant."""
    words = {
        "rank": "One process alone; default: all of them added up.",
        "call": "One call of those within a step.",
        "batch": "Records of one batch.",
        "epoch": "Records of one epoch.",
        "step": "Records of one step; default: the latest.",
    }
    for word, meaning in words.items():
        command = click.option(f"--{word}", type=click.IntRange(min=0), metavar="N", help=meaning)(command)
    return command
