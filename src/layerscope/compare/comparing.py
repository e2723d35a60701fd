"""Compare runs: pair their points and moments, measure each pair, judge them all.

    result = compare("runs/fp32", "runs/int8", "runs/int4", noise="runs/bf16")
    result.first_divergence; result.verdict; print(result)

Runs are read, never models: a comparison needs no GPU and no code of the model's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from layerscope.checks import ErrorNumbers
from layerscope.compare.align.pairing import PairingRule, parse_rules
from layerscope.compare.comparison_plan import ComparisonPlan, RunRecords, floors_of
from layerscope.compare.module_checks import Checker
from layerscope.compare.noise_floor import CLASSES, LEAST, LIMIT, Noise, Scale, coarser, rounding
from layerscope.compare.ordering import follow_choices
from layerscope.compare.quantised import Siblings, grid_of
from layerscope.compare.record_pair import RecordPair
from layerscope.compare.result import Against, Comparison, Row
from layerscope.compare.verdicts import judge, verdict
from layerscope.errors import BadText, Incomparable, NoSuchPoint
from layerscope.progress import Progress
from layerscope.report.notebook import bar
from layerscope.store import Run, open_run, selected
from layerscope.store.address import Address

if TYPE_CHECKING:
    import torch


Runs: TypeAlias = "Address | Run | Sequence[Address | Run]"

# Of the points, as many may be far finer than an arithmetic: embeddings, and what norms make of them.
_FINER = 0.3
_FAR = 30.0
_EVEN = 5.0  # times the whole error, that a column's may be by rounding
_SEVERAL, _ALIKE = 3, 1.2  # places that an arithmetic rounds by as much
_FACTOR = 0.3  # of an error: rounding is no factor
_TINY = 1 << 16  # bytes up to which handing a pair to a thread costs more than measuring it
_LARGE = 32 << 20  # bytes from which a pair is worth all threads by itself


def compare(
    reference: Address | Run,
    *candidates: Address | Run,
    noise: Runs = (),
    pairing: str | os.PathLike[str] | Sequence[PairingRule] = (),
    points: str | Sequence[str] = (),
    limit: float = LIMIT,
    arithmetic: str | None = None,
    tokens: Any = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare candidates with a reference, point by point and moment by moment.

    A candidate's errors are set against the floors that the reference carries (`record(..., floors=True)`), up to
    `limit` times; else against the candidate's own, or against what `noise` shows: trusted runs that differ from the
    reference by rounding alone, each for the class of arithmetic it ran in. `pairing` declares which points belong
    together (a text, a file or `PairingRule`s), `points` are patterns of the reference's points to look at.
    `arithmetic` declares that a candidate computes more coarsely than it stores ("bfloat16"); `tokens` says which
    tokens count and which are padding, where no `attention_mask` was recorded: true and false, or 1 and 0, batch by
    tokens.

    Raises Incomparable when nothing of any candidate can be compared; one of several gets a verdict that says so.
    """
    if not candidates:
        raise TypeError("compare takes a reference and at least one candidate: compare('runs/fp32', 'runs/int8')")
    if not limit > 0:
        raise BadText(f"limit is how many times the floor an error may be, a number above 0; not {limit!r}")
    trusted = _opened(reference)
    others = [_opened(one) for one in candidates]
    quiet = [_opened(one) for one in _several(noise)]
    declared = _rules(pairing)
    if arithmetic is not None and arithmetic not in CLASSES:
        raise BadText(f"arithmetic is one of {', '.join(CLASSES)}; not {arithmetic!r}")
    counting = _tokens(tokens)
    asked = set(selected(trusted, [points] if isinstance(points, str) else points)) if points else None
    names = _names(others, beside=_name(trusted))

    left = RunRecords(trusted)
    plans = [ComparisonPlan(left, RunRecords(run), declared, asked, tokens=counting) for run in others]
    wanted = {one.key for plan in plans for one in plan.pairs} if quiet else set()
    floors = [ComparisonPlan(left, RunRecords(run), declared, tokens=counting) for run in quiet]
    for plan in floors:
        plan.pairs = [one for one in plan.pairs if one.key in wanted]
    for rule in declared:
        if all(rule in plan.alignment.idle for plan in (*plans, *floors)):
            raise NoSuchPoint(plans[0].alignment.idle[rule])
    with bar("comparing") as shown:
        _run([*plans, *floors], threads=threads or _cores(), progress=progress or shown)
    for plan in (*plans, *floors):
        follow_choices(plan.pairs)
    said = [
        f"{len(plan.unread):,} records of the noise run {plan.right.run.address} cannot be read"
        for plan in floors
        if plan.unread
    ]
    known = [plan.noise() for plan in floors]
    judged = zip(plans, names, strict=True)
    against = [_judged(plan, name, known, limit=limit, arithmetic=arithmetic, said=said) for plan, name in judged]
    if not any(one.compared or _statistics_only(one) for one in against):
        raise Incomparable(_nothing(trusted, against))
    return Comparison(
        _name(trusted), trusted.address, trusted.layout, tuple(against), tuple(run.address for run in quiet)
    )


