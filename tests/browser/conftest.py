"""One browser for the session; a page that tells what it asked for and what went wrong in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Debian's Chromium, driven by Playwright."""
    if CHROMIUM is None:
        missing = "there is no chromium; `make browser` installs it where apt can be used"
        pytest.fail(missing) if "REQUIRE_BROWSER" in os.environ else pytest.skip(missing)
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        yield running
        running.close()


class Told:
    """What a page asked for and complained of."""

    def __init__(self, page) -> None:
        self.requests: list[str] = []
        self.wrong: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.wrong.append(f"raised: {error}"))
        page.on("dialog", lambda dialog: (self.wrong.append("a dialog"), dialog.dismiss()))


@pytest.fixture
def look(browser) -> Iterator[Callable]:
    """Open a file or an address; at the end, no page has complained and none of a file has asked for more than it."""
    opened = []

    def open_it(what: str | Path, *, width: int = 1280, scheme: str = "light", script: bool = True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
        )
        page = context.new_page()
        page.set_default_timeout(60_000)  # so long only where something is wrong
        page.told = Told(page)
        opened.append((context, page, what))
        page.goto(what.as_uri() if isinstance(what, Path) else what)
        return page

    yield open_it
    for context, page, what in opened:
        told = page.told
        context.close()
        assert told.wrong == []
        if isinstance(what, Path):
            assert {url.partition("#")[0] for url in told.requests} == {what.as_uri()}
