"""Record from a GPU without making the model wait: copies and statistics in stream order, fetched later."""

from layerscope.recorder.gpu.statistics import DeviceStatistics

__all__ = ["DeviceStatistics"]
