"""Record what every layer of a model computes, in any runtime; find the layer where two runs part, and say why.

    import layerscope as ls

    with ls.record(model, "model.layers.*", to="runs/fp32") as rec:
        model(**inputs)
    run = ls.open_run("runs/fp32")
    run.tensor("model.layers.3")

Names resolve on first use, so that `import layerscope` and the command line's `--help` never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Comparison": "compare",
    "Finding": "diagnose",
    "LayerscopeError": "errors",
    "Moment": "points",
    "Monitor": "monitor",
    "MonitoredTrainer": "monitor",
    "Point": "points",
    "RecordOptions": "recorder",
    "Recording": "recorder",
    "Run": "store",
    "Schedule": "schedules",
    "Summary": "stats",
    "Tap": "recorder",
    "Verdict": "compare",
    "assert_runs_match": "compare",
    "batches": "schedules",
    "compare": "compare",
    "compile": "compile_taps",
    "convert": "store",
    "diagnose": "diagnose",
    "epochs": "schedules",
    "every": "schedules",
    "first": "schedules",
    "get_layer_hidden_states": "compile_taps",
    "load_compiled": "compile_taps",
    "measure_floors": "twins",
    "mode": "modes",
    "open_run": "store",
    "outliers": "compare",
    "record": "recorder",
    "recover": "store",
    "steps": "schedules",
    "summarize": "stats",
    "watch": "monitor",
    "when": "schedules",
}

__all__ = [
    "Comparison",
    "Finding",
    "LayerscopeError",
    "Moment",
    "Monitor",
    "MonitoredTrainer",
    "Point",
    "RecordOptions",
    "Recording",
    "Run",
    "Schedule",
    "Summary",
    "Tap",
    "Verdict",
    "assert_runs_match",
    "batches",
    "compare",
    "compile",
    "convert",
    "diagnose",
    "epochs",
    "every",
    "first",
    "get_layer_hidden_states",
    "load_compiled",
    "measure_floors",
    "mode",
    "open_run",
    "outliers",
    "record",
    "recover",
    "steps",
    "summarize",
    "watch",
    "when",
]

if TYPE_CHECKING:
    from layerscope.compare import Comparison, Verdict, assert_runs_match, compare, outliers
    from layerscope.compile_taps import compile, get_layer_hidden_states, load_compiled
    from layerscope.diagnose import Finding, diagnose
    from layerscope.errors import LayerscopeError
    from layerscope.modes import mode
    from layerscope.monitor import Monitor, MonitoredTrainer, watch
    from layerscope.points import Moment, Point
    from layerscope.recorder import Recording, RecordOptions, Tap, record
    from layerscope.schedules import Schedule, batches, epochs, every, first, steps, when
    from layerscope.stats import Summary, summarize
    from layerscope.store import Run, convert, open_run, recover
    from layerscope.twins import measure_floors


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'layerscope' has no attribute {name!r}; it has {', '.join(__all__)}.")
    value: object = getattr(import_module(f"layerscope.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
