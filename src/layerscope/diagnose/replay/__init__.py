"""Every run of the two models: what the reference's modules were given and gave, and a model run on those values."""

from __future__ import annotations

__all__ = ["capture", "gradients", "module_hooks", "passes", "replay", "sides"]
