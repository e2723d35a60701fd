"""Seeds and a quiet machine; everything else is in the test that needs it."""

from __future__ import annotations

import gc
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = "pytester"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a job in the background, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Spare the tests: a full collection, as each `Trainer.train()` begins with, need not pass over all modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fix the seeds of a test, and keep its caches out of the user's home."""
    import sys

    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(variable, raising=False)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """Run an S3 server for all tests that ask for one."""
    from buckets import Server

    server = Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the server, with a bucket of the test's own at `s3.address`."""
    from buckets import ENVIRONMENT

    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_server.url}.items():
        monkeypatch.setenv(name, value)
    bucket = re.sub(r"[^a-z0-9]+", "-", tmp_path.name.lower()).strip("-")
    urllib.request.urlopen(urllib.request.Request(f"{s3_server.url}/{bucket}", method="PUT")).close()
    s3_server.address = f"s3://{bucket}/run"
    return s3_server


@pytest.fixture
def nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin as a process does: a Monitor of another test that still listens to its model still listens to SIGTERM."""
    from layerscope.monitor import leaving

    monkeypatch.setattr(leaving, "_holding", set())
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)
