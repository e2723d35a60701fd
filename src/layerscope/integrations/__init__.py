"""Other people's training loops and dashboards: one file each, imported by its name.

    from layerscope.integrations.huggingface import MonitorCallback
    from layerscope.integrations.tensorboard import TensorBoard

Importing this package imports none of them.
"""

from __future__ import annotations

__all__ = ["accelerate", "huggingface", "lightning", "parquet", "tensorboard", "wandb"]
