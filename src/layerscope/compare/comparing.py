"""Compare runs: pair their points and moments, measure each pair, judge them all.

    result = compare("runs/fp32", "runs/int8", "runs/int4", noise="runs/bf16")
    result.first_divergence; result.verdict; print(result)

Runs are read, never models: a comparison needs no GPU and no code of the model's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeAlias

from layerscope.compare.floors import ESTIMATED, Noise, rounding
from layerscope.compare.jobs import Job
from layerscope.compare.metrics import Metrics
from layerscope.compare.planning import Plan, Records, fitting
from layerscope.compare.resuming import Memory, place, stamp
from layerscope.compare.rows import Against, Comparison, Row
from layerscope.compare.rules import Rule, parse_rules
from layerscope.compare.verdicts import LIMIT, judge, verdict
from layerscope.errors import BadText, Incomparable, LayerscopeError
from layerscope.store import Reader, cache_folder, open_run, selected
from layerscope.store.address import Address

__all__ = ["compare"]

Tell: TypeAlias = Callable[[str, int, int], None]
Runs: TypeAlias = "Address | Reader | Sequence[Address | Reader]"

_LARGE = 32 << 20  # bytes from which a pair is worth all threads by itself


def compare(
    reference: Address | Reader,
    *candidates: Address | Reader,
    noise: Runs = (),
    rules: str | os.PathLike[str] | Sequence[Rule] = (),
    points: str | Sequence[str] = (),
    limit: float = LIMIT,
    threads: int | None = None,
    resume: bool = False,
    tell: Tell | None = None,
) -> Comparison:
    """Compare candidates with a reference, point by point and moment by moment.

    `noise` are trusted runs that differ from the reference by rounding alone: their error is the floor that a
    candidate's is set against, up to `limit` times. `rules` declare which points belong together (a text, a file or
    `Rule`s), `points` are patterns of the reference's points to look at. With `resume`, what is measured is remembered
    until the comparison is whole, so that the same call goes on after an interruption.

    Raises Incomparable when nothing of any candidate can be compared; one of several gets a verdict that says so.
    """
    if not candidates:
        raise TypeError("compare takes a reference and at least one candidate: compare('runs/fp32', 'runs/int8')")
    if not limit > 0:
        raise BadText(f"limit is how many times the floor an error may be, a number above 0; not {limit!r}")
    trusted = _opened(reference)
    others = [_opened(one) for one in candidates]
    quiet = [_opened(one) for one in _several(noise)]
    declared = _rules(rules)
    asked = set(selected(trusted, [points] if isinstance(points, str) else points)) if points else None
    names = _names(others, beside=_name(trusted))

    left = Records(trusted)
    meant = fitting(declared, left, [Records(run) for run in (*others, *quiet)])
    plans = [Plan(left, right, rules, asked) for right, rules in meant[: len(others)]]
    wanted = {job.key for plan in plans for job in plan.jobs}
    floors = [Plan(left, right, rules) for right, rules in meant[len(others) :]]
    for plan in floors:
        plan.jobs = [job for job in plan.jobs if job.key in wanted]
    with Memory(_memory([trusted, *others, *quiet]) if resume else None) as memory:
        _run([*plans, *floors], memory, threads=threads or _cores(), tell=tell or (lambda what, done, total: None))
        resumed = memory.resumed
    for plan in (*plans, *floors):
        plan.follow_choices()
    said = [f"{resumed:,} pairs were measured before the interruption"] if resumed else []
    said += [
        f"{len(plan.unread):,} records of the noise run {plan.right.run.address} cannot be read"
        for plan in floors
        if plan.unread
    ]
    known = [Noise(plan.right.run.address, plan.metrics, plan.rerouted()) for plan in floors]
    judged = zip(plans, names, strict=True)
    against = [_judged(plan, name, known, limit=limit, said=said) for plan, name in judged]
    if not any(one.compared or _statistics_only(one) for one in against):
        raise Incomparable(_nothing(trusted, against))
    return Comparison(
        _name(trusted), trusted.address, trusted.layout, tuple(against), tuple(run.address for run in quiet)
    )


# What is asked ----------------------------------------------------------------------------------


def _opened(run: Address | Reader) -> Reader:
    return run if isinstance(run, Reader) else open_run(run)


def _several(runs: Runs) -> Sequence[Address | Reader]:
    return [runs] if isinstance(runs, (str, os.PathLike, Reader)) else runs


def _rules(rules: str | os.PathLike[str] | Sequence[Rule]) -> Sequence[Rule]:
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


def _name(run: Reader) -> str:
    """Return what a run is called in a table: its mode in a layout that has several, else the folder's name."""
    if run.layout != "layerscope" and run.manifest.mode:
        return run.manifest.mode
    return run.address.rstrip("/").rsplit("/", 1)[-1] or run.address


def _names(runs: Sequence[Reader], *, beside: str) -> list[str]:
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


def _memory(runs: Sequence[Reader]) -> Path | None:
    folder, stamped = cache_folder(), stamp(runs)
    return place(folder, stamped) if folder is not None and stamped is not None else None


