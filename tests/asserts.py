"""Assertions that several rooms share."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


def left_open() -> Callable[[], tuple[list[str], list[str]]]:
    """Return what tells the threads and files that are there in addition; what others end meanwhile is no gain."""
    threads, files = set(threading.enumerate()), _open_files()

    def since() -> tuple[list[str], list[str]]:
        started = [thread.name for thread in threading.enumerate() if thread not in threads]
        return started, sorted((_open_files() - files).elements())

    return since


def _open_files() -> Counter[str]:
    """Count the open files by name without its numbers: the next segment in the place of the last is not one more."""
    found: Counter[str] = Counter()
    for handle in Path("/proc/self/fd").iterdir():
        try:
            found[re.sub(r"\d+", "N", str(handle.readlink()))] += 1
        except FileNotFoundError:  # the handle that lists the folder
            continue
    return found


def hooks_on(model: torch.nn.Module) -> int:
    """Count every hook on a model, whoever registered it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def assert_no_hooks_left(model: torch.nn.Module) -> None:
    assert hooks_on(model) == 0, "a hook was left behind"
    for module in model.modules():
        for flags in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
            assert not getattr(module, flags), f"{flags} was left behind"


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert (
        a.detach().contiguous().view(torch.uint8).equal(b.detach().contiguous().view(torch.uint8))
        if (a.numel() and a.dim())
        else torch.equal(a, b) or bool((a != a).all() and (b != b).all())
    )


def assert_lives_through(ask: Callable[[], object]) -> None:
    """Ask something that may end the process, in another one."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        gc.freeze()  # it looks for garbage of its own
        try:
            ask()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, "it died of a signal" if code < 0 else "it raised"


def counted(work: Callable[[], T]) -> tuple[T, int]:
    """Do the work; return its result, and how many functions were called: a measure that no busy machine changes."""
    calls = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event.endswith("call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, calls
