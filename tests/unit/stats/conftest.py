"""Both engines, and what numpy says about a tensor."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest

from layerscope.stats import numba_engine, numpy_engine


@pytest.fixture(params=["numba", "numpy"])
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The engine that `summarize` uses in this test: each of the two in turn."""
    engine = {"numba": numba_engine, "numpy": numpy_engine}[request.param]
    monkeypatch.setattr("layerscope.stats.sweeps.engine", lambda: engine)
    return engine


class Truth:
    """The definitions, spelled out in numpy's widest float on the values themselves."""

    @np.errstate(all="ignore")
    def __init__(self, values: np.ndarray) -> None:
        values = np.asarray(values).reshape(-1)
        self.count = values.size
        self.nan = int(np.isnan(values).sum())
        self.posinf = int((values == math.inf).sum())
        self.neginf = int((values == -math.inf).sum())
        self.zeros = int((values == 0).sum())
        finite = values[np.isfinite(values)].astype(np.longdouble)
        self.finite = finite.size
        self.l1 = float(np.abs(finite).sum()) if finite.size else 0.0
        self.l2 = float(np.sqrt((finite**2).sum())) if finite.size else 0.0
        self.mean = self.std = self.min = self.max = self.absmax = self.rms = math.nan
        if finite.size:
            self.mean = float(finite.mean())
            self.std = float(np.sqrt(((finite - finite.mean()) ** 2).mean()))
            self.min, self.max = float(finite.min()), float(finite.max())
            self.absmax = float(np.abs(finite).max())
            self.rms = float(np.sqrt((finite**2).mean()))

    def assert_of(self, summary, *, rel: float = 1e-11) -> None:
        for name in ("count", "finite", "nan", "posinf", "neginf", "zeros"):
            assert getattr(summary, name) == getattr(self, name), name
        assert summary.has_nan == (self.nan > 0)
        assert summary.has_inf == (self.posinf + self.neginf > 0)
        ulp = 3e-16 if summary.dtype.startswith("complex") else 0.0  # of the modulus, which is itself rounded
        for name in ("min", "max", "absmax"):
            assert getattr(summary, name) == pytest.approx(getattr(self, name), rel=ulp, abs=0.0, nan_ok=True), name
        for name in ("std", "l1", "l2", "rms"):
            assert getattr(summary, name) == pytest.approx(getattr(self, name), rel=rel, abs=0.0, nan_ok=True), name
        # A mean near zero has no digits of its own: its error is relative to the values'.
        scale = self.l1 / self.finite if self.finite else 0.0
        assert summary.mean == pytest.approx(self.mean, rel=rel, abs=rel * min(scale, 1e300), nan_ok=True)
        if not self.finite:
            assert all(math.isnan(getattr(summary, name)) for name in ("mean", "std", "min", "max", "absmax", "rms"))


@pytest.fixture
def truth() -> type[Truth]:
    return Truth
