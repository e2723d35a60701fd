"""Comparisons that were asked for on the page: one at a time, in the background, and kept.

    comparisons = Comparisons()
    id = comparisons.start([path, other])
    comparisons.page(id)            # how far it is, then what it found

What was found is kept as JSON in layerscope's cache folder, and shown again by the next server of the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

from layerscope.errors import LayerscopeError
from layerscope.report import Cell, Column, Document, Heading, Sentence, Table, html, json
from layerscope.report.parts import Part
from layerscope.report.writing import printable
from layerscope.server.runs import state_of
from layerscope.store import cache_folder

DONE = "done"
KEPT = 24  # comparisons whose pages are remembered


@dataclass(slots=True)
class _Asked:
    """One comparison: what of, how far, and its page once there is one."""

    title: str
    told: str = "waiting"
    page: str = ""
    verdict: str = ""


@final
class Comparisons:
    """What was asked for, by ids that tell nothing of paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="layerscope-server")
        self._kept = _place(folder)
        self._recall()

    def start(self, runs: Sequence[Path]) -> str:
        """Compare the first with the others; what was asked before of the same runs is not done again."""
        states = [f"{path}\0{state_of(path)}" for path in runs]
        id = hashlib.blake2b("\n".join(states).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        with self._lock:
            if id in self._asked:
                return id
            names = [self._name(path) for path in runs]
            self._asked[id] = _Asked(f"{names[0]} against {', '.join(names[1:])}")
            while len(self._asked) > KEPT:
                self._asked.popitem(last=False)
        self._worker.submit(self._work, id, list(runs))
        return id

    def page(self, id: str) -> str | None:
        """Return what was found, or how far it is; None for an id that is not ours."""
        with self._lock:
            asked = self._asked.get(id)
            if asked is None:
                return None
            if asked.page:
                return asked.page
            title, told = asked.title, asked.told
        return html.render(Document(title, (Sentence(f"comparing: {told}"),)), live=_events(id), seen=told)

    def stamp(self, id: str) -> str | None:
        """Return a text that changes as a comparison goes on."""
        with self._lock:
            asked = self._asked.get(id)
            return None if asked is None else asked.told

    def state(self) -> str:
        """Return a text that changes when any comparison goes on."""
        with self._lock:
            return ",".join(asked.told for asked in self._asked.values())

    def parts(self) -> list[Part]:
        """Return the comparisons as part of a page."""
        with self._lock:
            rows = [
                (
                    Cell(asked.title, link=f"/comparison/{id}"),
                    Cell(asked.verdict or asked.told, "bad" if asked.verdict == "differs" else "plain"),
                )
                for id, asked in reversed(self._asked.items())
            ]
        columns = [Column("comparison", "comparison", "name"), Column("verdict", "verdict")]
        return [Heading("comparisons"), Table.of("comparisons", columns, rows)] if rows else []

    def close(self) -> None:
        """Let go of the worker; what it is in the middle of is not waited for."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    # The work -----------------------------------------------------------------------------------

    def _work(self, id: str, runs: Sequence[Path]) -> None:
        try:
            from layerscope.compare.comparing import compare
            from layerscope.compare.page.document import document

            found = compare(*runs, progress=lambda what, done, of: self._tell(id, f"{done:,} of {of:,}, {what}"))
            saved = json.render(document(found))
            self._keep(id, saved)
            self._show(id, saved)
        except (LayerscopeError, OSError, ImportError) as error:
            self._finish(id, Document("not compared", (Sentence(str(error), "bad"),)), "not compared")
        except Exception as error:
            said = f"comparing raised {type(error).__name__}: {error}"
            self._finish(id, Document("not compared", (Sentence(said, "bad"),)), "not compared")

    def _keep(self, id: str, saved: str) -> None:
        """Save what was found for the next server; where there is no room for it, this one shows it all the same."""
        if self._kept is not None:
            beside = self._kept / f".{id}.{os.getpid()}"
            with contextlib.suppress(OSError):
                beside.write_text(saved, encoding="ascii")
                beside.replace(self._kept / f"{id}.json")

    def _show(self, id: str, saved: str | bytes) -> None:
        from layerscope.compare.page.html_page import page
        from layerscope.compare.page.saved import loads

        comparison = loads(saved)
        self._finish(id, page(comparison), comparison.verdict.word)

    def _tell(self, id: str, told: str) -> None:
        with self._lock:
            if id in self._asked:
                self._asked[id].told = printable(told)  # it names points, and is a line of a stream

    def _finish(self, id: str, document: Document, verdict: str) -> None:
        text = html.render(document, live=_events(id), seen=DONE)
        with self._lock:
            if id in self._asked:
                asked = self._asked[id]
                asked.page, asked.verdict, asked.told = text, verdict, DONE

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._folder)) if path != self._folder else path.name

    def _recall(self) -> None:
        """Show what an earlier server of this folder has found."""
        if self._kept is None:
            return
        for file in sorted(self._kept.glob("*.json"), key=lambda one: one.stat().st_mtime)[-KEPT:]:
            self._asked[file.stem] = _Asked("an earlier comparison", "reading")
            self._worker.submit(self._again, file)

    def _again(self, file: Path) -> None:
        from layerscope.compare.page.saved import loads

        try:
            saved = file.read_bytes()
            comparison = loads(saved)
            names = ", ".join(against.candidate for against in comparison)
            with self._lock:
                self._asked[file.stem].title = f"{comparison.reference} against {names}"
            self._show(file.stem, saved)
        except (LayerscopeError, OSError, KeyError):
            with self._lock:
                self._asked.pop(file.stem, None)


def _events(id: str) -> str:
    return f"/events/comparison/{id}"


def _place(folder: Path) -> Path | None:
    """Return where the comparisons of this folder are kept; None where nothing can be."""
    cache = cache_folder()
    if cache is None:
        return None
    kept = cache / "served" / hashlib.blake2b(os.fsencode(folder), digest_size=12).hexdigest()
    try:
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return kept
