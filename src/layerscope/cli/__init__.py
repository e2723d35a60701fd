"""The command line: `layerscope COMMAND`, one file per command, each loaded when it is asked for.

    layerscope demo

Exit codes: 0 done, 1 runs differ, 2 wrong use, or something that cannot be read. What went wrong is one sentence on
stderr; LAYERSCOPE_TRACEBACK=1 shows where it came from.
"""

from __future__ import annotations

import importlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import click

from layerscope.cli.page import ReaderGone
from layerscope.errors import LayerscopeError
from layerscope.report.writing import printable

__all__ = ["COMMANDS", "layerscope", "main"]

# In the order in which someone new needs them.
COMMANDS = ("demo", "points", "modes", "record", "show", "compare", "diagnose", "report", "serve", "convert", "recover")


class Commands(click.Group):
    """A group that imports a command's file when its name is typed or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or return None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"layerscope.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a name that is not one is answered with those that are."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(
                f"there is no command {printable(args[0])!r}.{meant} The commands are {', '.join(COMMANDS)}.", ctx
            )
        ctx.obj = shlex.join(("layerscope", *args))  # for the provenance of what it makes
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands, epilog="Start with `layerscope demo`.", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="layerscope", message="%(prog)s %(version)s")
def layerscope() -> None:
    """Record what every layer of a model computes, and look at it."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code; never with a traceback unless one is asked for."""
    _keep_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is written out, not raised about.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = layerscope.main(args, prog_name="layerscope", standalone_mode=False)
    except ReaderGone:
        # As any program whose reader closed the pipe (`| head`); Python would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (KeyboardInterrupt, click.Abort):
        _tell("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get("LAYERSCOPE_TRACEBACK", "") not in ("", "0"):
            raise
        _tell(_sentence(error))
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _keep_standard_streams() -> None:
    """Have 0, 1 and 2 taken, so that no file of a run gets the number to which libraries print: `>&-`, `2>&-`."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _sentence(error: Exception) -> str:
    if isinstance(error, LayerscopeError):
        return str(error)
    if isinstance(error, OSError) and str(error):
        said = error.strerror or str(error)
        return f"{said}: {error.filename!r}" if error.filename is not None else said
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{what} (unexpected; LAYERSCOPE_TRACEBACK=1 shows where)"


def _tell(message: str) -> None:
    click.echo(f"layerscope: {printable(message)}", err=True)
