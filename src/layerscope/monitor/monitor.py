"""Keep the outputs of chosen layers at chosen epochs and batches while a model trains.

    monitor = Monitor(model, {"encoder.attn": {"alias": "attention"}}, [1, 5], "monitor_outputs", batch_indices=[0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    model(x)
    monitor.get_single_data()["attention"]["data"][(1, 0)]
    monitor.save_single_outputs()
    monitor.remove_hooks()

A front end on `layerscope.record`: everything captured is also in the native run `output_dir/run`, as it comes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from layerscope import ranks
from layerscope.errors import LayerscopeError, NoSuchPoint, NotARun, RunBusy, RunExists
from layerscope.monitor.captures import CapturedOutput, shape_of
from layerscope.monitor.config import Config, settings_in
from layerscope.monitor.gathering import Gathered
from layerscope.monitor.item_writer import ItemWriter
from layerscope.monitor.items import Format, Outputs, own_path, write_custom
from layerscope.monitor.layers import Layer, LayerChoice, RecordType, choices_of, layers_of, whole_numbers
from layerscope.monitor.leaving import leave_on_sigterm
from layerscope.monitor.loaders import Followed
from layerscope.monitor.stored import Stored
from layerscope.points import Point
from layerscope.recorder import Recording, RecordOptions, Tap, record
from layerscope.schedules import Schedule
from layerscope.store import Run
from layerscope.store.address import rank_folder
from layerscope.store.losses import Losses

_BUDGET = 1 << 30
_MOST_RUNS = 10_000
# When the process has been told to go: seconds for saving, and what a slow disk takes in one of them.
_LAST_SECONDS = 3.5
_SLOW_DISK = 100 << 20
_TOLD_TO_GO = (KeyboardInterrupt, SystemExit)

Words = Iterable[str] | str | None


class Driver(Protocol):
    """The one that says where training is, in the caller's place: see `MonitoredTrainer`."""

    def forward(self) -> str | None:
        """Set epoch and batch for the forward that begins; return why it does not count, None when it does."""

    def told(self, *, epoch: bool) -> None:
        """Hear that the epoch, or else the batch, has been set."""


