"""Models with modes of their own: which they are, and what their groups hold."""

import pytest
import torch
from torch import nn

from layerscope.models import Inputs
from layerscope.models.mamba import Mamba, MambaConfig
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.drawing import drawn_weights
from layerscope.modes import Setting, choose, modes_of, record_modes, variant
from layerscope.modes.kinds import own_modes

SEVEN = ["0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"]
IDS = torch.arange(40).view(2, 20)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr("layerscope.modes.kinds.CALIBRATION", (1, 64))


@pytest.fixture(scope="module")
def mamba():
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, time_step_rank=4)
    return assembled(config, drawn_weights(config, seed=0), source="the seed")


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("all", ["fp32", *SEVEN]),
        ("fp_only", ["fp32"]),
        ("quant_only", SEVEN),
        ("essential", ["fp32", "0", "2-1", "2-2", "2-4"]),
        ("fp16", ["fp16"]),
        ("int8-weight", ["int8-weight"]),
    ],
)
def test_the_groups_of_a_mamba_are_those_of_its_users(mamba, group, names):
    assert [one.name for one in choose([group], mamba).modes] == names


@pytest.mark.parametrize("name", ["1", "2-4", "int8-weight", "fp16"])
def test_a_run_states_that_its_mode_is_quantised_in_a_group_or_not(mamba, name):
    modes = choose([name], mamba).modes
    (one,) = record_modes(mamba, modes, [Inputs((IDS,))], "backbone.layers.0", to=None)
    assert one.run.manifest.settings.get("quantised") == (None if name == "fp16" else f"mode {name}")


def test_other_models_have_no_modes_of_a_mamba():
    assert own_modes(nn.Linear(2, 2)) == ()
    assert not {one.name for one in modes_of(nn.Linear(2, 2))} & set(SEVEN)


@pytest.mark.parametrize("name", ["fp32", *SEVEN, "fp16", "int8-dynamic"])
def test_every_mode_of_a_mamba_is_made_and_runs_close_to_it(mamba, name):
    with torch.no_grad():
        wanted, got = mamba(IDS), variant(mamba, name)(IDS).float()
    error = ((got - wanted).norm() / wanted.norm()).item()
    assert (error == 0) if name == "fp32" else (0 < error < 0.1)
    assert isinstance(mamba, Mamba)


def test_the_percentile_is_that_of_the_setting(mamba):
    with torch.no_grad():
        outputs = [variant(mamba, "0", Setting(percentile_alpha=alpha))(IDS) for alpha in (0.9999, 0.9999, 0.9)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
