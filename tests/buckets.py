"""An S3 server on loopback: it counts what it is asked, goes down when told to, and comes back with what it held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # an outage is noticed at once
}


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class Server:
    """One S3 server of this process; `asked` has each request's method and path."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hears: Callable[[str, str], None] = lambda when, request: None  # before and after each request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._expired = False
        self._port = 0
        self._start()

    def _start(self) -> None:
        self._server = make_server("127.0.0.1", self._port, self, threaded=True, request_handler=_Quiet)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @contextmanager
    def down(self) -> Iterator[None]:
        """Refuse every connection."""
        self.stop()
        try:
            yield
        finally:
            self._start()

    @contextmanager
    def expired(self) -> Iterator[None]:
        """Refuse every request, as when a token has expired."""
        self._expired = True
        try:
            yield
        finally:
            self._expired = False

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """Yield a list that has the requests in it afterwards."""
        before, asked = len(self.asked), []
        yield asked
        asked += self.asked[before:]

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}".rstrip("?")
        self.asked.append(request)
        if self._expired:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"]
        self.hears("before", request)
        answer = list(self._app(environ, start))
        self.hears("after", request)
        return answer