class Monitor:
    """Captures the outputs of layers, hands them out as copies, and saves them as numbered items.

    `layers_to_monitor` is a list of layer names (as in `model.named_modules()`; patterns work too) or a dict
    `{layer: {"alias": ..., "record_type": "single" | "epoch_full"}}`. A `single` layer is kept at `epochs_to_record` in
    the batches of `batch_indices`, an `epoch_full` layer in every batch of those epochs. `when` is a schedule on top of
    both. At most `budget` bytes are held in memory, half of them waiting for the disk: what does not fit is read back
    from the run. `format` is that of the saved items.

    A subclass may have a method `_custom_condition(output)`: outputs of which it says False are not captured; the run
    in `output_dir` has them. What raises in it is said, and the output is not captured.

    Nothing here stops a training run: what cannot be kept or saved is said in the log `layerscope`, which at DEBUG
    tells each capture, and each skip with its reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers_to_monitor: Any,
        epochs_to_record: Iterable[int],
        output_dir: str | os.PathLike[str],
        batch_indices: Iterable[int] | None = None,
        *,
        when: Schedule | str | None = None,
        budget: int = _BUDGET,
        format: Format = "pt",
    ) -> None:
        """Put the hooks in place; raises ValueError for what cannot be asked, OSError for a folder that is no good."""
        _check_format(format)
        _refuse_hooks(type(self))
        self.model = model
        self.layers = layers_of(model, layers_to_monitor)
        self.epochs_to_record = whole_numbers("epochs_to_record", epochs_to_record)
        self.batch_indices = whole_numbers("batch_indices", () if batch_indices is None else batch_indices)
        choices = choices_of(self.layers, self.epochs_to_record, self.batch_indices, when)
        self.output_dir = Path(output_dir).absolute()  # a program may change its folder in between
        self.current_epoch: int | None = None
        self.current_batch_idx: int | None = None
        self._paused: str | None = None
        self._trained = False  # whether the model was called in training mode since the moment was set
        self._driver: Driver | None = None
        self._pid = os.getpid()
        self._losses = Losses(str(self.output_dir))
        room = budget // 2
        self._gathered = Gathered(
            self.layers, choices, room=room, begins=self._begins, losses=self._losses, keeps=self._keeps
        )
        self._recording, path = self._begun(choices, budget=budget - room)
        self._stored = Stored(self._recording, path, self._losses)
        folder = self.output_dir / rank_folder(ranks.rank()) if ranks.rank() else self.output_dir
        self._writer = ItemWriter(folder, self._stored, format=format, losses=self._losses)
        self._closed = False
        self._release = leave_on_sigterm()
        _watch()
        _LIVE.add(self)

    @classmethod
    def from_config(
        cls, model: torch.nn.Module, config: Config, output_dir: str | os.PathLike[str], **settings: Any
    ) -> Monitor:
        """Make a Monitor from `monitor_layers`, `monitor_epochs` and `monitor_batches` of a dict, JSON file or text.

        `settings` are arguments of the constructor, and come before what the configuration says.
        """
        return cls(model, output_dir=output_dir, **{**settings_in(config), **settings})

    # The moment ---------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: what the previous one left unsaved is saved, and then forgotten here."""
        _refuse_none("epoch", epoch)
        if self._driver is not None:
            self._driver.told(epoch=True)
        self._recording.moment(epoch=epoch)
        self._save(None)
        self.clear_current_epoch_data()
        self.current_epoch, self.current_batch_idx = int(epoch), None
        self._paused, self._trained = None, False

    def set_batch_idx(self, batch_idx: int) -> None:
        """Say which batch the forwards to come belong to."""
        _refuse_none("batch_idx", batch_idx)
        if self._driver is not None:
            self._driver.told(epoch=False)
        if self.current_epoch is not None:
            samples = self._gathered.samples
            note = None if samples is None else {"sample_indices": list(samples)}
            self._recording.moment(epoch=self.current_epoch, batch=batch_idx, note=note)
        self.current_batch_idx = int(batch_idx)
        self._paused, self._trained = None, False

    def create_epoch_callback(self) -> Callable[[int], None]:
        """Return a function of an epoch that sets it."""
        return self.set_epoch

    def create_batch_callback(self) -> Callable[[int], None]:
        """Return a function of a batch index that sets it."""
        return self.set_batch_idx

    def pause(self, because: str = "paused") -> None:
        """Let forwards pass until the next `set_epoch` or `set_batch_idx`: an evaluation in the middle of training."""
        self._paused = because

    def watch_loader(self, loader: Any) -> Followed:
        """Return the loader, to be iterated in its place: the sample indices of each batch are then recorded too."""
        return Followed(loader, _Samples(self))

    def note_samples(self, indices: Iterable[int] | None) -> None:
        """Say which samples are in the batch that is set next; None when they are not known."""
        self._gathered.samples = None if indices is None else tuple(map(int, indices))

    @contextlib.contextmanager
    def driven_by(self, driver: Driver) -> Iterator[None]:
        """Let another say where training is, until the block ends."""
        before, self._driver = self._driver, driver
        try:
            yield
        finally:
            self._driver = before

    def _begins(self) -> str | None:
        """Return why the forward that begins is not recorded, None when it is."""
        why = (self._driver.forward() if self._driver is not None else None) or self._paused
        if why is not None:
            return why
        if self.current_epoch is None:
            self._losses.say("a forward ran before set_epoch() and is not recorded; call set_epoch(epoch) first")
            return "no epoch is set"
        if self._trained and not self.model.training:
            self._losses.say(
                "a forward in evaluation mode, after training forwards of the batch that is set, is not taken for that "
                "batch's and not recorded; set_batch_idx() before it records it"
            )
            return "the model is in evaluation mode, and the batch that is set was trained on"
        self._trained = self.model.training
        return None

    def _keeps(self, output: object) -> bool:
        """Ask the condition of a subclass, or of this Monitor since it was made, whether to capture an output."""
        condition = getattr(self, "_custom_condition", None)
        return condition is None or bool(condition(output))

    # Handing out ----------------------------------------------------------------------------------

    def get_single_data(self, layers: Words = None) -> dict[str, dict[str, Any]]:
        """Return what was captured of `single` layers: `{alias: {"layer", "alias", "output_shape", "data"}}`.

        `data` maps (epoch, batch index) to the output, a fresh copy at each access. `layers` are aliases or names;
        those of which nothing was captured are left out.
        """
        return self._given("single", layers)

    def get_epoch_data(self, layers: Words = None) -> dict[str, dict[str, Any]]:
        """Return what was captured of `epoch_full` layers, in the form of `get_single_data`."""
        return self._given("epoch_full", layers)

    @property
    def single_data(self) -> dict[str, dict[str, Any]]:
        """What `get_single_data` returns of all layers."""
        return self.get_single_data()

    @property
    def epoch_data(self) -> dict[str, dict[str, Any]]:
        """What `get_epoch_data` returns of all layers."""
        return self.get_epoch_data()

    def get_single_outputs(self) -> dict[str, list[Any]]:
        """Return the outputs of each `single` layer, in the order they came."""
        return {alias: list(info["data"].values()) for alias, info in self.get_single_data().items()}

    def get_epoch_buffers(self) -> dict[str, list[Any]]:
        """Return the outputs of each `epoch_full` layer, in the order they came."""
        return {alias: list(info["data"].values()) for alias, info in self.get_epoch_data().items()}

    @property
    def sample_indices(self) -> dict[tuple[int, int], list[int]]:
        """The indices of the samples in each captured batch, where a loader's sampler gave them."""
        captures = [capture for layer in self.layers for capture in self._gathered.of(layer)]
        return {each.key: list(each.samples) for each in captures if each.samples is not None}

    @property
    def run(self) -> Run:
        """Everything captured so far, every epoch and every call, as a run to read."""
        return self._stored.run

    def _given(self, record_type: RecordType, words: Words) -> dict[str, dict[str, Any]]:
        given = {}
        for layer in self._chosen(words, record_type):
            captures = self._stored.readable(layer, self._gathered.of(layer))
            if captures:
                given[layer.alias] = {
                    "layer": layer.name,
                    "alias": layer.alias,
                    "output_shape": shape_of(captures[-1].tree),
                    "data": Outputs(captures, self._stored.fetch),
                }
        return given

    def _chosen(self, words: Words, *record_types: RecordType) -> list[Layer]:
        asked = None if words is None else [words] if isinstance(words, str) else list(words)
        for word in asked or ():
            if not any(layer.answers_to([word]) for layer in self.layers):
                there = ", ".join(layer.alias for layer in self.layers)
                self._losses.say(f"{word!r} is not monitored; there is {there}")
        ours = [layer for layer in self.layers if layer.record_type in record_types]
        return ours if asked is None else [layer for layer in ours if layer.answers_to(asked)]

    # Saving and forgetting --------------------------------------------------------------------------

    def save_single_outputs(self, layers: Words = None, *, format: Format | None = None) -> list[Path]:
        """Save what was captured of `single` layers and is not saved yet, an item for each batch; return the files.

        `format` is the Monitor's own unless one is named: `"pt"` or `"npy"`.
        """
        return self._save(layers, "single", format=format)

    def save_epoch_outputs(self, layers: Words = None, *, format: Format | None = None) -> list[Path]:
        """Save each `epoch_full` layer's epoch so far as one item, its batches joined along dimension 0."""
        return self._save(layers, "epoch_full", format=format)

    def save_custom_output(self, obj: Any, name: str) -> Path | None:
        """Write tensors, arrays or plain containers of them to `output_dir/name`; None when the disk refuses.

        Raises ValueError for a name that leaves the folder, and TypeError for objects that only pickle could save.
        """
        path = own_path(self._writer.folder, name, taken=self._stored.path)
        try:
            write_custom(path, obj)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
            self._losses.say(f"{name} could not be saved: {error}")
            return None
        return path

    def clear_epoch_data(self) -> None:
        """Forget the captures of `epoch_full` layers without saving them; the run keeps them."""
        self._forget("epoch_full")

    def clear_current_epoch_data(self) -> None:
        """Forget every capture without saving it; the run keeps them."""
        self._forget("single", "epoch_full")

    def _forget(self, *record_types: RecordType) -> None:
        layers = self._chosen(None, *record_types)
        self._gathered.forget(layers)
        for layer in layers:
            self._writer.forget(layer)

    def _save(
        self,
        words: Words,
        *record_types: RecordType,
        format: Format | None = None,
        patience: float | None = None,
    ) -> list[Path]:
        """Save what is unsaved, of every type when none is named; what takes longer than `patience` is left."""
        if format is not None:
            _check_format(format)
        until = None if patience is None else time.monotonic() + patience
        written: list[Path] = []
        for layer in self._chosen(words, *(record_types or ("single", "epoch_full"))):
            for group in self._unsaved(layer):
                if until is not None and sum(each.nbytes for each in group) > (until - time.monotonic()) * _SLOW_DISK:
                    self._losses.say(f"no time is left to save {layer.alias}; {self._stored.path} has all of it")
                    continue
                path = self._writer.put(layer, group, format=format)
                if path is not None:
                    written.append(path)
                    self._gathered.saved(layer, group)
        return written

    def _unsaved(self, layer: Layer) -> list[list[CapturedOutput]]:
        """Return the captures that make up each item to be written."""
        unsaved = self._gathered.unsaved(layer)
        captures = self._stored.readable(layer, self._gathered.of(layer)) if unsaved else []
        if layer.record_type == "single":
            return [[capture] for capture in captures if capture.key in unsaved]
        groups: dict[int, list[CapturedOutput]] = {}
        for capture in captures:
            groups.setdefault(capture.epoch, []).append(capture)
        return list(groups.values())

    # The block, and the end -------------------------------------------------------------------------

    def remove_hooks(self) -> None:
        """Take the hooks away and save what is unsaved; once is enough, twice does no harm."""
        self._close(sys.exc_info()[1])

    def leave_sigterm_alone(self) -> None:
        """Let SIGTERM do what it did before: for training loops that end in order by themselves when it comes."""
        self._release()

    def __enter__(self) -> Monitor:
        if self._closed:
            self._losses.say("the hooks were removed, and nothing more is recorded; make another Monitor")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def __del__(self) -> None:
        """Save what is unsaved of a Monitor that goes together with its model.

        In a thread of its own: the garbage collector can come by anywhere, in the middle of our writer too.
        """
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # the interpreter is at its end
                threading.Thread(target=self._close, args=(None,), name="layerscope-saving").start()

    def _close(self, because: BaseException | None) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _LIVE.discard(self)
        try:
            self._end(hurry=isinstance(because, _TOLD_TO_GO))
        except _TOLD_TO_GO:  # in the middle of it
            self._end(hurry=True)
            raise
        finally:
            self._release()

    def _end(self, *, hurry: bool) -> None:
        try:
            self._recording.__exit__(None, None, None)
        except LayerscopeError as error:  # nothing was recorded: a reason to say so, none to stop
            self._losses.say(str(error))
        self._save(None, patience=_LAST_SECONDS if hurry else None)

    def _begun(self, choices: dict[str, LayerChoice], *, budget: int) -> tuple[Recording, Path]:
        """Begin to record into a run of its own: `run`, or the next that is not there yet."""
        taps = [Tap(str(Point(each.place)), when=choices[each.alias], alias=each.alias) for each in self.layers]
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            for number in range(1, _MOST_RUNS):
                path = self.output_dir / ("run" if number == 1 else f"run-{number:03d}")
                if (path / rank_folder(ranks.rank())).exists():
                    continue
                recording = record(
                    self.model,
                    taps,
                    to=path,
                    statistics="moments",
                    options=RecordOptions(weights=False, budget=budget, listener=self._gathered, owned=True),
                )
                with contextlib.suppress(RunExists, RunBusy, NotARun):
                    return recording.__enter__(), path
        except NoSuchPoint as error:
            raise ValueError(str(error)) from error
        except OSError as error:
            why = f"output_dir cannot be written ({error.strerror or error}); give another"
            raise OSError(error.errno, why, str(self.output_dir)) from error
        raise FileExistsError(f"{self.output_dir} holds {_MOST_RUNS} runs; give another output_dir.")


