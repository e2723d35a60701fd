import pytest

from layerscope.ranks import rank

VARIABLES = ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_a_process_without_a_launcher_is_rank_0():
    assert rank() == 0


@pytest.mark.parametrize("variable", VARIABLES)
def test_every_launcher_is_understood(variable, monkeypatch):
    monkeypatch.setenv(variable, "7")
    assert rank() == 7


def test_torchrun_under_slurm_is_torchruns_rank(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "9")
    assert rank() == 9


@pytest.mark.parametrize("value", ["", "-1", "one", "1.0", " 3"])
def test_a_value_that_is_no_rank_is_passed_over(value, monkeypatch):
    monkeypatch.setenv("RANK", value)
    assert rank() == 0
    monkeypatch.setenv("PMI_RANK", "2")
    assert rank() == 2


def test_the_rank_is_read_anew_each_time(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert rank() == 1
    monkeypatch.setenv("RANK", "2")
    assert rank() == 2
