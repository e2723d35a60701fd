"""Leave in order when the system asks to: SIGTERM becomes SystemExit, so that `finally`, `with` and `atexit` are kept.

    release = leave_on_sigterm()
    train()             # kill PID: raises SystemExit(143) here
    release()

A handler is set only where there is none, on the main thread, and is taken back when the last who asked for it
lets go. A second SIGTERM ends the process at once. A forked child (a DataLoader's worker) dies of the signal as it
always did.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_process = 0
_holding: set[object] = set()


def leave_on_sigterm() -> Callable[[], None]:
    """Turn the first SIGTERM from here on into SystemExit, with the status a shell gives it; return what ends that.

    What is returned may be called twice, and on any thread.
    """
    global _process
    one = object()
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _leave):
        return lambda: None
    signal.signal(signal.SIGTERM, _leave)
    if os.getpid() != _process:
        _process = os.getpid()
        _holding.clear()
    _holding.add(one)
    return lambda: _release(one)


def _release(one: object) -> None:
    _holding.discard(one)
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and not _holding and signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process in order. No Monitor may be left that wants that: other code can put back old handlers."""
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != _process or not _holding:
        os.kill(os.getpid(), number)
    raise SystemExit(128 + number)
