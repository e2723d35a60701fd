"""Serve a folder of runs on this machine, until Ctrl-C.

serve("runs", port=8800, told=print)        # http://127.0.0.1:8800/?token=...
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable

import uvicorn

from layerscope.errors import NotARun, Unsupported
from layerscope.server.application import application
from layerscope.server.runs import Runs

HOST = "127.0.0.1"


class LiveServer(uvicorn.Server):
    """A server that knows its own address."""

    def __init__(self, folder: str | os.PathLike[str], *, port: int = 0, token: str | None = None) -> None:
        runs = Runs(folder)
        if not runs.folder.is_dir():
            raise NotARun(f"{os.fspath(folder)} is no folder; name the one that the runs lie in.")
        self.socket = _bound(port)
        self.port = int(self.socket.getsockname()[1])
        self.token = token or secrets.token_urlsafe(24)
        guarded = application(runs, token=self.token, port=self.port, stopping=lambda: self.should_exit)
        super().__init__(
            uvicorn.Config(
                guarded,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=5,
                limit_concurrency=500,
                h11_max_incomplete_event_size=1 << 16,
                ws="none",
                lifespan="on",
            )
        )

    @property
    def address(self) -> str:
        """What to open in a browser: it has the token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def serve_here(self) -> None:
        """Serve until it is told to end."""
        try:
            with contextlib.suppress(KeyboardInterrupt):  # this is how one ends it
                self.run(sockets=[self.socket])
        finally:
            self.socket.close()


def serve(folder: str | os.PathLike[str], *, port: int, told: Callable[[str], None]) -> None:
    """Serve the runs below a folder; `told` hears the address once it can be opened."""
    server = LiveServer(folder, port=port)
    told(server.address)
    server.serve_here()


def _bound(port: int) -> socket.socket:
    """Bind to this machine alone."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
        bound.listen(128)  # who asks before the first answer can be given waits for it
    except OSError as error:
        bound.close()
        why = f"port {port} of {HOST} cannot be had ({error.strerror}); --port names another, 0 any."
        raise Unsupported(why) from error
    return bound
