"""What made a run, as facts at the end of a page, and what is not in it."""

from __future__ import annotations

from collections.abc import Iterator

from layerscope.report.parts import Column, Fact, Facts, Table, Value
from layerscope.store import Run

ABSENT = 10  # lines of a page; machines get all


def provenance(run: Run, name: str) -> Facts:
    """Say what made a run."""
    manifest = run.manifest
    model = manifest.model.get("name") or manifest.model.get("class")
    done = manifest.completeness
    facts: dict[str, Value] = {
        "address": run.address,
        "model": None if model is None else str(model),
        "mode": manifest.mode,
        "runtime": manifest.runtime,
        "device": manifest.device,
        "seed": manifest.seed,
        "versions": {key: str(value) for key, value in manifest.versions.items()},
        "taps": list(manifest.taps),
        "command": str(manifest.settings.get("command") or ""),
        "recorded": manifest.started,
        "state": run.state,
        "forwards": done.forwards,
        "records": done.records,
        "missing": f"{len(run.missing):,} points" if run.missing else None,
        "dropped": f"{sum(d.count for d in run.dropped):,} records" if run.dropped else None,
        "observer effect": str(manifest.settings.get("observer_effect") or ""),
        "layout": run.layout,
    }
    items = tuple(Fact(key, value) for key, value in facts.items() if value not in (None, "", {}, []))
    return Facts("provenance", items, name, audience="page")


def absent(run: Run) -> Iterator[Table]:
    """List what was asked for and is not there, and what was dropped, each with the reason."""
    if run.missing:
        columns = [Column("point", "missing", "name"), Column("reason", "because")]
        yield Table.of("missing", columns, ((m.point, m.reason) for m in run.missing), most=ABSENT)
    if run.dropped:
        columns = [
            Column("point", "dropped", "name"),
            Column("count", "records", "count"),
            Column("reason", "because"),
            Column("first", "first at", rank=1),
        ]
        rows = ((d.point, d.count, d.reason, d.first) for d in run.dropped)
        yield Table.of("dropped", columns, rows, most=ABSENT)