# Measuring --------------------------------------------------------------------------------------


def _run(plans: Sequence[Plan], memory: Memory, *, threads: int, tell: Tell) -> None:
    """Measure every pair: small ones side by side, large ones with all threads, one after the other."""
    work = [(plan, job) for plan in plans for job in plan.jobs]
    total, done = len(work), 0

    def finish(plan: Plan, job: Job, outcome: Callable[[], Metrics]) -> None:
        nonlocal done
        try:
            plan.found[job] = outcome()
            memory.keep(_text(plan, job), plan.found[job])
        except LayerscopeError as error:  # one damaged record does not cost the others
            plan.unread[job] = str(error)
        done += 1
        tell(job.reference.point.place, done, total)

    small: list[tuple[Plan, Job]] = []
    for plan, job in work:
        known = memory.known(_text(plan, job))
        if known is not None:
            plan.found[job] = known
            done += 1
        elif job.nbytes < _LARGE and threads > 1:
            small.append((plan, job))
        else:
            finish(plan, job, lambda job=job: job.measured(threads=threads))  # type: ignore[misc]
    if not small:
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="layerscope-compare") as pool:
        running: dict[Future[Metrics], tuple[Plan, Job]] = {}
        waiting = iter(small)
        try:
            while True:
                for plan, job in waiting:
                    running[pool.submit(job.measured)] = (plan, job)
                    if len(running) >= 4 * threads:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    finish(*running.pop(future), future.result)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _text(plan: Plan, job: Job) -> str:
    return f"{plan.left.run.address} {plan.right.run.address} {job}"


# What they come to ------------------------------------------------------------------------------


def _judged(plan: Plan, name: str, noise: Sequence[Noise], *, limit: float, said: Sequence[str]) -> Against:
    rows = judge(plan.measured(), candidate=name, noise=noise, limit=limit, ties=lambda one: plan.ties(one, noise))
    run = plan.right.run
    return Against(
        name,
        run.address,
        run.layout,
        tuple(rows),
        verdict(rows),
        _basis(plan, rows, noise, limit),
        (*_notes(plan, rows), *said),
        tuple(plan.unread.values()),
    )


def _basis(plan: Plan, rows: Sequence[Row], noise: Sequence[Noise], limit: float) -> str:
    """Say on what the verdict rests."""
    measured = [row for row in rows if row.floor is not None]
    guessed = [row for row in measured if row.floor is not None and row.floor.source == "estimate"]
    if not measured:
        return "statistics and fingerprints alone"
    if all(row.kind == "same" for row in measured):
        return "equal bits"
    if not noise:
        coarsest = max(plan.dtypes, key=rounding)
        if not rounding(coarsest):
            return "whole numbers, which do not round"
        return (
            f"an estimate: no noise run was given, so the floor is the rounding of {coarsest}, growing with depth, and "
            f"an error may be {limit * ESTIMATED:.3g} times it"
        )
    said = f"the floor that {', '.join(run.address for run in noise)} shows; an error may be {limit:.3g} times it"
    return f"{said} ({len(guessed):,} rows have an estimate instead)" if guessed else said


def _notes(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    for role, run in (("the reference", plan.left.run), ("the candidate", plan.right.run)):
        yield from (f"{role}: {note}" for note in getattr(run, "notes", ()))
        if effect := run.manifest.settings.get("observer_effect"):
            where = f" in {run.manifest.runtime}" if run.manifest.runtime else ""
            yield f"{role} was recorded{where}: {effect}"
        if run.layout == "layerscope" and not run.complete:
            yield f"{role} is {_incomplete(run)}; what is not there was not compared"
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
    blind = sum(row.metrics is None and row.kind not in ("missing", "unpaired", "same") for row in rows)
    if blind:
        yield f"{blind:,} of {len(rows):,} rows rest on statistics alone, which cannot tell a permutation"
    if plan.alignment.ignored:
        yield f"{len(plan.alignment.ignored):,} points are ignored by rule"


def _incomplete(run: Reader) -> str:
    lost = [(len(run.missing), "points missing"), (sum(d.count for d in run.dropped), "records dropped")]
    said = " and ".join(f"{n:,} {what}" for n, what in lost if n)
    return f"incomplete ({said})" if said else run.state


def _statistics_only(against: Against) -> bool:
    return any(row.kind not in ("missing", "unpaired") for row in against.rows)


def _nothing(reference: Reader, against: Sequence[Against]) -> str:
    said = [f"nothing of {reference.address} can be compared with {one.address}: {_why(one)}" for one in against]
    return "; ".join(said)


def _why(against: Against) -> str:
    reasons = [row.because for row in against.rows if row.counterpart is not None or row.kind == "missing"]
    if not against.rows:
        return "one of them holds no record"
    if reasons and reasons[0].startswith("shapes differ"):
        return f"{reasons[0]}; record both on the same inputs, with as many samples and tokens"
    return reasons[0] if reasons else f"no point of one is in the other; {against.rows[0]}: {against.rows[0].because}"
