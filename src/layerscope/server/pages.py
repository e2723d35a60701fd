"""The page of a run, made once for all who look at it, and again when the run has changed.

pages = Pages(runs)
pages.run(id)                # HTML, or None where there is no such run
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from datetime import datetime, timezone
from pathlib import Path
from typing import final

from layerscope.errors import LayerscopeError
from layerscope.pages.run import page
from layerscope.report import Cell, Column, Document, Sentence, Table, html
from layerscope.report.parts import Part
from layerscope.report.writing import many
from layerscope.server.comparisons import Comparisons
from layerscope.server.runs import Found, Runs, state_of
from layerscope.store import open_run
from layerscope.store.rank_lock import being_written

KEPT = 12  # pages that are remembered, of a few megabytes each at most


@final
class Pages:
    """Pages by the id of their run; however many ask at once, each is made by one of them."""

    def __init__(self, runs: Runs, comparisons: Comparisons) -> None:
        self._runs = runs
        self._comparisons = comparisons
        self._made: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def start(self) -> str:
        """Return the list of runs and comparisons."""
        seen = self.stamp()
        runs = self._runs.found()
        columns = [
            Column("run", "run", "name"),
            Column("state", "state"),
            Column("model", "model"),
            Column("mode", "mode"),
            Column("records", "records", "count"),
            Column("missing", "missing", "count"),
            Column("started", "recorded, UTC"),
            Column("changed", "changed, UTC"),
        ]
        parts: list[Part] = [Sentence(f"{many(len(runs), 'run')} below {self._runs.folder.name}", "quiet")]
        parts.append(Table.of("runs", columns, map(_cells, runs)))
        parts += self._comparisons.parts()
        return html.render(Document("layerscope", tuple(parts)), live="/events", seen=seen)

    def stamp(self) -> str:
        """Return a text that changes when a run comes, goes or grows, or a comparison goes on."""
        return self._runs.stamp() + self._comparisons.state()

    def run(self, id: str) -> str | None:
        """Return the page of a run as it is now."""
        path = self._runs.path(id)
        if path is None or not path.is_dir():
            return None
        with self._lock:
            making = self._making.setdefault(id, threading.Lock())
        with making:
            state = state_of(path)
            with self._lock:
                known = self._made.get(id)
            if known is None or known[0] != state:
                known = (state, self._written(id, path, state))
                with self._lock:
                    self._made[id] = known
                    self._made.move_to_end(id)
                    while len(self._made) > KEPT:
                        self._made.popitem(last=False)
        return known[1]

    def _written(self, id: str, path: Path, state: str) -> str:
        name = self._runs.name(path)
        try:
            reader = open_run(path)
            parts = page(reader, name).parts
        except (LayerscopeError, OSError) as error:
            parts = (Sentence(str(error), "bad"),)
        return html.render(Document(name, parts), live=f"/events/run/{id}", seen=state)


def _cells(run: Found) -> tuple[Cell | str | int | None, ...]:
    manifest = run.manifest
    name = Cell(run.name, link=f"/run/{run.id}")
    when = datetime.fromtimestamp(run.changed, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    if manifest is None:
        return (name, Cell("unreadable", "bad"), None, None, None, None, None, when)
    done = manifest.completeness
    state: Cell = Cell(done.state, "good" if done.state == "complete" else "warn")
    records: int | None = done.records
    if done.state == "recording":  # its manifest is of its beginning
        records = None
        state = Cell("being written", "quiet") if being_written(run.path) else Cell("writer gone", "bad")
    model = str(manifest.model.get("name") or manifest.model.get("class") or "")
    missing = Cell(len(done.missing), "warn" if done.missing else "plain")
    return (name, state, model, manifest.mode, records, missing, manifest.started[:19].replace("T", " "), when)
