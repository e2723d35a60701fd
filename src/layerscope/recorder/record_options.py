"""What few callers of `record` set, in one value.

record(model, taps, options=RecordOptions(weights=False, mode="fp32"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from layerscope.progress import Progress

if TYPE_CHECKING:
    from layerscope.recorder.recording_sink import Listener


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What a run says of its model, what a compiler may change, and who follows the recording.

    `name`, `mode` and `settings` (plain values) are what the run says of its model and of how it ran. `weights` asks
    for the fingerprints of the model's parameters (by default for runs on disk of models up to 8 GiB). `rank` is whose
    records these are, where one process holds those of several; else the launcher says it. `budget` bounds the bytes
    that wait for the disk.

    Taps can change what a compiler fuses, and so the output. Of a model that torch.compile runs, the first forward that
    is recorded is run untapped as well, once, and leaves no trace but the difference in the run's settings;
    `observer="skip"` does not. `precision_faithful` has Inductor round where the source does while it is recorded, so
    that taps change nothing: slower, and to other bits than the plain compiled model's.

    A `listener` is told each record as it is made; in memory, summaries alone are then not kept. `progress` is told how
    far the measuring of floors is. The caller that sets `owned` ends the recording in any case, also where
    the two are let go of together, in whichever order the collector takes them.
    """

    name: str | None = None
    mode: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: bool | None = None
    rank: int | None = None
    budget: int = 512 << 20
    observer: Literal["measure", "skip"] = "measure"
    precision_faithful: bool = False
    listener: Listener | None = None
    progress: Progress | None = None
    owned: bool = False
