"""Two engines, one answer; and which of them is in use."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch

from layerscope.stats import backend, fingerprint, numba_engine, numpy_engine, summarize
from layerscope.stats.tensor_views import ITEMS

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def by_both(monkeypatch, tensor, level="full"):
    summaries = []
    for engine in (numba_engine, numpy_engine):
        monkeypatch.setattr("layerscope.stats.sweeps.engine", lambda engine=engine: engine)
        summaries.append(summarize(tensor, level=level))
    return summaries


def of_many_scales(dtype, size):
    """Values of many octaves, some of them not finite; any bits at all where a dtype has few of these."""
    rng = np.random.default_rng(size)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, size) == 1)
    if kind.is_floating_point and kind.itemsize > 1:
        tensor = torch.from_numpy(rng.standard_normal(size) * np.exp(rng.standard_normal(size) * 3)).to(kind)
        tensor[rng.random(size) < 0.001] = math.nan
        tensor[rng.random(size) < 0.001] = -math.inf
        return tensor
    raw = torch.from_numpy(rng.integers(0, 256, size * kind.itemsize + 16, dtype=np.uint8))
    return raw[:-16].view(kind) if size else raw.view(kind)[:0]


def test_numpy_gives_the_numbers_of_numba(monkeypatch):
    for dtype, size in product(ITEMS, (0, 1, 9, 1024, 5001, 140_000)):
        fast, slow = by_both(monkeypatch, of_many_scales(dtype, size))
        case = f"{size} items of {dtype}"
        assert (fast.sketch, fast.fingerprint, fast.placed) == (slow.sketch, slow.fingerprint, slow.placed), case
        for name in ("count", "nan", "posinf", "neginf", "zeros"):
            assert getattr(fast, name) == getattr(slow, name), case
        for name in ("min", "max"):
            assert np.float64(getattr(fast, name)).tobytes() == np.float64(getattr(slow, name)).tobytes(), case
        for name in ("std", "l1", "l2", "rms"):
            assert getattr(fast, name) == pytest.approx(getattr(slow, name), rel=1e-12, abs=0.0, nan_ok=True), case
        slack = 1e-12 * min(fast.rms, 1e300)
        assert fast.mean == pytest.approx(slow.mean, rel=1e-12, abs=slack, nan_ok=True), case


def test_every_float16_is_converted_exactly(monkeypatch):
    codes = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.float16))
    finite = codes[torch.isfinite(codes)]
    for tensor in (codes, finite, finite[:31744], finite[31744:]):
        fast, slow = by_both(monkeypatch, tensor)
        assert fast.sketch == slow.sketch
        assert fast.l1 == slow.l1 == tensor[torch.isfinite(tensor)].double().abs().sum()
    for code in [*finite[::257].tolist(), 2.0**-24, -(2.0**-15), 65504.0]:
        assert summarize(torch.tensor([code], dtype=torch.float16)).min == code


def test_read_only_and_unaligned_arrays_compile_nothing_new():
    plain = np.arange(5000, dtype=np.float32).reshape(50, 100)
    summarize(plain), summarize(plain, level="moments")
    before = [len(kernel.signatures) for kernel in (numba_engine._full, numba_engine._moments)]
    frozen = plain.copy()
    frozen.setflags(write=False)
    unaligned = np.frombuffer(b"x" + plain.tobytes(), np.uint8)[1:].view(np.float32)
    for array in (frozen, frozen.T, frozen[::2], unaligned):
        summarize(array), summarize(array, level="moments")
    assert [len(kernel.signatures) for kernel in (numba_engine._full, numba_engine._moments)] == before


def test_threads_do_not_disturb_each_other():
    tensors = [torch.randn(30_000 + i) * 10**i for i in range(4)] * 10
    expected = [summarize(tensor) for tensor in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(summarize, tensors)) == expected


def test_counters_lost_on_the_way_are_replaced():
    lost = numba_engine.tables(wide=False)
    lost[:] = 7  # as if an exception had come between counting and draining
    tensor = torch.randn(100)
    assert summarize(tensor).sketch.total == 100
    assert summarize(tensor) == summarize(tensor)


def test_counters_are_left_clean_for_the_next_tensor():
    dirty = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1.0])
    for tensor in (dirty, dirty.double(), dirty.double() * 1e200, dirty.half(), dirty.bfloat16()):
        summarize(tensor)
        wide = tensor.dtype is torch.float64
        assert not numba_engine.tables(wide=wide).any()
        assert summarize(torch.ones(3, dtype=tensor.dtype)).sketch.counts.tolist() == [3]


def in_a_fresh_interpreter(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_without_numba_the_answer_is_the_same_and_said_to_be_slower():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np\n"
        "from layerscope.stats import backend, fingerprint, summarize\n"
        "x = np.linspace(-1, 1, 3000)\n"
        "print(backend(), fingerprint(x), summarize(x).sketch, sep='|')"
    )
    x = np.linspace(-1, 1, 3000)
    assert backend() == "numba"
    assert in_a_fresh_interpreter(code) == (f"numpy (numba is not installed)|{fingerprint(x)}|{summarize(x).sketch}")


def test_a_numba_that_breaks_is_named():
    code = (
        "import numba\n"
        "def broken(*_, **__): raise TypeError('no such machine')\n"
        "numba.njit = broken\n"
        "from layerscope.stats import backend\n"
        "print(backend())"
    )
    assert in_a_fresh_interpreter(code) == "numpy (numba failed: TypeError: no such machine)"


def test_a_cache_that_cannot_be_written_costs_only_the_cache(monkeypatch):
    real = numba_engine.numba.njit

    def njit(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba_engine.numba, "njit", njit)
    assert numba_engine._compiled(lambda x: x + 1)(2) == 3
