"""Every run of the two models: what the reference's modules were given and gave, and a model run on those values."""

from __future__ import annotations

__all__ = ["backwards", "capture", "module_hooks", "pairing", "passes", "replay", "sides", "state"]
