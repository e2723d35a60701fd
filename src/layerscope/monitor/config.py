"""A Monitor's settings in a training configuration: `monitor_layers`, `monitor_epochs`, `monitor_batches`.

    settings_in("config.json")      # {"layers_to_monitor": ..., "epochs_to_record": ..., "batch_indices": ...}

A configuration is a mapping, the path of a JSON file, or JSON text; lines that begin with # are remarks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Config = Mapping[str, Any] | str | os.PathLike[str]


def settings_in(config: Config) -> dict[str, Any]:
    """Return what a configuration says of the Monitor, by the names of its arguments; ValueError when nothing."""
    said = _read(config)
    if "monitor_layers" not in said:
        there = ", ".join(map(str, said)) or "nothing"
        raise ValueError(f"the configuration has no 'monitor_layers'; it has {there}.")
    return {
        "layers_to_monitor": said["monitor_layers"],
        "epochs_to_record": said.get("monitor_epochs", ()),
        "batch_indices": said.get("monitor_batches"),
    }


def _read(config: Config) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    text = config if isinstance(config, str) and "{" in config else Path(config).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    try:
        said = json.loads("\n".join(lines))
    except ValueError as error:
        raise ValueError(f"the configuration is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"the configuration is a JSON {type(said).__name__}; an object is expected.")
    return said
