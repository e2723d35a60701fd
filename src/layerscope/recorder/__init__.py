"""Record what every layer of a model computes.

with record(model, "model.layers.*", to="runs/fp32") as rec:
    model(**inputs)
rec["model.layers.3"]
"""

from layerscope.recorder.record_options import RecordOptions
from layerscope.recorder.recording import Recording, record
from layerscope.recorder.taps import Tap

__all__ = ["RecordOptions", "Recording", "Tap", "record"]
