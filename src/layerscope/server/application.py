"""The routes of the live page.

    application(runs, token="...", port=8800)        # an ASGI application

Answers are made on threads, so that a slow one delays no other.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from layerscope.server.comparisons import Comparisons
from layerscope.server.guard import Guard
from layerscope.server.pages import Pages
from layerscope.server.runs import Runs, state_of

EVERY = 0.5  # seconds between two looks at what may have changed
ALIVE = 15.0  # seconds after which a silent stream says that it is there
LARGEST = 1 << 16  # bytes of what may be posted
_ID = re.compile(r"[0-9a-f]{24}")


def application(runs: Runs, *, token: str, port: int, stopping: Callable[[], bool] = lambda: False) -> Guard:
    """Return the application behind its guard; `stopping` tells streams to end."""
    comparisons = Comparisons(runs.folder)
    pages = Pages(runs, comparisons)
    recent = _Recent()

    async def start(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(pages.start))

    async def run(request: Request) -> Response:
        return _page(await run_in_threadpool(pages.run, _id(request)))

    async def comparison(request: Request) -> Response:
        return _page(await run_in_threadpool(comparisons.page, _id(request)))

    async def compare(request: Request) -> Response:
        asked = await _asked(request)
        paths = [await run_in_threadpool(runs.path, id) for id in asked]
        known = [path for path in paths if path is not None]
        if not 2 <= len(known) == len(paths) <= 20 or len(set(known)) < len(known):
            return JSONResponse({"error": "choose two runs or more of those on the page, at most 20."}, 400)
        return JSONResponse({"page": f"/comparison/{await run_in_threadpool(comparisons.start, known)}"})

    async def events(request: Request) -> Response:
        return _stream(request, lambda: recent("", pages.stamp))

    async def run_events(request: Request) -> Response:
        id = _id(request)
        path = await run_in_threadpool(runs.path, id)
        return _gone() if path is None else _stream(request, lambda: recent(id, lambda: state_of(path)))

    async def comparison_events(request: Request) -> Response:
        id = _id(request)
        return _gone() if comparisons.stamp(id) is None else _stream(request, lambda: comparisons.stamp(id) or "gone")

    def _stream(request: Request, stamp: Callable[[], str]) -> Response:
        return StreamingResponse(_told(request, stamp, stopping), media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        comparisons.close()

    routes = [
        Route("/", start),
        Route("/run/{id}", run),
        Route("/comparison/{id}", comparison),
        Route("/compare", compare, methods=["POST"]),
        Route("/events", events),
        Route("/events/run/{id}", run_events),
        Route("/events/comparison/{id}", comparison_events),
        Route("/favicon.ico", lambda request: Response(status_code=204)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token=token, port=port)


@final
class _Recent:
    """What was looked up a moment ago, so that fifty who look at one run cost as much as one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: str, look: Callable[[], str]) -> str:
        with self._lock:
            at, value = self._known.get(key, (0.0, ""))
            now = time.monotonic()
            if not value or now - at > 0.8 * EVERY:
                value = look()
                self._known = {k: one for k, one in self._known.items() if now - one[0] < ALIVE} | {key: (now, value)}
            return value


def _id(request: Request) -> str:
    """Return the id of a request; what is not even like one of ours is no id."""
    id = request.path_params["id"]
    return id if _ID.fullmatch(id) else ""


def _page(text: str | None) -> Response:
    return _gone() if text is None else HTMLResponse(text)


def _gone() -> Response:
    return PlainTextResponse("There is no such page; / has those there are.\n", 404)


async def _asked(request: Request) -> list[str]:
    """Return the ids of a posted question; nothing where it is not one."""
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST:
                return []
        value: Any = json.loads(body)
        runs = value["runs"]
        return [id for id in runs if isinstance(id, str)] if isinstance(runs, list) else []
    except (ValueError, TypeError, KeyError, RecursionError, ClientDisconnect):
        return []


async def _told(request: Request, stamp: Callable[[], str], stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Send how far the work is at each change, until the client goes."""
    last, silent = "", 0.0
    while not stopping() and not await request.is_disconnected():
        now = await run_in_threadpool(stamp)
        if now != last:
            last, silent = now, 0.0
            yield f"id: {now}\ndata: {now}\n\n"
        elif silent >= ALIVE:
            silent = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(EVERY)
        silent += EVERY
