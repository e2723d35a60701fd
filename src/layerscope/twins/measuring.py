"""Measure a run's floors: replay its first step on twins of the model, and hold each against what was recorded.

    floors = measure_floors(model, inputs, run)      # adds them to the run as well

First an unmoved replay must give what was recorded: a model whose state has moved on has no twins. Then one twin after
the other; of each value six numbers are kept, and the twin's value is let go.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from layerscope.checks import ErrorNumbers, largest_of, mask_of, numbers_of, rows_kept
from layerscope.checks.check import Check, check_of
from layerscope.errors import LayerscopeError, Unsupported
from layerscope.points import Moment, Point
from layerscope.progress import Progress, no_progress
from layerscope.runtimes import opened as read_model
from layerscope.runtimes.eager import modules_of, watch, weights
from layerscope.runtimes.sink import Step
from layerscope.runtimes.snapshot import restored
from layerscope.stats import fingerprint
from layerscope.store import MemoryRun, Run, open_run
from layerscope.store.floors import Checked, Fed, Floors, write_floors
from layerscope.twins.begun import Begun, why_not
from layerscope.twins.twin import EPSILON, Twin, moving, run, twins_of

Key: TypeAlias = "tuple[str, int]"  # a point's text and a call

_NEARLY = 1e-3  # a replay this near is the same computation; compiled ones fuse what eager does not
_OUTLYING = 30.0  # a twin that many times off its peers says nothing about rounding
_FEWEST = 0.1  # of the rows, that must be left when choices went elsewhere
_CHOICES = 64  # the widest last axis of choices


def measure_floors(
    model: Any,
    inputs: Any,
    run: Run | str | os.PathLike[str],
    *,
    weights: bool = True,
    progress: Progress | None = None,
) -> Floors:
    """Measure the floors of a finished run and add them to it; `inputs` are those of its first step.

    Exported programs and TorchScript, or the path of one, have floors of their own arithmetic alone: their operations
    are moved one by one.

    `inputs` is a dict (kwargs), a tuple (args) or one tensor. `weights=False` leaves out check rows and kept
    parameters. Raises Unsupported, with the reason, where no twin of the model can stand for it.
    """
    opened = run if isinstance(run, Run) else open_run(run)
    args = (inputs,) if isinstance(inputs, torch.Tensor) else inputs if isinstance(inputs, (tuple, list)) else ()
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        from layerscope.twins.programs import measure_program

        floors = measure_program(read_model(model), tuple(args), kwargs, opened, progress)
    else:
        begun = Begun(model)
        begun.take(tuple(args), kwargs)
        floors = measure(begun, opened, weights=weights, progress=progress)
    if not floors.points:
        raise Unsupported(f"the floors of {opened.address} were not measured: {'; '.join(floors.left_out)}.")
    keep(opened, floors)
    return floors


def keep(opened: Run, floors: Floors) -> None:
    """Put floors where a run's readers look for them."""
    if opened.layout != "layerscope":
        raise Unsupported(f"{opened.address} is another tool's dump; floors are kept in runs of layerscope's own.")
    if not isinstance(opened, MemoryRun):
        write_floors(opened.path, floors)
    opened._floors = floors


def measure(begun: Begun, opened: Run, *, weights: bool = True, progress: Progress | None = None) -> Floors:
    """Measure the floors of a run on the inputs of its first step; what cannot be measured stands in `left_out`."""
    started = opened.manifest.started
    why = begun.failed or ("" if begun.random else "no forward ran") or why_not(begun.model)
    moment = next(iter(opened.moments), None)
    if moment is None:
        why = why or "the run has no records"
    if why:
        return Floors(left_out=(why,), started=started)
    assert moment is not None
    with torch.random.fork_rng(enabled=False), restored(begun.model):
        return Measuring(begun, opened, moment, weights=weights, progress=progress or no_progress).floors()


