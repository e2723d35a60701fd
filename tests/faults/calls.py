"""The system calls of a recording, counted; at one of them something happens.

with Calls(kill_at(17)): record(path)          # in a forked child: SIGKILL before the 17th
with Calls(fail_at(17, errno.EIO)) as calls: ...
calls.count
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGING = (
    *("open", "write", "pwrite", "pwritev", "fsync", "ftruncate", "posix_fallocate"),
    *("replace", "rename", "unlink", "mkdir", "rmdir", "link"),
)
READING = ("preadv", "fstat", "listdir")
_WRITES = ("write", "pwrite", "pwritev")

# What is done in place of a call: it is told the call's number and name, the real one, and its arguments.
Act = Callable[[int, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Calls:
    """Count calls of `os` while the block runs, and let `act` do each of them."""

    def __init__(self, act: Act, names: tuple[str, ...] = CHANGING) -> None:
        self.act, self.names, self.count = act, names, 0
        self.made: list[str] = []

    def __enter__(self) -> Calls:
        self._real = {name: getattr(os, name) for name in self.names}
        for name, work in self._real.items():
            setattr(os, name, self._wrapped(name, work))
        return self

    def __exit__(self, *_: object) -> None:
        for name, work in self._real.items():
            setattr(os, name, work)

    def _wrapped(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.made.append(name)
            return self.act(self.count, name, work, args, kwargs)

        return call


def nothing(number: int, name: str, work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Do what was asked."""
    return work(*args, **kwargs)


def kill_at(at: int, *, half: bool = False) -> Act:
    """Kill the process before call `at`; with `half`, in the middle of it, where it writes."""

    def act(number: int, name: str, work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number == at:
            if half and name in _WRITES:
                _half(name, work, args)
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **kwargs)

    return act


def fail_at(at: int, error: int, *, lasting: bool = False, half: bool = False) -> Act:
    """Let call `at` fail, or it and all after it; with `half`, a write does half of its work first."""

    def act(number: int, name: str, work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number == at or (lasting and number > at):
            if half and name in _WRITES:
                _half(name, work, args)
            raise OSError(error, os.strerror(error))
        return work(*args, **kwargs)

    return act


def short_at(at: int) -> Act:
    """Let a write do half of what it was asked and say so, as the system may."""

    def act(number: int, name: str, work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number == at and name in _WRITES:
            return _half(name, work, args)
        return work(*args, **kwargs)

    return act


def _half(name: str, work: Callable[..., Any], args: Any) -> Any:
    fd, data, *rest = args
    whole = b"".join(bytes(each) for each in data) if name == "pwritev" else bytes(data)
    part = whole[: len(whole) // 2]
    return work(fd, [part] if name == "pwritev" else part, *rest) if part else 0


def in_child(work: Callable[[Callable[[int], None]], None]) -> tuple[int, list[int]]:
    """Run `work` in a forked child; return how it ended (-9 when it was killed) and the numbers it said."""
    reading, writing = os.pipe()
    real_write, said = os.write, []
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            logging.disable()
            os.close(reading)
            work(lambda number: real_write(writing, bytes([number])) and None)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123  (a descriptor)
        said = list(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
