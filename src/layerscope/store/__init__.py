"""The run on disk: the seam between what records and what compares.

    writer = Writer("runs/fp32", Manifest(mode="fp32"))
    run = open_run("runs/fp32")

The README beside this file states the format.
"""

from __future__ import annotations

from layerscope.store.cache import cache_folder
from layerscope.store.layouts.convert import Converted, convert
from layerscope.store.manifest import Completeness, Dropped, Manifest, Missing
from layerscope.store.memory import MemoryRun
from layerscope.store.opening import open_run
from layerscope.store.recovery import Damage, Recovery, recover
from layerscope.store.run import Entry, Run
from layerscope.store.selecting import selected
from layerscope.store.table import RecordTable
from layerscope.store.writer import Blob, Writer

__all__ = [
    "Blob",
    "Completeness",
    "Converted",
    "Damage",
    "Dropped",
    "Entry",
    "Manifest",
    "MemoryRun",
    "Missing",
    "RecordTable",
    "Recovery",
    "Run",
    "Writer",
    "cache_folder",
    "convert",
    "open_run",
    "recover",
    "selected",
]