# What is asked ----------------------------------------------------------------------------------


def _opened(run: Address | Run) -> Run:
    return run if isinstance(run, Run) else open_run(run)


def _several(runs: Runs) -> Sequence[Address | Run]:
    return [runs] if isinstance(runs, (str, os.PathLike, Run)) else runs


def _rules(rules: str | os.PathLike[str] | Sequence[PairingRule]) -> Sequence[PairingRule]:
    if isinstance(rules, os.PathLike):
        try:
            return parse_rules(Path(rules).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise BadText(f"{rules} is no file of rules: it is not text in UTF-8 ({error.reason})") from error
    if not isinstance(rules, str):
        return rules
    return (
        _rules(Path(rules)) if "->" not in rules and "\n" not in rules and Path(rules).is_file() else parse_rules(rules)
    )


def _name(run: Run) -> str:
    """Return what a run is called in a table: its mode in a layout that has several, else the folder's name."""
    if run.layout != "layerscope" and run.manifest.mode:
        return run.manifest.mode
    return run.address.rstrip("/").rsplit("/", 1)[-1] or run.address


def _names(runs: Sequence[Run], *, beside: str) -> list[str]:
    """Return a name for each candidate, told apart by their addresses, then by number, where they are alike."""
    names = [_name(run) for run in runs]
    if len({*names, beside}) <= len(names):
        longer = ["/".join(run.address.rstrip("/").split("/")[-2:]) for run in runs]
        names = [n if [*names, beside].count(n) == 1 else more for n, more in zip(names, longer, strict=True)]
    seen: dict[str, int] = {}
    for at, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[at] = f"{name} ({seen[name]})"
    return names


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Measuring --------------------------------------------------------------------------------------


def _run(plans: Sequence[ComparisonPlan], *, threads: int, progress: Progress) -> None:
    """Measure every pair: tiny ones in turn, others side by side, large ones with all threads, one after the other."""
    count = sum(len(plan.pairs) for plan in plans)
    side_by_side: list[tuple[ComparisonPlan, RecordPair]] = []
    done = 0
    for plan, one in ((each, one) for each in plans for one in each.pairs):
        if threads > 1 and _TINY <= one.nbytes < _LARGE:
            side_by_side.append((plan, one))
        else:
            plan.measure(one, threads=threads)
            done += 1
            progress(one.point.place, done, count)
    if not side_by_side:
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="layerscope-compare") as pool:
        running: dict[Future[None], RecordPair] = {}
        waiting = iter(side_by_side)
        try:
            while True:
                for plan, one in waiting:
                    running[pool.submit(plan.measure, one)] = one
                    if len(running) >= 4 * threads:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    done += 1
                    progress(running.pop(future).point.place, done, count)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# What they come to ------------------------------------------------------------------------------


def _judged(
    plan: ComparisonPlan,
    name: str,
    noise: Sequence[Noise],
    *,
    limit: float,
    arithmetic: str | None,
    said: Sequence[str],
) -> Against:
    run = plan.right.run
    grid = grid_of(plan)
    scale = Siblings(plan, limit=limit) if grid else Scale(plan.carried, noise, limit=limit)
    checker = Checker(plan, plan.carried, limit=limit, quantised=bool(grid))
    shown = checker.arithmetic(plan.arithmetic)
    declared = coarser(arithmetic or CLASSES[0], shown if shown != plan.arithmetic else CLASSES[0])

    def judged(declared: str) -> list[Row]:
        plan.computes = declared
        return judge(
            plan.rows(),
            candidate=name,
            scale=scale,
            ties=lambda one: plan.ties(one, noise),
            numbers=plan.numbers,
            checks=checker,
            arithmetic=declared,
        )

    rows = judged(declared)
    own = [] if arithmetic is not None or checker.checked or grid or noise else _own(rows)
    if own and _even(own):
        for coarse in CLASSES[CLASSES.index(plan.arithmetic) + 1 :]:
            again = judged(coarse) if _as_coarse(own, rows, coarse) else rows
            if not any(row.kind in ("root", "nonfinite") for row in again) and not _finer_in_part(again):
                rows, shown = again, coarse
                break
    basis = _basis(plan, rows, noise, scale, checker)
    if shown != plan.arithmetic:
        basis += f"; the candidate is stored as {plan.arithmetic} and computes like {shown}"
    return Against(
        name,
        run.address,
        run.layout,
        tuple(rows),
        verdict(rows, grid=grid),
        basis,
        (*_notes(plan, rows), *said),
        tuple(plan.unread),
    )


