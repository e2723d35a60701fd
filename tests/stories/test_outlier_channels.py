"""A quantiser looks for channels that overflow: planted ones are found where they are, a healthy model has none."""

import copy

import pytest
import torch

import layerscope as ls
from layerscope.models.tiny import tiny_transformer

PLANTED = 11


@pytest.fixture(scope="module")
def healthy():
    return tiny_transformer().eval()


@pytest.fixture(scope="module")
def planted(healthy):
    """The same model, whose second layer writes a large value into one channel of the residual stream."""
    model = copy.deepcopy(healthy)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[PLANTED] *= 400
    return model


def recorded(model, to, **how):
    torch.manual_seed(0)
    with torch.no_grad(), ls.record(model, "model.layers.*", to=to, statistics="channels", **how):
        for _ in range(3):
            model(torch.randint(0, 256, (2, 24)))
    return to


@pytest.mark.parametrize("keep", ["summary", "both"])
def test_a_planted_channel_is_found_in_its_layer_and_those_it_flows_into(planted, tmp_path, keep):
    found = ls.outliers(recorded(planted, tmp_path / "run", keep=keep))
    layers = [row["point"] for row in found.layers]
    assert {row["channel"] for row in found} == {PLANTED}
    assert [row["point"] for row in sorted(found, key=lambda row: row["point"])] == layers[1:]
    assert {row["stays"] for row in found} == {"most tokens, every record"}
    run = ls.open_run(tmp_path / "run")
    if keep == "both":
        for row in found:
            values = torch.cat([run.tensor(row["point"], step=s) for s in range(3)]).double()
            size = values.abs().amax(dim=(0, 1))
            others = size[torch.arange(len(size)) != PLANTED].max()
            assert row["absmax"] == size[PLANTED]
            assert row["bits"] == pytest.approx(float(torch.log2(size[PLANTED] / others)))


def test_the_healthy_model_has_none(healthy, tmp_path):
    found = ls.outliers(recorded(healthy, tmp_path / "run"))
    assert len(found.layers) > 1
    assert len(found) == 0


def test_the_statistics_on_disk_are_numpys_of_each_channel(healthy, tmp_path):
    run = ls.open_run(recorded(healthy, tmp_path / "run"))
    for point in run.points:
        values = run.tensor(point, step=1).double().numpy()
        channels = run.summary(point, step=1).channels
        assert channels.absmax.tolist() == abs(values).max(axis=(0, 1)).tolist()
        assert channels.mean == pytest.approx(values.mean(axis=(0, 1)), rel=1e-10, abs=1e-12)
        assert channels.rms == pytest.approx((values**2).mean(axis=(0, 1)) ** 0.5, rel=1e-10)
