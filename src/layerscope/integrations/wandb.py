"""Frames in Weights & Biases: scalars, histograms and attention maps, online or offline.

    watch(model, optimizer, sinks=[WandB(project="runs", mode="offline")])
    watch(model, optimizer, sinks=[WandB(run=wandb.run)])     # beside what the caller logs

Every chart has `layerscope/step` for its axis, so that W&B's own step stays the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerscope.errors import MissingExtra
from layerscope.integrations.pictures import picture
from layerscope.integrations.tags import STATISTICS, distributions, known, numbers

if TYPE_CHECKING:
    from layerscope.rules import Alarm, Frame

PARTS, OCTAVES = 8, 6  # of a histogram: about a hundred bins, and W&B takes 512
STEP = "layerscope/step"


class WandB:
    """A sink that logs to a run: the given one, or one of its own that `settings` (those of `wandb.init`) describe.

    In a run of the caller's, a frame waits for the caller's next `log` and travels in its row: rows of ours would move
    W&B's step on, and W&B drops what comes with a step that is past. A later frame replaces one that still waits.
    """

    def __init__(
        self, *, run: Any = None, statistics: Sequence[str] = STATISTICS, histograms: bool = True, **settings: Any
    ) -> None:
        self._statistics = known(statistics)
        self._histograms = histograms
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("WandB takes wandb: pip install 'layerscope[wandb]'") from error
        if run is not None and settings:
            raise ValueError(f"run= is a run already; {', '.join(settings)} would be those of another one.")
        self._wandb: Any = wandb
        self._own = run is None
        self.run: Any = wandb.init(**settings) if run is None else run
        self._groups: set[str] = set()
        self.run.define_metric(STEP, hidden=True)

    def write(self, frame: Frame) -> None:
        """Log a frame."""
        row: dict[str, Any] = dict(numbers(frame, self._statistics))
        if self._histograms:
            for tag, summary in distributions(frame):
                if summary.sketch is not None and summary.finite:
                    edges, counts = summary.histogram(parts=PARTS, octaves=OCTAVES)
                    row[f"histogram/{tag}"] = self._wandb.Histogram(np_histogram=(list(counts), list(edges)))
        for name, attention in frame.images.items():
            row[f"attention/{name}"] = self._wandb.Image(picture(attention))
        self._log(row, frame.moment.step)

    def alarm(self, alarm: Alarm) -> None:
        """Log an alarm, and have W&B tell it where it tells its own."""
        self.run.alert(title=f"{alarm.rule}: {alarm.where}", text=str(alarm))
        self._log({f"alarm/{alarm.rule}": alarm.value}, alarm.moment.step)

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._own:
            self.run.finish()

    def _log(self, row: dict[str, Any], step: int) -> None:
        for group in {key.partition("/")[0] for key in row} - self._groups:
            self.run.define_metric(f"{group}/*", step_metric=STEP)
            self._groups.add(group)
        self.run.log({**row, STEP: step}, commit=self._own)
