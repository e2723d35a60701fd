"""Leave in order when the system asks to: SIGTERM becomes SystemExit, so that `finally` and `with` are kept.

    with leaving_on_sigterm():
        train()         # kill PID: raises SystemExit(143) here

A handler is set only where nobody else has one, on the main thread, and is taken back at the end of the block. A second
SIGTERM ends the process at once. A forked child (a DataLoader's worker) dies of the signal as it always did.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["leaving_on_sigterm"]


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Turn the first SIGTERM inside the block into SystemExit, with the status a shell gives it."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield
        return
    process = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