def _refuse_hooks(kind: type) -> None:
    if hasattr(kind, "_hook_fn"):
        raise TypeError(
            f"{kind.__name__} has a _hook_fn of its own, and the Monitor's hooks are not made by one: it would never "
            "be called. Write a method _custom_condition(self, output) that says what to capture, or use when=."
        )


def _refuse_none(word: str, number: int | None) -> None:
    if number is None:
        raise ValueError(f"{word}=None is not a moment; give a whole number from 0 on.")


def _check_format(format: str) -> None:
    if format not in ("pt", "npy"):
        raise ValueError(f"format={format!r} is not known; use 'pt' or 'npy'.")


class _Samples:
    """A loader's follower that passes on which samples are in a batch."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def yielded(self, under_way: Any) -> None:
        self._monitor.note_samples(under_way.samples)

    def over(self, ended: Any) -> None:
        self._monitor.note_samples(None)


# Every process's Monitors -------------------------------------------------------------------------------

_LIVE: weakref.WeakSet[Monitor] = weakref.WeakSet()


@cache
def _watch() -> None:
    """Arrange, once, that an ordinary end of the process saves what is unsaved, before the writers close."""
    atexit.register(_close_all)


def _close_all() -> None:
    for monitor in list(_LIVE):
        monitor._close(SystemExit())
