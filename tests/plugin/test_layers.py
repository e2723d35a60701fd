"""`layers.check` in sessions of their own: what passes, what fails and how, what is left on disk."""

from __future__ import annotations

import pytest

from layerscope.pytest_plugin import FOLDER, _safe
from layerscope.store import open_run

MODEL = """
    import pytest, torch

    def network(*, wrong=None, by=1.05, depth=4):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(depth)])
        if wrong is not None:
            with torch.no_grad():
                model[wrong].weight.mul_(by)
        return model

    def values():
        return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
"""


@pytest.fixture
def session(pytester):
    """Write a test file and run it in this process; what the test file needs is in `models.py`."""
    pytester.makepyfile(models=MODEL)

    def run(source: str | None = None, *options: str, file: str = "test_net"):
        if source is not None:
            pytester.makepyfile(**{file: "from models import *\n" + source})
        return pytester.runpytest_inprocess("-p", "no:xdist", *options)

    return run


def stored_in(pytester, stem: str = "test_net") -> list[str]:
    return sorted(path.name for path in (pytester.path / FOLDER / stem).iterdir())


def check(arguments: str = "network(), values()") -> str:
    return f"def test_it(layers):\n    layers.check({arguments})\n"


def test_a_run_that_is_not_stored_fails_and_says_how_to_store_it(session, pytester):
    result = session(check())
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*no layers are stored for this test in {FOLDER}/test_net/test_it",
            "*pytest --layers-update test_net.py::test_it",
        ]
    )
    assert not (pytester.path / FOLDER).exists()


def test_what_was_stored_passes_and_a_changed_linear_is_named(session, pytester):
    session(check(), "--layers-update").assert_outcomes(passed=1)
    assert stored_in(pytester) == ["test_it"]
    session().assert_outcomes(passed=1)
    for wrong in (0, 2, 3):
        result = session(check(f"network(wrong={wrong}), values()"))
        result.assert_outcomes(failed=1)
        result.stdout.re_match_lines(
            [
                rf"E +AssertionError: differs: {wrong} parts first: .*; its weights differ",
                rf"E +{wrong} .*root .*",
                rf"E +reference: the stored run, {FOLDER}/test_net/test_it",
                r"E +rests on: .*estimate.*",
                r"E +pytest --layers-update test_net\.py::test_it",
                r"layers: 1 checked, 0 stored",
            ]
        )
    session(check()).assert_outcomes(passed=1)


def test_only_the_callers_line_is_in_the_traceback(session):
    result = session(check())
    assert "pytest_plugin.py" not in result.stdout.str()
    result.stdout.fnmatch_lines(["> *layers.check(network(), values())", "test_net.py:*: AssertionError"])


def test_an_update_replaces_what_differs_and_leaves_what_agrees(session, pytester):
    session(check(), "--layers-update")
    stored = pytester.path / FOLDER / "test_net" / "test_it" / "rank-00000" / "segment-00000.safetensors"
    before = stored.read_bytes()
    session(None, "--layers-update").stdout.fnmatch_lines(["layers: 1 checked, 0 stored"])
    assert stored.read_bytes() == before
    session(check("network(wrong=1), values()"), "--layers-update").stdout.fnmatch_lines(
        ["layers: 1 checked, 1 stored"]
    )
    assert stored.read_bytes() != before
    session().assert_outcomes(passed=1)
    assert stored_in(pytester) == ["test_it"]


def test_an_update_that_fails_leaves_the_stored_run_and_no_litter(session, pytester):
    session(check(), "--layers-update")
    result = session(check("network(depth=5), values()[..., :3]"), "--layers-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*mat1 and mat2*"])
    assert stored_in(pytester) == ["test_it"]
    session(check()).assert_outcomes(passed=1)


def test_a_damaged_run_is_said_to_be_one_and_an_update_heals_it(session, pytester):
    session(check(), "--layers-update")
    [segment] = (pytester.path / FOLDER).rglob("*.safetensors")
    segment.write_bytes(segment.read_bytes()[:67_000])
    session().assert_outcomes(failed=1)
    session(None, "--layers-update").assert_outcomes(passed=1)
    session().assert_outcomes(passed=1)


def test_a_layer_too_many_or_too_few_fails(session):
    session(check(), "--layers-update")
    for depth in (3, 5):
        result = session(check(f"network(depth={depth}), values()"))
        result.assert_outcomes(failed=1)


def test_a_module_that_is_never_called_is_no_failure(session):
    source = """
class Idle(torch.nn.Sequential):
    def forward(self, x):
        return self[0](x)

def test_it(layers):
    layers.check(Idle(*network()), values())
"""
    session(source, "--layers-update").assert_outcomes(passed=1)
    session().assert_outcomes(passed=1)
    session(source.replace("self[0]", "self[1]")).assert_outcomes(failed=1)


def test_statistics_alone_are_small_and_tell_a_changed_layer(session, pytester):
    session(check("network(), values(), keep='summary'"), "--layers-update").assert_outcomes(passed=1)
    assert {entry.dtype for entry in open_run(pytester.path / FOLDER / "test_net" / "test_it").records()} == {None}
    session().assert_outcomes(passed=1)
    result = session(check("network(wrong=2), values(), keep='summary'"))
    result.stdout.fnmatch_lines(["*differs: 2 parts first: *"])


