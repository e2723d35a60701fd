"""What a check imports is imported out here, once: a session inside this one forgets its own imports."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imported_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Do what a check does; torch cannot be imported twice, and the kernels should not be."""
    import torch

    from layerscope.compare.asserting import assert_runs_match
    from layerscope.recorder import record

    runs = [tmp_path_factory.mktemp("runs") / "run", None]
    for factor, to in enumerate(runs, start=1):
        with record(torch.nn.Identity(), ".", to=to, keep="tensor") as recording:
            recording.model(torch.arange(24.0).reshape(2, 3, 4) * factor)
    with pytest.raises(AssertionError, match="differs"):
        assert_runs_match(runs[0], recording.run)


@pytest.fixture(autouse=True)
def _alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep other plugins out of the sessions inside: they would import themselves anew in each."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-W error -p no:hypothesispytest -p no:anyio -p no:cacheprovider")
