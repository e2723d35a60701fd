"""Two engines, one answer; and which of them is in use."""

import subprocess
import sys

import numpy as np

from layerscope.compare.measure import engine, measure, numba_sweep, numpy_sweep


def in_a_fresh_interpreter(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_numba_is_used_where_it_works():
    assert engine.engine() is numba_sweep
    assert engine._answer(numba_sweep) == engine._answer(numpy_sweep)


def test_without_numba_the_answer_is_the_same():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np\n"
        "from layerscope.compare.measure.engine import engine\n"
        "from layerscope.compare.measure import measure\n"
        "x = np.linspace(-1, 1, 3000)\n"
        "m = measure(x, x.astype(np.float32))\n"
        "print(engine().__name__, m.relative_l2, m.correlation, *m.percentiles, sep='|')"
    )
    name, relative_l2, correlation, *percentiles = in_a_fresh_interpreter(code).split("|")
    x = np.linspace(-1, 1, 3000)
    expected = measure(x, x.astype(np.float32))
    assert name == "layerscope.compare.measure.numpy_sweep"
    np.testing.assert_allclose([float(relative_l2), float(correlation)], [expected.relative_l2, expected.correlation])
    assert tuple(map(float, percentiles)) == expected.percentiles


def test_an_engine_that_gives_other_numbers_is_not_used(monkeypatch):
    honest = numba_sweep.sweep

    def wrong(*sides, **how):
        swept = honest(*sides, **how)
        swept.together[:, 0] += 1
        return swept

    monkeypatch.setattr(numba_sweep, "sweep", wrong)
    assert engine.engine.__wrapped__() is numpy_sweep


def test_an_engine_that_breaks_is_not_used(monkeypatch):
    def broken(*sides, **how):
        raise TypeError("no such machine")

    monkeypatch.setattr(numba_sweep, "sweep", broken)
    assert engine.engine.__wrapped__() is numpy_sweep


def test_read_only_and_unaligned_arrays_compile_nothing_new():
    plain = (np.arange(5000, dtype=np.float32) % 1000).reshape(50, 100)
    measure(plain, plain + 1), measure(plain.astype(np.float64), plain + 1)
    before = len(numba_sweep._sweep.signatures)
    frozen = plain.copy()
    frozen.setflags(write=False)
    unaligned = np.frombuffer(b"x" + plain.tobytes(), np.uint8)[1:].view(np.float32).reshape(50, 100)
    for array in (frozen, unaligned, plain.astype(np.float16), plain.astype(np.int64), np.asfortranarray(plain)):
        assert measure(array, plain + 1).max_abs == 1.0
        assert measure(plain + 1, array).max_abs == 1.0
    assert len(numba_sweep._sweep.signatures) == before == 2


def test_measuring_imports_torch_only_when_it_reads_a_record():
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from layerscope.compare.measure import measure\n"
        "measure(np.ones(3), np.ones(3))\n"
        "print('torch' in sys.modules)"
    )
    assert in_a_fresh_interpreter(code) == "False"
