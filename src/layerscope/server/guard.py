"""Who may ask: one guard in front of every route, which lets nothing through that is not expressly allowed.

    Guard(application, token="...", port=8800)

The name under which a request comes is the one thing that betrays a rebound one: it is same-origin to the browser and
carries no Origin. So only this machine's own names pass, with the port we listen on.
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any, final
from urllib.parse import parse_qs

from layerscope.report.html import policy

HEADERS = {
    "content-security-policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
STARTS = "/compare"  # the one path that takes a POST
WEEK = 7 * 24 * 3600


@final
class Guard:
    """ASGI middleware: host, method, token, origin, in this order; then the application, under our headers."""

    def __init__(self, application: Any, *, token: str, port: int) -> None:
        self._application = application
        self._token = token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self._cookie = f"layerscope-{port}"  # cookies know no ports: two servers must not share one

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket is not answered, and so refused
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        refused = self._refused(scope, headers)
        if refused is not None:
            await _answer(send, *refused)
            return
        given = self._given(scope)

        async def under_our_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if given is not None:
                    cookie = f"{self._cookie}={given}; Path=/; HttpOnly; SameSite=Strict; Max-Age={WEEK}"
                    ours.append((b"set-cookie", cookie.encode("latin-1")))
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
            await send(message)

        await self._application(scope, receive, under_our_headers)

    def _refused(self, scope: Any, headers: list[tuple[bytes, str]]) -> tuple[int, str] | None:
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 400, "This server answers under 127.0.0.1 and localhost alone."
        starts = scope["method"] == "POST" and scope["path"] == STARTS
        if scope["method"] not in ("GET", "HEAD") and not starts:
            return 405, "This server is for looking: GET alone."
        ours = self._token.encode()
        if not any(secrets.compare_digest(one.encode(), ours) for one in self._tokens(scope, headers)):
            return 403, "The token is missing or another: open the address that `layerscope serve` printed."
        origins = [value for name, value in headers if name == b"origin"]
        if starts and origins != [f"http://{hosts[0].lower()}"]:
            return 403, "A comparison is started from this server's own pages alone."
        return None

    def _tokens(self, scope: Any, headers: list[tuple[bytes, str]]) -> list[str]:
        """Return what the request shows: the token in its address, or in the cookie that a page has set."""
        found = [given] if (given := self._asked(scope)) is not None else []
        for name, value in headers:
            if name == b"cookie":
                try:
                    cookies = SimpleCookie(value)
                except CookieError:
                    continue
                if self._cookie in cookies:
                    found.append(cookies[self._cookie].value)
        return found

    def _given(self, scope: Any) -> str | None:
        """Return the token where the address has it: the browser is to keep it, and the address to lose it."""
        return self._token if self._asked(scope) is not None else None

    def _asked(self, scope: Any) -> str | None:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token")
        return asked[0] if asked else None


async def _answer(send: Any, status: int, sentence: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    headers += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{sentence}\n".encode()})
