"""How complete a run is, in a sentence, and what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerscope.report.parts import Column, Fact, Facts, Part, Sentence, Table
from layerscope.report.writing import many

if TYPE_CHECKING:
    from layerscope.store import Damage, Run

MOST = 10

# What a state means to the reader of a run; `complete` says the rest itself.
STATES = {
    "recording": "not finished, being written or killed",
    "interrupted": "interrupted before everything was written",
    "recovered": "recovered after it was cut short, what was acknowledged is sealed",
    "unknown": "of unknown completeness, for the run does not say how it ended",
}


def damage_of(run: Run) -> list[Damage]:
    """Return what was written and cannot be read, as far as the run knows; in memory there are no files to damage."""
    damaged: list[Damage] = getattr(run, "damaged", [])
    return damaged


def completeness_parts(run: Run, name: str, *, damaged: Sequence[Damage] | None = None) -> Iterator[Part]:
    """Say in a sentence how complete the run called `name` is, and list what is not there and why.

    `damaged` is what the caller found when it read; left out, it is what the run knows.
    """
    done = run.manifest.completeness
    damaged = damage_of(run) if damaged is None else damaged
    held = f"{many(done.forwards, 'forward')}, {many(len(run.points), 'point')}, {many(done.records, 'record')}"
    if run.replaced:
        held += f"; {many(run.replaced, 'record')} gave way to later ones of the same moment"
    lost = sum(d.count for d in run.dropped)
    lacks = [f"{many(len(run.missing), 'point')} missing"] * bool(run.missing)
    lacks += [f"{many(lost, 'record')} dropped"] * bool(lost)
    if done.failed:
        lacks.append(
            f"records absent because {done.failed:,} of {many(max(done.forwards, done.failed), 'forward')} raised"
        )
    if damaged:
        lacks.append(damage_text(damaged))
    lacking = f", with {' and '.join(lacks)}" if lacks else ""
    written = _written(run) if done.state == "recording" else None
    if written is not None:
        held = f"{many(len(run.points), 'point')}, {many(len(run), 'record')}"  # the manifest is of its beginning
        if written:
            yield Sentence(f"being written now{lacking}: {held} so far", "bad" if damaged else "good")
        else:
            gone = f"its writer is gone, it was killed or has crashed{lacking}"
            yield Sentence(f"{gone}: {held} are there; `layerscope recover {name}` seals them", "bad")
    elif done.state != "complete":
        ended = STATES.get(done.state, done.state)
        if run.layout != "layerscope":
            ended = f"a dump in the {run.layout} layout, which does not say whether it is complete"
            held = f"{many(len(run.points), 'point')}, {many(done.records, 'record')}"
        seal = f"; `layerscope recover {name}` seals it" if done.state in ("recording", "interrupted") else ""
        yield Sentence(f"{ended}{lacking}: {held}{seal}", "bad" if damaged else "warn")
    elif lacks:
        yield Sentence(f"finished with {' and '.join(lacks)}: {held}", "bad" if lost or damaged else "warn")
    else:
        yield Sentence(f"complete: {held}", "good")
    if run.layout != "layerscope":
        yield from (Sentence(note, "warn") for note in run.notes[:MOST])
    if done.recomputed:
        yield Sentence(f"{many(done.recomputed, 'call')} repeated by activation checkpointing, recorded once", "quiet")
    if run.missing or run.dropped:
        from layerscope.compare.page.provenance import absent

        yield from absent(run)
    yield from damage_parts(damaged)


def _written(run: Run) -> bool | None:
    """Tell whether a run of an unfinished recording has a writer; None where that cannot be told from here."""
    from layerscope.store.rank_lock import being_written

    folder = Path(run.address)
    return being_written(folder) if run.layout == "layerscope" and folder.is_dir() else None


def damage_text(damaged: Sequence[Damage]) -> str:
    """Say in half a sentence what cannot be read, and which file the first of it is in."""
    records = [d for d in damaged if d.point]
    lines = [d for d in damaged if not d.point and d.reason.startswith("byte ")]  # of a journal
    others = [d for d in damaged if d not in records and d not in lines]
    said = [f"{many(len(lines), 'damaged part')} of a journal"] * bool(lines)
    said += [f"{d.file} damaged ({d.reason})" for d in others]
    if records:
        first, more = records[0], len(records) > 1
        which = f"{'the first ' if more else ''}{first.point} at {first.moment}{' in ' * bool(first.file)}{first.file}"
        said.append(f"{many(len(records), 'damaged record')} ({which})")
    return " and ".join(said)


def damage_parts(damaged: Sequence[Damage]) -> Iterator[Part]:
    """List what was written and cannot be read."""
    if damaged:
        columns = [
            Column("file", "cannot be read"),
            Column("reason", "because"),
            Column("point", "point", "name", rank=1),
            Column("moment", "at", rank=1),
        ]
        yield Table.of("damaged", columns, [(d.file, d.reason, d.point, d.moment) for d in damaged], most=MOST)


def run_facts(run: Run) -> Facts:
    """Say what was recorded, when and on what."""
    manifest, done = run.manifest, run.manifest.completeness
    kind = str(manifest.model.get("name") or manifest.model.get("class") or "unknown")
    parameters = manifest.model.get("parameters")
    model = f"{kind}, {parameters:,} parameters" if isinstance(parameters, int) else kind
    on = [manifest.runtime, manifest.device, *(f"{k} {v}" for k, v in manifest.versions.items() if k == "torch")]
    if effect := manifest.settings.get("observer_effect"):
        on.append(str(effect))
    words = [manifest.started.replace("T", " ").replace("+00:00", " UTC"), *on]
    data = {
        "address": run.address,
        "layout": run.layout,
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
        "failed": done.failed,
        "replaced": run.replaced,
        "complete": run.complete,
    }
    return Facts(
        "run",
        (
            Fact("model", model, audience="page"),
            *([Fact("mode", manifest.mode, audience="page")] if manifest.mode else []),
            *([Fact("recorded", ", ".join(filter(None, words)), audience="page")] if any(words) else []),
            *(Fact(label, value, audience="data") for label, value in data.items()),
        ),
    )
