"""How complete a run is, in a sentence, and what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from layerscope.report.parts import Column, Fact, Facts, Part, Sentence, Table

if TYPE_CHECKING:
    from layerscope.store import Damage, Reader

__all__ = ["completeness_parts", "damage_parts", "many", "run_facts"]

MOST = 10

# What a state means to whoever reads the run; `complete` says the rest itself.
STATES = {
    "recording": "not finished, being written or killed",
    "interrupted": "interrupted before everything was written",
    "recovered": "recovered after it was cut short, what was acknowledged is sealed",
    "unknown": "of unknown completeness, for the run does not say how it ended",
}


def completeness_parts(run: Reader, name: str) -> Iterator[Part]:
    """Say in a sentence how complete the run called `name` is, and list what is not there and why."""
    done = run.manifest.completeness
    held = f"{many(done.forwards, 'forward')}, {many(len(run.points), 'point')}, {many(done.records, 'record')}"
    lost = sum(d.count for d in run.dropped)
    lacks = [f"{many(len(run.missing), 'point')} missing"] * bool(run.missing)
    lacks += [f"{many(lost, 'record')} dropped"] * bool(lost)
    damaged: list[Damage] = getattr(run, "damaged", [])  # a run in memory has no files to damage
    lacks += [f"{many(len(damaged), 'damaged line')} in the journal"] * bool(damaged)
    if run.state != "complete":
        seal = f"; `layerscope recover {name}` seals it" if run.state in ("recording", "interrupted") else ""
        yield Sentence(f"{STATES.get(run.state, run.state)}: {held}{seal}", "warn")
    elif lacks:
        yield Sentence(f"finished with {' and '.join(lacks)}: {held}", "bad" if lost or damaged else "warn")
    else:
        yield Sentence(f"complete: {held}", "good")
    if done.recomputed:
        yield Sentence(f"{many(done.recomputed, 'call')} repeated by activation checkpointing, recorded once", "quiet")
    if run.missing:
        columns = [Column("point", "missing", "name"), Column("reason", "because")]
        yield Table.of("missing", columns, ((m.point, m.reason) for m in run.missing), most=MOST)
    if run.dropped:
        columns = [
            Column("point", "dropped", "name"),
            Column("count", "records", "count"),
            Column("reason", "because"),
            Column("first", "first at", rank=1),
        ]
        rows = ((d.point, d.count, d.reason, d.first) for d in run.dropped)
        yield Table.of("dropped", columns, rows, most=MOST)
    yield from damage_parts(damaged)


def damage_parts(damaged: Sequence[Damage]) -> Iterator[Part]:
    """List what was written and cannot be read."""
    if damaged:
        columns = [
            Column("file", "cannot be read"),
            Column("reason", "because"),
            Column("point", "point", "name", rank=1),
            Column("moment", "at", rank=1),
        ]
        yield Table.of("damaged", columns, damaged, most=MOST)


def run_facts(run: Reader) -> Facts:
    """Say what was recorded, when and on what."""
    manifest, done = run.manifest, run.manifest.completeness
    kind = str(manifest.model.get("name") or manifest.model.get("class") or "unknown")
    parameters = manifest.model.get("parameters")
    model = f"{kind}, {parameters:,} parameters" if isinstance(parameters, int) else kind
    on = [manifest.runtime, manifest.device, *(f"{k} {v}" for k, v in manifest.versions.items() if k == "torch")]
    words = [manifest.started.replace("T", " ").replace("+00:00", " UTC"), *on]
    data = {
        "address": run.address,
        "state": run.state,
        "class": kind,
        "parameters": parameters if isinstance(parameters, int) else None,
        "mode": manifest.mode,
        "runtime": manifest.runtime,
        "device": manifest.device,
        "seed": manifest.seed,
        "started": manifest.started,
        "forwards": done.forwards,
        "records": done.records,
        "recomputed": done.recomputed,
    }
    return Facts(
        "run",
        (
            Fact("model", model, audience="page"),
            *([Fact("mode", manifest.mode, audience="page")] if manifest.mode else []),
            Fact("recorded", ", ".join(word for word in words if word), audience="page"),
            *(Fact(label, value, audience="data") for label, value in data.items()),
        ),
    )


def many(count: int, noun: str) -> str:
    """Count things in words.

    >>> many(1, "point"), many(2000, "record")
    ('1 point', '2,000 records')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
