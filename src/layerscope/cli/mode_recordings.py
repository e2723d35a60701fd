"""`layerscope record --mode`: the runs of several modes, and what became of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope.cli.page import counting
from layerscope.cli.record import withdraw
from layerscope.errors import LayerscopeError
from layerscope.report.parts import Cell, Column, Document, Fact, Facts, Notes, Part, Sentence, Table, Tone
from layerscope.report.writing import many

if TYPE_CHECKING:
    import torch

    from layerscope.models import Inputs
    from layerscope.modes import Mode, Recorded
    from layerscope.modes.preparing import Prepared


def told_apart(
    modes: Sequence[str], patterns: Sequence[str], model: torch.nn.Module
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tell the words that are modes from those that are patterns: `--mode 0 2-1` leaves 2-1 among the patterns.

    A bare word that is neither a mode nor a module is taken for a mode too, whose error then lists those there are.
    """
    from layerscope.modes import GROUPS, modes_of
    from layerscope.runtimes.eager import modules_of

    names = {mode.name for mode in modes_of(model)} | GROUPS.keys()
    modules = modules_of(model).by_name

    def is_mode(word: str) -> bool:
        return word in names or (word not in modules and word.replace("-", "").isalnum())

    return (
        (*modes, *(word for word in patterns if is_mode(word))),
        tuple(word for word in patterns if not is_mode(word)),
    )


def record_variants(
    ready: Prepared,
    modes: Sequence[str],
    batches: Sequence[Inputs],
    taps: Sequence[str],
    *,
    to: str,
    keep: Any,
    statistics: str,
    when: str | None,
    append: bool,
    forward: Callable[[torch.nn.Module, Inputs], object],
    stop_after: str | None,
    floors: bool = True,
) -> tuple[Document, int]:
    """Record the modes; return the page that says what became of them, and the exit code: 2 when one has failed.

    Raises the error itself when there is one mode alone.
    """
    from layerscope.modes import choose, record_modes

    choice = choose(modes, ready.model)
    there = {mode.name for mode in choice.modes if os.path.lexists(Path(to) / mode.name)}
    done: list[Recorded] = []
    with counting("recording") as progress:
        for one in record_modes(
            ready.model,
            choice.modes,
            batches,
            taps,
            to=to,
            setting=ready.setting,
            settings=ready.settings,
            name=ready.loaded.name,
            keep=keep,
            statistics=statistics,
            when=when,
            append=append,
            seed=ready.loaded.seed,
            forward=forward,
            stop_after=stop_after,
            floors=floors and not stop_after and keep != "summary",
            progress=progress,
        ):
            done.append(one)
            if one.error is not None and not append and "://" not in to and one.mode.name not in there:
                withdraw(Path(to) / one.mode.name)
    failed = [one for one in done if one.error is not None]
    if failed and len(failed) == len(done):
        raise failed[0].error  # type: ignore[misc]
    return _page(ready, done, choice.left_out, taps, to=to), 2 if failed else 0


def _page(
    ready: Prepared, done: Sequence[Recorded], left_out: Sequence[tuple[Mode, str]], taps: Sequence[str], *, to: str
) -> Document:
    whole = [one for one in done if one.error is None]
    parts: list[Part] = [
        Sentence(f"{many(len(whole), 'mode')} recorded{', all on the same inputs' * (len(whole) > 1)}", "good")
        if len(whole) == len(done)
        else Sentence(f"{len(whole)} of {many(len(done), 'mode')} recorded", "bad")
    ]
    parts += [
        Notes("failed", tuple(Sentence(f"{one.mode.name}: {_told(one.error)}", "bad") for one in done if one.error))
    ] * (len(whole) < len(done))
    columns = [
        Column("mode", "mode"),
        Column("run", "run", "name"),
        Column("points", "points", "count"),
        Column("records", "records", "count"),
        Column("state", "state"),
    ]
    parts.append(Table.of("runs", columns, map(_row, done)))
    if left_out:
        said = tuple(Sentence(f"{mode.name} is left out: {reason}", "quiet") for mode, reason in left_out)
        parts.append(Notes("left_out", said))
    facts = [Fact("folder", to, "name"), Fact("model", ready.loaded.name), Fact("taps", " ".join(taps))]
    facts += [Fact("inputs", one.run.manifest.settings["inputs"], audience="data") for one in whole[:1] if one.run]
    facts += [Fact(key, value, audience="data") for key, value in ready.settings.items()]
    stops = {one.run.manifest.settings.get("stop_after") for one in whole if one.run} - {None}
    facts += [Fact("stop_after", stop, "name") for stop in stops]
    if len(whole) > 1:
        first, *others = (str(one.address) for one in whole)
        facts.append(Fact("look", f"layerscope compare {first} {' '.join(others[:3])}{' ...' * (len(others) > 3)}"))
    elif whole:
        facts.append(Fact("look", f"layerscope show {whole[0].address}"))
    parts.append(Facts("recorded", tuple(facts)))
    return Document(f"recorded {ready.loaded.name}", tuple(parts))


def _row(one: Recorded) -> tuple[Cell, ...]:
    if one.run is None or one.error is not None:
        return Cell(one.mode.name), Cell(one.address), Cell(None), Cell(None), Cell("failed", "bad")
    run, complete = one.run, one.run.complete
    tone: Tone = "plain" if complete else "warn"
    state = "complete" if complete else f"{many(len(run.missing), 'point')} missing" if run.missing else run.state
    return (
        Cell(one.mode.name),
        Cell(one.address),
        Cell(len(run.points)),
        Cell(run.manifest.completeness.records),
        Cell(state, tone),
    )


def _told(error: Exception | None) -> str:
    return str(error) if isinstance(error, LayerscopeError) else f"{type(error).__name__}: {error}"
