"""The alarms of a watched training, kept beside its run: a line of JSON each, so that a page shows them at once.

keep("runs/train", {"rule": "dead", "where": "blocks.3:output", "step": 7, ...})
kept(run)           # what there is, oldest first
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerscope.report.json import strict
from layerscope.store import Run

FILE = "alarms.jsonl"
LARGEST = 4 << 20  # bytes that are read; a rule says each place once, so this is a great many


def keep(folder: str, alarm: Mapping[str, Any]) -> None:
    """Append an alarm, in one write."""
    line = json.dumps(strict(dict(alarm)), allow_nan=False) + "\n"
    with Path(folder, FILE).open("a", encoding="ascii") as file:
        file.write(line)


def kept(run: Run) -> list[dict[str, Any]]:
    """Return the alarms of a run on this machine; what does not read as one is passed over."""
    path = Path(run.path, FILE)
    try:
        with path.open("rb") as file:
            lines = file.read(LARGEST).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            alarm = json.loads(line)
        except ValueError:
            continue  # the line that is being written
        if isinstance(alarm, dict) and isinstance(alarm.get("step"), int):
            found.append(alarm)
    return found
