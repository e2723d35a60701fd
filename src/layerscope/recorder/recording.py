"""The recording itself: a context manager that listens to a runtime and hands records to a run.

with record(model, "model.layers.*", to="runs/fp32") as rec:
    model(**inputs)
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import platform
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from layerscope import ranks
from layerscope.errors import Incomplete, NothingRecorded
from layerscope.patterns import op_name
from layerscope.points import Moment, Point
from layerscope.recorder.clock import Clock
from layerscope.recorder.copying import Arena, Pool, dtype_name, plain, undisturbed
from layerscope.recorder.devices import Statistics
from layerscope.recorder.taps import Keep, Level, Plan, Wish, plan, taps_of
from layerscope.runtimes import eager, find
from layerscope.runtimes.sink import Step
from layerscope.schedules import Schedule
from layerscope.stats import Summary, backend, fingerprint, summarize
from layerscope.store import Blob, Completeness, Manifest, MemoryRun, Missing, Run, Writer, open_run

__all__ = ["Recording", "record"]

_log = logging.getLogger("layerscope")
_BUDGET = 512 << 20
_WEIGHTS = 8 << 30  # fingerprinting more than this at the start of a run would be felt


def record(
    model: torch.nn.Module,
    taps: Any,
    *,
    to: str | os.PathLike[str] | None = None,
    keep: Keep | Callable[[torch.Tensor], Any] | None = None,
    when: Schedule | str | None = None,
    on_error: Literal["record", "raise"] = "record",
    append: bool = False,
    statistics: Level = "full",
    mode: str | None = None,
    weights: bool | None = None,
    budget: int = _BUDGET,
) -> Recording:
    """Record the tapped points of `model` until the block ends: in memory, or in the run that `to` names.

    `taps` is a pattern (`"model.layers.*"`), a list of them, a mapping alias -> pattern, or `Tap`s with wishes of their
    own. `keep` is `"tensor"` (the default in memory), `"both"` (the default on disk), `"summary"`, or a function of a
    tensor whose result is kept instead. `when` is a schedule (`every(100) | first(3)`, or its text). What cannot be
    recorded is listed under `missing` and the model's run goes on; `on_error="raise"` raises at the end of the block.
    If forwards ran and no tap that was due saw anything, the end of the block always raises. `weights` asks for the
    fingerprints of the model's parameters (by default for runs on disk of models up to 8 GiB); `budget` bounds the
    bytes that wait for the disk.
    """
    return Recording(
        model,
        taps,
        to=to,
        keep=keep,
        when=when,
        on_error=on_error,
        append=append,
        statistics=statistics,
        mode=mode,
        weights=weights,
        budget=budget,
    )


@dataclass(slots=True, eq=False)
class _Step(Step):
    """A step with the taps that are due in it, and the tensors already looked at."""

    due: tuple[bool, ...] = ()
    looks: dict[int, _Look] = field(default_factory=dict)


@dataclass(slots=True)
class _Look:
    """What was taken of one tensor; it holds for the same object at the same version, and no longer."""

    ref: weakref.ref[torch.Tensor]
    version: int
    copy: Callable[[], torch.Tensor] | None = None
    summary: Summary | Callable[[], Summary] | None = None
    level: Level | None = None


class Recording:
    """What `record` returns. Inside the block it listens; after it, it reads back.

    `rec["model.layers.3"]` is a tensor, `rec.run` everything that was recorded, `rec.completeness` what is missing,
    `rec.model` what to call. In memory, points that saw one and the same tensor share one copy of it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        taps: Any,
        *,
        to: str | os.PathLike[str] | None,
        keep: Keep | Callable[[torch.Tensor], Any] | None,
        when: Schedule | str | None,
        on_error: Literal["record", "raise"],
        append: bool,
        statistics: Level,
        mode: str | None,
        weights: bool | None,
        budget: int,
    ) -> None:
        if on_error not in ("record", "raise"):
            raise ValueError(f"on_error={on_error!r} is not known; use 'record' or 'raise'.")
        if append and to is None:
            raise ValueError("append=True needs `to=`: a recording in memory has nothing to append to.")
        find(model)
        self.model = model
        self.to = to
        self._on_error = on_error
        self._append = append
        self._budget = budget
        self._statistics = statistics
        self._mode = mode
        self._fingerprints = weights
        self._modules = eager.modules_of(model)
        self._plan = self._planned(taps, keep, when, statistics)
        self._ops_seen: set[str] = set()
        self._lock = threading.Lock()
        self._recorded: Counter[Point] = Counter()
        self._passed: set[Point] = set()  # seen, and not wanted
        self._empty: dict[Point, str] = {}
        self._failures: dict[Point, str] = {}
        self._called: set[str] = set()
        self._due_ever = [False] * len(self._plan.taps)
        self._forwards = self._failed_forwards = self._repeats = 0
        self._named: _Step | None = None
        self._pending: list[Callable[[], None]] = []
        self._arena = Arena()
        self._pool = Pool(budget)
        self._devices = Statistics()
        self._clock = Clock()
        self._memory: MemoryRun | None = None
        self._writer: Writer | None = None
        self._stack = ExitStack()
        self.completeness: Completeness | None = None

    # The block ----------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        rank = ranks.rank()
        manifest = self._manifest()
        if self.to is None:
            self._memory = MemoryRun(manifest)
            self._clock = Clock(rank=rank)
        else:
            self._writer = Writer(self.to, manifest, rank=rank, append=self._append, budget=self._budget)
            self._clock = Clock(rank=rank, step=self._writer.next_step)
        ops = self._op_named if any(self._plan.ops) else None
        try:
            self._stack.enter_context(eager.watch(self.model, self._plan.sides, self, ops=ops))
        except BaseException:
            self._finish()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.close()
        finally:
            done = self._finish()
        if error is not None:
            return
        due = any(self._due_ever) or not self._plan.taps
        if self._forwards and due and not self._recorded:
            raise NothingRecorded(
                f"{self._forwards} forward{'s' if self._forwards > 1 else ''} ran and no tap saw a tensor: "
                f"{_listed(done.missing)}. `layerscope points MODEL` lists what can be tapped."
            )
        if self._on_error == "raise" and (done.missing or done.dropped):
            raise Incomplete(f"not everything asked for was recorded: {_listed([*done.missing, *done.dropped])}.")

    def moment(self, *, epoch: int | None = None, step: int | None = None, batch: int | None = None) -> None:
        """Name the moment of the forwards to come.

        With `epoch` alone, steps and batches go on counting by themselves. With `batch` or `step`, every forward belongs
        to it until the next call of `moment`.
        """
        self._clock.set(epoch=epoch, step=step, batch=batch)

    def flush(self) -> None:
        """Wait until everything recorded so far is safe: on disk and acknowledged, or arrived in memory."""
        if self._writer is not None:
            self._writer.flush()
        else:
            self._settle()

    # Reading back -------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.run.tensor(name)

    @property
    def run(self) -> Run | MemoryRun:
        """What has been recorded so far, with the verbs of an opened run."""
        if self._memory is None and self._writer is None:
            raise RuntimeError("nothing is recorded before the block begins: `with record(...) as rec:`.")
        self.flush()
        return self._memory if self.to is None else open_run(self.to)  # type: ignore[return-value]

    # What the runtime tells (the sink) ----------------------------------------------------------

    def begin(self) -> Step:
        """Start a step, or go on with the one the caller has named."""
        moment = self._clock.begin()
        with self._lock:
            self._forwards += 1
            if self._named is not None and self._named.moment is moment:
                return self._named
            due = self._plan.due(moment)
            for i, on in enumerate(due):
                self._due_ever[i] |= on
            step = _Step(moment, idle=not any(due), due=due)
            self._named = step
            return step

    def end(self, step: Step, *, failed: bool) -> None:
        """Forget the tensors of the step; they are the model's again."""
        assert isinstance(step, _Step)
        step.looks.clear()
        self._devices.fetch()
        with self._lock:
            self._called.update(step.calls)
            self._failed_forwards += failed

    def seen(
        self,
        step: Step,
        point: Point,
        tensor: torch.Tensor,
        *,
        call: int,
        note: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what the taps that are due want of this tensor."""
        assert isinstance(step, _Step)
        wish = self._plan.wish(step.due, point)
        if not wish:
            self._passed.add(point)
            return
        when = step.moment
        moment = Moment(when.epoch, when.step, when.batch, call, when.rank)
        try:
            if _overridden():
                with undisturbed():
                    self._keep(step, point, moment, tensor, wish, note)
            else:
                self._keep(step, point, moment, tensor, wish, note)
        except Exception as error:
            self.failed(point, error)

    def empty(self, point: Point, *, because: str) -> None:
        """Remember why a side that was asked for has no record."""
        self._empty.setdefault(point, because)

    def recomputed(self, name: str) -> None:
        """Count a repeated call."""
        with self._lock:
            self._repeats += 1

    def failed(self, point: Point, error: Exception) -> None:
        """List a failure under `missing`, and say it once; the model's run goes on."""
        with self._lock:
            first = point not in self._failures
            self._failures.setdefault(point, f"{type(error).__name__}: {error}")
        if first:
            _log.warning("%s is not recorded: %s: %s", point, type(error).__name__, error)

    # Keeping ------------------------------------------------------------------------------------

    def _keep(
        self,
        step: _Step,
        point: Point,
        moment: Moment,
        tensor: torch.Tensor,
        wish: Wish,
        note: Mapping[str, str] | None,
    ) -> None:
        if wish.function is not None:
            tensor = _as_result(wish.function(tensor.detach()))
            wish = Wish(True, wish.summary, wish.level)
        values, said = plain(tensor)
        look = _look(step, tensor)
        whole: dict[str, str] = {**(note or {}), **said}
        if self._writer is not None:
            self._write(point, moment, values, look, wish, whole)
        else:
            self._remember(point, moment, values, look, wish, whole)
        with self._lock:
            self._recorded[point] += 1

    def _write(
        self, point: Point, moment: Moment, values: torch.Tensor, look: _Look, wish: Wish, note: dict[str, str]
    ) -> None:
        assert self._writer is not None
        blob = None
        if wish.tensor:
            lease = self._pool.copy(values)
            blob = Blob(dtype_name(values.dtype), tuple(values.shape), values.nbytes, lease.data, lease.release)
        self._writer.write(point, moment, blob=blob, summary=self._summary(look, values, wish), note=note)

    def _remember(
        self, point: Point, moment: Moment, values: torch.Tensor, look: _Look, wish: Wish, note: dict[str, str]
    ) -> None:
        run = self._memory
        assert run is not None
        summary = self._summary(look, values, wish)
        if wish.tensor and look.copy is None:
            look.copy = self._arena.copy(values)
        copy = look.copy if wish.tensor else None

        def settle() -> None:
            kept = None if copy is None else copy()
            run.add(point, moment, tensor=kept, summary=summary() if callable(summary) else summary, note=note)

        self._pending.append(settle)

    def _summary(self, look: _Look, values: torch.Tensor, wish: Wish) -> Summary | Callable[[], Summary] | None:
        """Return the statistics, taken once per tensor; on an accelerator they are only started here."""
        if not wish.summary:
            return None
        if look.summary is None or (wish.level == "full" and look.level != "full"):
            start = summarize if values.device.type == "cpu" else self._devices.of
            look.summary, look.level = start(values, level=wish.level), wish.level
        return look.summary

    def _settle(self) -> None:
        """Move what waits into the run in memory; copies from a device have then arrived."""
        with self._lock:
            pending, self._pending = self._pending, []
        for settle in pending:
            settle()

    # The end ------------------------------------------------------------------------------------

    def _finish(self) -> Completeness:
        if self.completeness is None:
            home = self._writer or self._memory
            assert home is not None
            self._settle()
            self.completeness = home.close(
                forwards=self._forwards,
                points=len(self._plan.expected) + sum(map(len, self._plan.ops)),
                recomputed=self._repeats,
                missing=self._missing(),
            )
        return self.completeness

    def _missing(self) -> list[Missing]:
        fired = {(p.name, p.side, p.leaf[:n]) for p in self._recorded for n in range(len(p.leaf) + 1) if not p.op}
        missing = [
            Missing(str(p), self._reason(p)) for p in self._plan.expected if (p.name, p.side, p.leaf) not in fired
        ]
        missing += [
            Missing(str(p), reason) for p, reason in self._failures.items() if (p.name, p.side, p.leaf) in fired
        ]
        for ops in self._plan.ops:
            for pattern in ops:
                if not any(pattern.matches_op(op) for op in self._ops_seen):
                    missing.append(Missing(str(pattern), self._no_such_op(str(pattern))))
        return missing

    def _reason(self, point: Point) -> str:
        for failed, reason in self._failures.items():
            if (failed.name, failed.side) == (point.name, point.side):
                return reason
        if not self._forwards:
            return "no forward ran while recording"
        taps = [i for i, points in enumerate(self._plan.points) if point in points]
        if not any(self._due_ever[i] for i in taps):
            return f"its schedule was never due in {self._forwards} forwards"
        if point.name not in self._called:
            return eager.why_silent(self.model, point.name)
        if point.side.startswith("grad"):
            return "no gradient arrived: no backward pass reached it while recording"
        empty = self._empty.get(Point(point.name, point.side))
        if empty is not None:
            return empty
        if point.leaf:
            seen = self._passed | self._recorded.keys()
            there = sorted(str(p) for p in seen if (p.name, p.side) == (point.name, point.side))
            return f"it has no such leaf; there is {', '.join(there) or 'none'}"
        return "its forward did not finish"

    def _no_such_op(self, pattern: str) -> str:
        names = sorted({op_name(op) for op in self._ops_seen})
        near = difflib.get_close_matches(pattern.removeprefix("op:"), names, n=3, cutoff=0.3)
        ran = f"; nearest of the {len(names)} that did: {', '.join(near)}" if near else ""
        return f"no such operation ran in the forward{ran}"

    # The beginning ------------------------------------------------------------------------------

    def _planned(self, taps: Any, keep: Any, when: Schedule | str | None, statistics: Level) -> Plan:
        wanted = taps_of(taps)
        schedule = Schedule.parse(when) if isinstance(when, str) else when
        return plan(
            wanted,
            eager.points(self.model),
            self._modules.shared,
            default=_default(keep, statistics, on_disk=self.to is not None),
            when=schedule,
        )

    def _op_named(self, qualified: str) -> str | None:
        self._ops_seen.add(qualified)
        return self._plan.op_named(qualified)

    def _manifest(self) -> Manifest:
        model = self.model
        parameters = list(model.parameters())
        weights, why_not = self._weights()
        kind = type(model)
        settings: dict[str, Any] = {"statistics": self._statistics, "kernels": backend()}
        if why_not:
            settings["weights"] = why_not
        return Manifest(
            model={
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "parameters": sum(p.numel() for p in parameters),
            },
            mode=self._mode,
            runtime="eager",
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
            device=str(parameters[0].device) if parameters else "cpu",
            seed=torch.initial_seed(),
            weights=weights,
            taps=[str(tap) for tap in self._plan.taps],
            aliases=self._plan.aliases,
            shared=dict(self._modules.shared),
            settings=settings,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def _weights(self) -> tuple[dict[str, str], str | None]:
        """Fingerprint each module's own parameters and buffers, so that runs can tell whose weights differ."""
        if self._fingerprints is False or (self._fingerprints is None and self.to is None):
            return {}, "not asked for"
        size = sum(t.nbytes for t in self.model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor))
        if self._fingerprints is None and size > _WEIGHTS:
            return {}, f"not fingerprinted: {size >> 30} GiB of parameters; ask with weights=True"
        found: dict[str, str] = {}
        with undisturbed():
            for name, module in self._modules.by_name.items():
                own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
                if own:
                    found[name] = _fingerprint(own)
        return found, None


def _default(keep: Any, statistics: Level, *, on_disk: bool) -> Wish:
    if statistics not in ("full", "moments"):
        raise ValueError(f"statistics={statistics!r} is not known; use 'full' or 'moments'.")
    if callable(keep):
        return Wish(summary=on_disk, level=statistics, function=keep)
    keep = keep or ("both" if on_disk else "tensor")
    if keep not in ("tensor", "summary", "both"):
        raise ValueError(f"keep={keep!r} is not known; use 'tensor', 'summary', 'both' or a function of a tensor.")
    return Wish(keep in ("tensor", "both"), keep in ("summary", "both"), statistics)


def _overridden() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch.is_inference_mode_enabled()
    )


def _look(step: _Step, tensor: torch.Tensor) -> _Look:
    """Return what was already taken of this very tensor, or an empty look.

    An output that is the next module's input is one object, and its version tells whether it was changed in between.
    Inference tensors have no version, so each sight of one counts.
    """
    if tensor.is_inference():
        return _Look(weakref.ref(tensor), -1)
    known = step.looks.get(id(tensor))
    if known is not None and known.ref() is tensor and known.version == tensor._version:
        return known
    look = step.looks[id(tensor)] = _Look(weakref.ref(tensor), tensor._version)
    return look


def _as_result(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _fingerprint(own: list[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in own:
        values, _ = plain(tensor)
        digest.update(f"{name}={fingerprint(values.cpu())};".encode())
    return digest.hexdigest()


def _listed(problems: list[Any]) -> str:
    shown = "; ".join(f"{p.point}: {p.reason}" for p in problems[:5])
    return f"{shown}; and {len(problems) - 5} more" if len(problems) > 5 else shown
