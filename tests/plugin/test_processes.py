"""The plugin in processes of its own: without torch, without the plugin, with several workers."""

from __future__ import annotations

import pytest

from layerscope.pytest_plugin import FOLDER

SAYS_WHETHER_TORCH = """
import sys

def pytest_sessionfinish():
    print("torch is imported:", "torch" in sys.modules)
"""

PLAIN = """
def test_plain():
    assert True

def test_heavy():
    import sys, types
    sys.modules["torch"] = types.ModuleType("torch")

def test_it(layers):
    import torch
    layers.check(torch.nn.Linear(2, 2), torch.ones(1, 2))
"""


@pytest.mark.parametrize(
    ("options", "imported"), [(["--collect-only"], False), (["-k", "test_plain"], False), (["-k", "test_heavy"], True)]
)
def test_torch_is_imported_by_the_first_check_and_not_before(pytester, options, imported):
    pytester.makeconftest(SAYS_WHETHER_TORCH)
    pytester.makepyfile(PLAIN)
    result = pytester.runpytest_subprocess("-s", *options)
    assert f"torch is imported: {imported}" in result.stdout.str()


def test_a_session_can_do_without_the_plugin(pytester):
    pytester.makepyfile(PLAIN)
    result = pytester.runpytest_subprocess("-p", "no:layerscope", "-k", "not heavy")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'layers' not found*"])


def test_workers_store_each_its_own_and_are_added_up(pytester):
    source = """
        import pytest, torch

        @pytest.mark.parametrize("seed", range(4))
        def test_it(layers, seed):
            torch.manual_seed(seed)
            layers.check(torch.nn.Linear(4, 4), torch.ones(2, 3, 4))
    """
    pytester.makepyfile(test_net=source)
    (pytester.path / FOLDER / "test_net" / "test_gone").mkdir(parents=True)
    result = pytester.runpytest_subprocess("-n", "2", "--layers-update")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["layers: 4 checked, 4 stored, 1 unused:", f"    {FOLDER}/test_net/test_gone"])
    there = [path.name for path in (pytester.path / FOLDER / "test_net").iterdir()]
    assert sorted(name.partition(".")[0] for name in there) == ["test_gone", *(f"test_it_{n}_" for n in range(4))]
    again = pytester.runpytest_inprocess("-p", "no:xdist")
    again.assert_outcomes(passed=4)
