"""Seeds and a quiet machine; everything else is in the test that needs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

pytest_plugins = "pytester"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a job in the background, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fix the seeds of a test, and keep its caches out of the user's home."""
    import sys

    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(variable, raising=False)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin as a process does: a Monitor of another test that still listens to its model still listens to SIGTERM."""
    from layerscope.monitor import leaving

    monkeypatch.setattr(leaving, "_holding", set())
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)