def test_fewer_taps_store_fewer_layers(session, pytester):
    import layerscope

    session(check("network(), values(), '{0,2}'"), "--layers-update")
    run = layerscope.open_run(pytester.path / FOLDER / "test_net" / "test_it")
    assert [point.name for point in run.points] == ["0", "2"]
    assert session(check("network(wrong=1), values(), '0'")).parseoutcomes() == {"failed": 1}
    assert session(check("network(wrong=3), values(), '{0,2}'")).parseoutcomes() == {"passed": 1}


def test_inputs_are_keywords_positions_or_one_value(session):
    source = """
class Two(torch.nn.Module):
    def forward(self, x, y=0):
        assert not torch.is_grad_enabled() and self.training
        return x + 2 * y

@pytest.mark.parametrize("inputs", [{"x": values(), "y": 1}, (values(), 1), values() + 2])
def test_it(layers, inputs):
    layers.check(Two(), inputs, ".")
    assert torch.is_grad_enabled()
"""
    session(source, "--layers-update").assert_outcomes(passed=3)
    session(source).assert_outcomes(passed=3)


def test_names_of_tests_and_checks_become_harmless_folders(session, pytester):
    source = """
@pytest.mark.parametrize("depth", [1, 2], ids=["../../up", "/abs/olute"])
class TestDeep:
    def test_it(self, layers, depth):
        layers.check(network(depth=depth), values())
        layers.check(network(depth=depth), values() * 2)
        layers.check(network(depth=depth), values() * 3, name="a/../b")
"""
    session(source, "--layers-update").assert_outcomes(passed=2)
    session().assert_outcomes(passed=2)
    names = [_safe(f"TestDeep::test_it[{name}]") for name in ("../../up", "/abs/olute")]
    assert stored_in(pytester) == sorted(n + s for n in names for s in ("", "-2", f"-{_safe('a/../b')}"))
    assert sorted(path.name for path in pytester.path.iterdir() if path.is_dir()) in ([FOLDER], [FOLDER, "__pycache__"])


@pytest.mark.parametrize("name", ["..", "", "a/b", "test_A", "x" * 300, "\ud800", "a.b", "a-b"])
def test_a_folder_is_never_named_after_what_could_lead_elsewhere(name):
    safe = _safe(name)
    assert safe != name
    assert len(safe) < 80
    assert set(safe) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")
    assert not safe.startswith("..")
    assert safe != _safe(name + "!")


def test_two_checks_of_one_name_are_refused(session):
    source = "def test_it(layers):\n" + "    layers.check(network(), values(), name='a')\n" * 2
    result = session(source, "--layers-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this test has already checked layers called 'a'; give each check a name"])


def test_stored_runs_that_no_test_used_are_listed_and_kept(session, pytester):
    both = check() + check().replace("test_it", "test_other")
    session(both, "--layers-update").assert_outcomes(passed=2)
    result = session(check())
    result.stdout.fnmatch_lines(["layers: 1 checked, 0 stored, 1 unused:", f"    {FOLDER}/test_net/test_other"])
    assert stored_in(pytester) == ["test_it", "test_other"]
    (pytester.path / "test_net.py").unlink()
    result = session("def test_new():\n    assert True\n", file="test_new")
    result.stdout.fnmatch_lines(["layers: 0 checked, 0 stored, 2 unused:"])


@pytest.mark.parametrize(
    "options", [["-k", "test_it"], ["test_net.py::test_it"], ["--deselect", "test_net.py::test_other"]], ids=" ".join
)
def test_tests_that_were_not_chosen_leave_nothing_unused(session, options):
    session(check() + check().replace("test_it", "test_other"), "--layers-update")
    result = session(None, *options)
    result.stdout.fnmatch_lines(["layers: 1 checked, 0 stored"])
    assert " unused:" not in result.stdout.str()


def test_tests_that_failed_or_were_skipped_leave_nothing_unused(session):
    session(check() + check().replace("test_it", "test_other"), "--layers-update")
    for end in ("pytest.skip('no GPU')", "assert False"):
        result = session(check() + f"def test_other(layers):\n    {end}\n")
        assert " unused:" not in result.stdout.str()


def test_a_session_without_checks_says_nothing(session):
    result = session("def test_it():\n    assert True\n")
    result.assert_outcomes(passed=1)
    assert "layers:" not in result.stdout.str()


def test_a_noise_run_is_a_floor(session):
    session(check(), "--layers-update")
    source = """
import layerscope

def test_it(layers, tmp_path):
    with torch.no_grad(), layerscope.record(network(wrong=0, by=1.05), "**", to=tmp_path / "noise") as rec:
        rec.model(values())
    layers.check(network(wrong=0, by=1.03), values(), noise={noise})
"""
    session(source.replace("{noise}", "None")).assert_outcomes(failed=1)
    session(source.replace("{noise}", "tmp_path / 'noise'")).assert_outcomes(passed=1)