def _own(rows: Sequence[Row]) -> list[ErrorNumbers]:
    """Return the numbers of what stands out though what it was given, and every part of it, agrees.

    What an arithmetic's error becomes where it has come in from before need not look like one. Where parts of all that
    stands out are off, nothing else is known of it.
    """
    given = {(row.point.name, row.moment) for row in rows if row.parted and row.point.side == "input"}
    roots = [row for row in rows if row.kind == "root" and (row.point.name, row.moment) not in given]
    holders = set()
    for row in rows:
        parts = row.point.name.split(".") if row.parted else ()
        holders |= {(".".join(parts[:depth]), row.moment) for depth in range(len(parts))}
    own = [row for row in roots if (row.point.name, row.moment) not in holders] or roots
    return [row.numbers for row in own if row.numbers is not None]


def _even(own: Sequence[ErrorNumbers]) -> bool:
    """Tell whether what stands out is off evenly, no factor, row or column of it: an arithmetic rather than a fault."""
    return all(
        n.factor <= _FACTOR * n.relative_l2
        and not n.column > _EVEN * n.relative_l2
        and not (n.rows >= _EVEN and n.p90 > 2 * n.median)
        for n in own
    )


def _as_coarse(own: Sequence[ErrorNumbers], rows: Sequence[Row], arithmetic: str) -> bool:
    """Tell whether what stands out, and most of what follows, is off by as much as a class of arithmetic rounds.

    A fault is diluted by what it is added to; an arithmetic is everywhere, or the same in several places that do not
    depend on each other. An estimate is too wide to tell float16.
    """
    least = LEAST[arithmetic] / 4
    roots = [numbers.relative_l2 for numbers in own]
    errors = sorted(row.numbers.relative_l2 for row in rows if row.numbers is not None and row.kind != "same")
    if arithmetic == "float16" and any(row.floor is not None and row.floor.source == "estimate" for row in rows):
        return False
    everywhere = errors[len(errors) // 2] >= least or (len(roots) >= _SEVERAL and max(roots) <= _ALIKE * min(roots))
    return everywhere and all(least <= error <= 32 * least for error in roots)


def _finer_in_part(rows: Sequence[Row]) -> bool:
    """Tell whether points that a coarse arithmetic would have changed are far finer than it: a fault is in one place.

    Only measured floors say what the arithmetic would have done.
    """
    if not any(row.floor is not None and row.floor.source == "floors" for row in rows):
        return False
    shown = [row for row in rows if row.metrics is not None and rounding(row.metrics.reference.dtype)]
    finer = [
        row
        for row in shown
        if row.kind == "same"
        or (row.floor is not None and row.metrics is not None and row.metrics.relative_l2 < row.floor.error / _FAR)
    ]
    return len(finer) >= _FINER * len(shown)


def _tokens(given: Any) -> torch.Tensor | None:
    """Read which tokens count: a tensor, an array, or the file of one."""
    if given is None:
        return None
    import numpy as np
    import torch

    if isinstance(given, (str, os.PathLike)):
        given = np.load(given, allow_pickle=False)
    mask = torch.as_tensor(given)
    if mask.ndim != 2:
        raise BadText(
            f"tokens says for each sequence and token whether it counts, [batch, tokens]; not {list(mask.shape)}"
        )
    return mask != 0


def _basis(plan: ComparisonPlan, rows: Sequence[Row], noise: Sequence[Noise], scale: Scale, checker: Checker) -> str:
    """Say on what the verdict rests."""
    measured = [row for row in rows if row.floor is not None]
    if not measured:
        equal = [row for row in rows if row.metrics is not None]
        return "equal bits" if equal else "statistics and fingerprints alone"
    if not any(map(rounding, plan.dtypes)):
        return "whole numbers, which do not round"
    sources = Counter(row.floor.source for row in measured if row.floor is not None)
    said = []
    if checker.checked:
        said.append(f"{checker.checked:,} modules checked by the reference's weights")
    if sources["siblings"]:
        said.append("what the candidate's own layers have in common, because it is quantised")
    if sources["floors"]:
        whose = "the reference" if floors_of(plan.left.run).points else "the candidate itself"
        raised = max(scale.raised.values(), default=1.0)
        more = f", raised {raised:.3g} times by leaving one twin out" if raised > 1 else ""
        limit = scale.limit * raised
        said.append(f"the floors that {whose} carries; an error may be {limit:.3g} times its floor{more}")
    shown = [run.address for run in noise if run.arithmetic == plan.arithmetic or sources[run.address]]
    if shown:
        said.append(f"the floor that {', '.join(shown)} shows; an error may be {scale.limit:.3g} times it")
    guessed = sources["estimate"]
    if guessed == len(measured):
        said.append(
            f"an estimate of what {plan.arithmetic} costs, so wide that only gross faults stand out: {_way_out(plan)}"
        )
    elif guessed:
        said.append(f"an estimate for {guessed:,} rows")
    return "; ".join(said)


def _way_out(plan: ComparisonPlan) -> str:
    """Say how to have floors."""
    run = plan.left.run
    model = run.manifest.model.get("name")
    if run.layout == "layerscope" and isinstance(model, str) and model:
        return f"`layerscope record {model} '**:io' -o RUN` measures floors, as does record(..., floors=True)"
    return "record the reference with floors=True, or ls.measure_floors(model, inputs, run) adds them"


def _notes(plan: ComparisonPlan, rows: Sequence[Row]) -> Iterator[str]:
    for role, run in (("the reference", plan.left.run), ("the candidate", plan.right.run)):
        yield from (f"{role}: {note}" for note in getattr(run, "notes", ()))
        if effect := run.manifest.settings.get("observer_effect"):
            where = f" in {run.manifest.runtime}" if run.manifest.runtime else ""
            yield f"{role} was recorded{where}: {effect}"
        if names := run.manifest.settings.get("names"):
            yield f"{role} was recorded from a file without metadata: {names}"
        if run.layout == "layerscope" and not run.complete and (said := _incomplete(run)):
            yield f"{role} is {said}; what is not there was not compared"
    seen = [run.manifest.settings.get("inputs") for run in (plan.left.run, plan.right.run)]
    if None not in seen and seen[0] != seen[1]:
        yield (
            "the two were run on different inputs, by the fingerprints they state: what differs need not be the "
            "model's doing; record them with the same inputs, seed and number of samples"
        )
    lonely = [row for row in rows if row.kind == "unpaired" and row.counterpart is None]
    for has, role, other in ((True, "the reference", "the candidate"), (False, "the candidate", "the reference")):
        points = len({row.point for row in lonely if row.reference_has is has and not row.method})
        if points:
            yield f"{points:,} points of {role} found no partner"
        records = sum(row.reference_has is has and bool(row.method) for row in lonely)
        if records:
            yield f"{records:,} records of {role} are of moments that {other} has not"
    told = [row for row in rows if row.metrics is None and not row.because.startswith("masks")]
    blind = sum(row.kind not in ("missing", "unpaired", "same") for row in told)
    if blind:
        yield f"{blind:,} of {len(rows):,} rows rest on statistics alone, which cannot tell a permutation"
    if plan.alignment.ignored:
        yield f"{len(plan.alignment.ignored):,} points are ignored by rule"


def _incomplete(run: Run) -> str:
    missing = [m for m in run.missing if not m.reason.startswith("never called")]
    lost = [(len(missing), "points missing"), (sum(d.count for d in run.dropped), "records dropped")]
    said = " and ".join(f"{n:,} {what}" for n, what in lost if n)
    return f"incomplete ({said})" if said else "" if run.state == "complete" else run.state


def _statistics_only(against: Against) -> bool:
    return any(row.kind not in ("missing", "unpaired") for row in against.rows)


def _nothing(reference: Run, against: Sequence[Against]) -> str:
    said = [f"nothing of {reference.address} can be compared with {one.address}: {_why(one)}" for one in against]
    return "; ".join(said)


def _why(against: Against) -> str:
    reasons = [row.because for row in against.rows if row.counterpart is not None or row.kind == "missing"]
    if not against.rows:
        return "one of them holds no record"
    if reasons and reasons[0].startswith("shapes differ"):
        return f"{reasons[0]}; record both on the same inputs, with as many samples and tokens"
    return reasons[0] if reasons else f"no point of one is in the other; {against.rows[0]}: {against.rows[0].because}"