class Measuring:
    """What is known while the twins of one model run."""

    def __init__(self, begun: Begun, opened: Run, moment: Moment, *, weights: bool, progress: Progress) -> None:
        self.begun, self.opened, self.moment, self.weights, self.progress = begun, opened, moment, weights, progress
        records = opened.records(epoch=moment.epoch, step=moment.step, batch=moment.batch, rank=moment.rank)
        self.entries = {(str(e.point), e.moment.call): e for e in records if e.dtype is not None and not e.point.op}
        self.modules = modules_of(begun.model).by_name
        self.tokens = mask_of(begun.kwargs)
        self.points = list(
            dict.fromkeys(name for name, _ in self.entries if not name.partition(":")[2].startswith("grad"))
        )
        self.axes = {text: self._axis(text) for text in self.points}
        self.left_out: list[str] = []
        if any(":grad" in name for name, _ in self.entries):
            self.left_out.append("gradients, which have no floors yet")

    def _axis(self, text: str) -> int:
        """Return which axis holds the channels: 1 of images, else the last."""
        shape = next(e.shape or () for (name, _), e in self.entries.items() if name == text)
        module = self.modules.get(Point.parse(text).name)
        convolving = (nn.Conv1d, nn.BatchNorm1d, nn.GroupNorm)
        if len(shape) == 3 and isinstance(module, convolving):
            return 1
        widths = {w for m in self.modules.values() if isinstance(m, (nn.Conv2d, nn.Conv3d)) for w in m.weight.shape[:2]}
        return 1 if len(shape) >= 4 and shape[1] in widths and not isinstance(module, nn.Linear) else -1

    def floors(self) -> Floors:
        """Run them all."""
        arithmetic = self._arithmetic()
        if not self.points:
            return self._made(arithmetic, {}, {}, (), "the first step has no tensors, only statistics")
        twins = twins_of(arithmetic)
        total = len(twins) + 1
        self.progress("replaying the first step", 0, total)
        replay = Replay(self, follow=True)
        replay.run(Twin("replay", arithmetic))
        off = sorted(n.relative_l2 for n in replay.numbers.values() if not math.isnan(n.relative_l2))
        near = max(_NEARLY, 4 * EPSILON[arithmetic])
        if not off or replay.unlike or off[len(off) // 2] > near:
            what = replay.unlike or (f"off by {off[len(off) // 2]:.3g}" if off else "without the points of the run")
            why = f"a replay of the first step is not what was recorded ({what}): the model has state, or other inputs"
            return self._made(arithmetic, {}, {}, (), why)
        numbers: dict[str, dict[str, dict[str, ErrorNumbers]]] = {}
        if off[-1] > 0:
            numbers[arithmetic] = {"replay": replay.numbers}
        residuals = {name: {arithmetic: [own]} for name, own in replay.residuals.items()}
        for done, twin in enumerate(twins, 1):
            self.progress(f"twin in {twin.arithmetic}: {twin.name}", done, total)
            why = self._no_room(twin)
            found = Replay(self, checks=replay.checks if twin.dtype is not None else {})
            if not why:
                why = found.run(twin)
            if why:
                self.left_out.append(f"the twin {twin.name} of {twin.arithmetic}: {why}")
                continue
            numbers.setdefault(twin.arithmetic, {})[twin.name] = found.numbers
            if str(twin.dtype).removeprefix("torch.") == twin.arithmetic:
                for name, own in found.residuals.items():
                    residuals[name].setdefault(twin.arithmetic, []).append(own)
        self._drop_outlying(numbers)
        self.progress("done", total, total)
        return self._made(arithmetic, numbers, residuals, tuple(replay.fed), "", replay.checks)

    def _arithmetic(self) -> str:
        """Return the coarsest class among the model's parameters and the dtype it casts to by itself."""
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self.begun.model.parameters()}
        if self.begun.autocast is not None:
            dtypes.add(str(self.begun.autocast).removeprefix("torch."))
        known = [name for name in EPSILON if name in dtypes]
        return known[-1] if known else "float32"

    def _made(
        self,
        arithmetic: str,
        numbers: Mapping[str, Mapping[str, Mapping[str, ErrorNumbers]]],
        residuals: Mapping[str, Mapping[str, list[float]]],
        fed: tuple[Fed, ...],
        why: str,
        checks: Mapping[str, Check] | None = None,
    ) -> Floors:
        if why:
            self.left_out.append(why)
        points = tuple(self.points) if numbers else ()
        first = {name: e.shape or () for (name, _), e in reversed(self.entries.items())}
        checked = {}
        if self.weights:
            for name, check in (checks or {}).items():
                own = {
                    k: max(v for v in several if not math.isnan(v))
                    for k, several in residuals[name].items()
                    if any(not math.isnan(v) for v in several)
                }
                checked[name] = Checked(check, own)
        elif checks:
            self.left_out.append("check rows and kept parameters, as asked")
        m = self.moment
        return Floors(
            points,
            tuple(first[p] for p in points),
            tuple(self.axes[p] for p in points),
            {c: {t: tuple(of.get(p) for p in points) for t, of in twins.items()} for c, twins in numbers.items()},
            checked,
            fed,
            self.tokens,
            arithmetic,
            (m.epoch, m.step, m.batch, m.rank),
            self._prints() if self.weights and points else {},
            tuple(self.left_out),
            self.opened.manifest.started,
        )

    def _drop_outlying(self, numbers: dict[str, dict[str, dict[str, ErrorNumbers]]]) -> None:
        for name, twins in numbers.items():
            usual = {twin: typical(of.values()) for twin, of in twins.items()}
            for twin in [*twins]:
                peers = [value for other, value in usual.items() if other != twin and value > 0]
                if len(peers) >= 2 and usual[twin] > _OUTLYING * statistics.median(peers):
                    self.left_out.append(
                        f"the twin {twin} of {name}: {usual[twin] / statistics.median(peers):.0f} times off its peers"
                    )
                    del twins[twin]

    def _no_room(self, twin: Twin) -> str:
        """Say why a twin does not fit into memory; None when it does, or its size is not known."""
        size = twin.dtype.itemsize if twin.dtype is not None else None
        need = sum(p.numel() * (size or p.element_size()) for p in self.begun.model.parameters())
        need = need * 3 // 2
        device = next((p.device for p in self.begun.model.parameters()), torch.device("cpu"))
        room = None
        if device.type == "cuda":
            room = torch.cuda.mem_get_info(device)[0]
        elif device.type == "cpu":
            with suppress(OSError, StopIteration, ValueError), Path("/proc/meminfo").open(encoding="ascii") as file:
                room = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
        if room is not None and need > room:
            return f"it needs {need >> 20:,} MiB of parameters, and {room >> 20:,} MiB are free"
        return ""

    def _prints(self) -> dict[str, dict[str, str]]:
        """Return each module's fingerprint as it would be in coarser dtypes, without and with its buffers."""
        found: dict[str, dict[str, str]] = {}
        for name in ("bfloat16", "float16", "bfloat16 throughout", "float16 throughout"):
            whole = name.endswith("throughout")
            dtype = getattr(torch, name.partition(" ")[0])
            own = found[name] = {}
            for module, tensors in weights(self.begun.model).items():
                digest = hashlib.blake2b(digest_size=16)
                with suppress(LayerscopeError, RuntimeError, TypeError):
                    for key, tensor in tensors:
                        cast = tensor.is_floating_point() and (whole or isinstance(tensor, nn.Parameter))
                        value = tensor.detach().to(dtype) if cast else tensor.detach()
                        digest.update(f"{key}={fingerprint(value.cpu())};".encode())
                    own[module] = digest.hexdigest()
        return found


