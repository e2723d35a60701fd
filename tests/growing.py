"""How much memory some work takes, for scripts that tests run in a process of their own.

    result, megabytes = growth(work)

Sampled while it works: the peak since the start of the process would be that of compiling the kernels.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path


def held() -> int:
    """Resident memory now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def growth(work):
    """Do the work; return its result, and by how many MB the process grew meanwhile."""
    over, before = threading.Event(), held()
    highest = before

    def watch():
        nonlocal highest
        while not over.wait(0.002):
            highest = max(highest, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
        highest = max(highest, held())
    finally:
        over.set()
        watcher.join()
    return result, highest - before
