"""The module in C is built where it can be, and where it cannot it is said why."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from layerscope import native

CAN_BUILD = importlib.util.find_spec("triton") is not None and (shutil.which("gcc") or shutil.which("clang"))


@pytest.mark.skipif(not CAN_BUILD, reason="there is no Triton, or no C compiler")
def test_it_is_built_where_there_is_triton_and_a_compiler():
    assert native.why_not() == ""
    assert native.load().Basket.__doc__ == "What waits, of one step of one thread."


def test_where_it_cannot_be_built_it_is_said_why(monkeypatch):
    def refused(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(native, "import_module", refused)
    gates, reason = native._tried.__wrapped__()
    assert gates is None
    assert reason == "ModuleNotFoundError: No module named 'triton.runtime.build'"


def test_its_source_comes_with_the_package():
    assert {path.name for path in Path(native.__file__).parent.glob("*.[ch]")} == set(native.FILES)
