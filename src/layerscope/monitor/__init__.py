"""Front ends of the recorder for people who train: the Monitor, and watch().

monitor = Monitor(model, ["encoder.attn"], [1, 5], "monitor_outputs", batch_indices=[0])
train = MonitoredTrainer(monitor).wrap_training_function(train)
"""

from __future__ import annotations

from layerscope.monitor.monitor import Monitor
from layerscope.monitor.trainer import MonitoredTrainer
from layerscope.monitor.watching import Watch, watch

__all__ = ["Monitor", "MonitoredTrainer", "Watch", "watch"]
