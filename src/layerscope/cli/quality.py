"""`layerscope modes --evaluate` and `--plan`: what modes do to a model's quality, and which layers to keep for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerscope.errors import LayerscopeError
from layerscope.progress import Progress
from layerscope.report.parts import (
    Cell,
    Column,
    Data,
    Document,
    Heading,
    Notes,
    Part,
    Profile,
    Sentence,
    Table,
    Tone,
    Value,
)
from layerscope.report.writing import many, percent, size

if TYPE_CHECKING:
    import torch

    from layerscope.modes import Mode
    from layerscope.modes.evaluation import Quality
    from layerscope.modes.plan import Plan, Planned
    from layerscope.modes.preparing import Prepared

NAMED = 8  # of the layers that a plan keeps, in a table


def windows(ready: Prepared, given: str, length: int | None) -> list[torch.Tensor]:
    """Return the text that `--evaluate` gives as windows of token ids."""
    from layerscope.modes.evaluation import ids_of, text_of, window_of, windows_of

    return windows_of(ids_of(ready.loaded, text_of(given)), length or window_of(ready.model))


# The summary ------------------------------------------------------------------------------------


def evaluated(
    ready: Prepared, modes: Sequence[str], text: Sequence[torch.Tensor], progress: Progress
) -> tuple[Document, int]:
    """Return the page of the modes on a text, and the exit code: 2 when one has failed.

    Raises the error itself when there is one mode alone.
    """
    from layerscope.modes import choose
    from layerscope.modes.evaluation import evaluate, perplexity

    choice = choose(modes, ready.model)
    own = perplexity(ready.model, text)
    done: list[Quality] = []
    failed: list[tuple[Mode, Exception]] = []
    for mode in choice.modes:
        try:
            done.append(evaluate(ready.model, mode, text, setting=ready.setting, progress=progress))
        except Exception as error:
            failed.append((mode, error))
    if not done:
        raise failed[0][1]
    tokens, name = done[0].tokens, ready.loaded.name
    parts: list[Part] = [
        Sentence(f"{many(tokens, 'token')} predicted, in {many(len(text), 'window')} of up to {text[0].shape[1]:,}"),
        *[Notes("failed", tuple(Sentence(f"{mode.name}: {_told(error)}", "bad") for mode, error in failed))][
            : len(failed)
        ],
        _summary(own, done),
        *_depths(done),
        Table.of(
            "layers",
            [Column("mode", "mode"), Column("layer", "layer", "name"), Column("relative_l2", "", "number")],
            [(one.mode, layer, error) for one in done for layer, error in one.layers.items()],
            audience="data",
        ),
        Sentence(
            "against the model as it was loaded: last layer is the relative L2 error of the last decoder layer, agrees "
            "the share of predictions with the same most likely token, KL the divergence from its distribution in nats",
            "quiet",
        ),
    ]
    parts += _notes("left_out", [f"{mode.name} is left out: {why}" for mode, why in choice.left_out], "quiet")
    parts += [Data("tokens", tokens), Data("windows", len(text))]
    return Document(f"quality of the modes of {name}", tuple(parts)), 2 if failed else 0


def _summary(own: float, done: Sequence[Quality]) -> Table:
    columns = [
        Column("mode", "mode"),
        Column("last_layer", "last layer", "percent"),
        Column("worst_layer", "worst layer", "name", rank=2),
        Column("worst", "", "percent", rank=2),
        Column("perplexity", "perplexity", "number"),
        Column("increase", "more", "percent", rank=1),
        Column("agreement", "agrees", "percent"),
        Column("divergence", "KL", "number"),
    ]
    rows: list[Sequence[Cell | Value]] = [
        (Cell("reference", "quiet"), 0.0, None, None, own, 0.0, 1.0, 0.0),
    ]
    for one in done:
        worst, error = max(one.layers.items(), key=lambda item: item[1])
        rows.append(
            (one.mode, one.last, worst, error, one.perplexity, one.perplexity / own - 1, one.agreement, one.divergence)
        )
    return Table.of("modes", columns, rows)


def _depths(done: Sequence[Quality]) -> list[Part]:
    """Draw the layer errors of the modes over depth, on one scale."""
    errors = [error for one in done for error in one.layers.values() if error > 0]
    if not errors:
        return []
    span = (min(errors), max(errors))
    lines = [
        Profile(
            f"depth of {one.mode}",
            one.mode,
            tuple(one.layers),
            tuple(error or None for error in one.layers.values()),
            log=True,
            span=span,
            audience="page",
        )
        for one in done
        if any(one.layers.values())
    ]
    return [Heading("relative L2 error over depth"), *lines]


# The plan ---------------------------------------------------------------------------------------


def planned(
    ready: Prepared, modes: Sequence[str], text: Sequence[torch.Tensor] | None, within: float, progress: Progress
) -> tuple[Document, int]:
    """Return the page of a plan, and the exit code: 1 when no plan is within the budget."""
    from layerscope.modes import choose
    from layerscope.modes.plan import last_layer_error, perplexity_increase, plan

    choice = choose(modes, ready.model)
    if text is not None:
        measure, what = perplexity_increase(ready.model, text), "of perplexity more than the model's"
    else:
        measure, what = last_layer_error(ready.model, list(ready.batches())), "relative L2 error of the last layer"
    found = plan(ready.model, choice.modes, measure, within=within, setting=ready.setting, progress=progress)
    left_out = [*found.left_out, *((mode.name, why) for mode, why in choice.left_out)]
    best = found.best
    code = best.code()
    parts: list[Part] = [
        *_said(found, within, what),
        _plans(found),
        *_notes("left_out", [f"{name} is left out: {why}" for name, why in left_out], "quiet"),
        Data("measure", "perplexity_increase" if text is not None else "last_layer_relative_l2"),
        Data("within", within),
        Data("keep", best.keep),
        Data("code", code),
    ]
    if best.is_within:
        parts.append(Heading("the plan as a mode: save it, and give it as --modes-file"))
        parts += [Sentence(line, audience="page") for line in code.splitlines()]
    return Document(f"a plan for {ready.loaded.name}", tuple(parts)), int(not best.is_within)


def _said(found: Planned, within: float, what: str) -> list[Part]:
    best = found.best
    if not best.is_within:
        return [
            Sentence(
                f"no plan is within {within:g} {what}; the best is {best.mode} at {percent(best.error)}, with "
                f"{many(len(best.keep), 'part')} kept",
                "bad",
            )
        ]
    bits = f"{size(best.bits // 8)} of weights instead of {size(found.bits // 8)}"
    kept = f"{best.mode}, but for {many(len(best.keep), 'part')}" if best.keep else f"{best.mode} as it is"
    return [
        Sentence(f"{kept}: {percent(best.error)} {what}, within {percent(within)}; {bits}", "good"),
        Sentence("measured on the mixed model, which the code below makes", "quiet"),
    ]


def _plans(found: Planned) -> Table:
    columns = [
        Column("mode", "mode"),
        Column("within", "", audience="data"),
        Column("error", "error", "percent"),
        Column("bare", "nothing kept", "percent", rank=1),
        Column("bytes", "weights", "bytes"),
        Column("bits", "", "count", audience="data"),
        Column("keep", "keep", "name"),
        Column("runs", "runs", "count", rank=2),
    ]
    return Table.of("plans", columns, [_plan(one) for one in found.plans])


def _plan(one: Plan) -> Sequence[Cell | Value]:
    listed = ", ".join(one.keep[:NAMED]) + (f" and {len(one.keep) - NAMED} more" if len(one.keep) > NAMED else "")
    return (
        one.mode,
        one.is_within,
        Cell(one.error, "good" if one.is_within else "bad"),
        one.bare,
        one.bits // 8,
        one.bits,
        Cell(one.keep, text=listed or "nothing"),
        one.runs,
    )


def _notes(key: str, said: Sequence[str], tone: Tone) -> list[Part]:
    return [Notes(key, tuple(Sentence(text, tone) for text in said))] if said else []


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, LayerscopeError) else f"{type(error).__name__}: {error}"