class Replay:
    """A sink that holds each value against the recorded one, and lets it go."""

    def __init__(self, about: Measuring, *, follow: bool = False, checks: Mapping[str, Check] | None = None) -> None:
        self.about, self.follow = about, follow
        self.numbers: dict[str, ErrorNumbers] = {}
        self.checks: dict[str, Check] = dict(checks or {})
        self.residuals: dict[str, float] = {}
        self.fed: list[Fed] = []
        self.unlike = ""
        self._rerouted: dict[int, torch.Tensor] = {}  # by the number of rows
        self._given: dict[Key, torch.Tensor] = {}  # to leaf modules, until they have given something
        self._made: dict[int, tuple[torch.Tensor, Key, int]] = {}  # what passed, by identity, kept alive by itself
        self._error: Exception | None = None

    def run(self, twin: Twin) -> str:
        """Run one twin; returns why it has no numbers, where it has none."""
        about = self.about
        names = {Point.parse(text).name for text in about.points}
        sides: dict[str, Any] = {name: {"input", "output"} for name in names if name in about.modules}
        for buffers in (False, True):
            self.numbers, self._rerouted, self._given, self._error = {}, {}, {}, None
            assert about.begun.random is not None
            about.begun.random.restore()
            try:
                with moving(about.begun.model, twin), watch(about.begun.model, sides, self):
                    run(about.begun, twin, buffers=buffers)
            except LayerscopeError:
                raise
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                if buffers or twin.dtype is None:
                    return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                continue
            finally:
                self._made.clear()
                self._given.clear()
            break
        if self._error is not None:
            return f"{type(self._error).__name__}: {self._error}"
        return "" if self.numbers else "it passed none of the points of the run"

    # The sink -----------------------------------------------------------------------------------

    def begin(self) -> Step:
        """Start the one step there is."""
        return Step(Moment())

    def end(self, step: Step, *, failed: bool) -> None:
        """Nothing is left to do."""

    def empty(self, point: Point, *, because: str) -> None:
        """A side without tensors has no floor."""

    def recomputed(self, name: str) -> None:
        """No backward pass runs."""

    def failed(self, point: Point, error: Exception) -> None:
        """Remember that a value could not be measured."""
        self._error = self._error or error

    def seen(self, step: Step, point: Point, tensor: torch.Tensor, *, call: int, note: object = None) -> None:
        """Measure a value against the recorded one; check its module; note what fed it."""
        value = tensor.detach()
        text = str(point)
        if self.follow:
            self._follow(text, call, tensor, side=point.side)
        self._check(point, call, value)
        entry = self.about.entries.get((text, call))
        if entry is None:
            return
        if tuple(value.shape) != entry.shape:
            self.unlike = self.unlike or f"{text} has shape {list(value.shape)}, recorded {list(entry.shape or ())}"
            return
        recorded = entry.tensor().to(value.device)
        if not value.is_floating_point() and not value.is_complex():
            self._reroute(recorded, value)
            return
        axis = self.about.axes[text]
        kept = rows_kept(self.about.tokens, tuple(value.shape), axis)
        rows = value.numel() // max(1, value.shape[axis] if value.ndim else 1)
        elsewhere = self._rerouted.get(rows) if axis == -1 else None
        if elsewhere is not None:
            stay = ~elsewhere if kept is None else kept & ~elsewhere
            if float(stay.sum()) < _FEWEST * rows:
                return
            kept = stay
        found = numbers_of(recorded, value, axis=axis, kept=None if kept is None else kept.to(value.device))
        before = self.numbers.get(text)
        self.numbers[text] = found if before is None else largest_of([before, found])

    def _reroute(self, recorded: torch.Tensor, value: torch.Tensor) -> None:
        """Note the rows whose choices are others: their values are no measure of rounding."""
        if value.ndim < 2 or not 0 < value.shape[-1] <= _CHOICES or value.dtype == torch.bool:
            return
        one, two = (t.reshape(-1, t.shape[-1]).sort(dim=-1).values for t in (recorded, value))
        other = (one != two).any(-1).cpu()
        if bool(other.any()):
            before = self._rerouted.get(len(other))
            self._rerouted[len(other)] = other if before is None else before | other

    def _follow(self, text: str, call: int, tensor: torch.Tensor, *, side: str) -> None:
        """Note whose output an input is: one and the same tensor, unchanged since."""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._made.get(id(tensor))
        fresh = known is None or known[2] != version
        if side == "input" and tensor.is_floating_point():
            self.fed.append((text, call, *((None, 0) if fresh or known is None else known[1])))
        if fresh:
            self._made[id(tensor)] = (tensor, (text, call), version)

    def _check(self, point: Point, call: int, value: torch.Tensor) -> None:
        """Keep what a module was given until it gives something; then check it."""
        if not self.follow and point.name not in self.checks:
            return
        module = self.about.modules[point.name]
        if module._modules:
            return
        key = (point.name, call)
        if point.side == "input":
            if key not in self._given:
                self._given[key] = value.clone()
            return
        given = self._given.pop(key, None)
        if given is None or point.leaf or point.side != "output":
            return
        if self.follow and point.name not in self.checks:
            made = check_of(module, given, value, name=point.name)
            if made is None:
                return
            self.checks[point.name] = made
        check = self.checks.get(point.name)
        if check is not None:
            found = check.residual(given, value, rows_kept(self.about.tokens, tuple(value.shape)))
            self.residuals[point.name] = max(found, self.residuals.get(point.name, 0.0))


def typical(numbers: Iterable[ErrorNumbers]) -> float:
    """Return the median error over the points that are off at all."""
    errors = [n.relative_l2 for n in numbers if n.relative_l2 > 0]
    return statistics.median(errors) if errors else 0.0
