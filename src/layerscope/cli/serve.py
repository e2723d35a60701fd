"""`layerscope serve`: the runs below a folder in a browser, live while they grow."""

from __future__ import annotations

import sys

import click

from layerscope.cli import options
from layerscope.errors import MissingExtra
from layerscope.report.writing import printable

EXAMPLES = options.examples("layerscope serve runs", "layerscope serve /data/experiments --port 9000")


@click.command(short_help="Show the runs below a folder in a browser, live while they grow.", epilog=EXAMPLES)
@click.argument("folder", metavar="[FOLDER]", default=".")
@click.option("--port", type=click.IntRange(0, 65535), default=8800, show_default=True, help="0 takes any free one.")
def command(folder: str, port: int) -> None:
    """Serve the runs below FOLDER (this one) on 127.0.0.1, until Ctrl-C.

    Open the address that is printed: it has a token, without which nothing is answered. From another machine, forward
    the port: ssh -L 8800:127.0.0.1:8800 HOST.
    """
    try:
        from layerscope.server.live_server import serve
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise MissingExtra("serve takes starlette and uvicorn: pip install 'layerscope[web]'") from error

    def tell(address: str) -> None:
        sys.stdout.write(f"{printable(folder)} is served at\n{address}\n")
        sys.stdout.flush()

    serve(folder, port=port, told=tell)
