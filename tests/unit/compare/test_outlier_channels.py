"""Which channels stand out in a run: over records, from statistics or from tensors, and what is left out is said."""

import numpy as np
import pytest
import torch
from torch import nn

import layerscope as ls
from layerscope.errors import NoSuchPoint
from layerscope.store import open_run


class Scaled(nn.Module):
    """Each channel times a number of its own."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return x * self.scale


def recorded(inputs, *, to=None, scale=(1.0,) * 32, **how):
    model = nn.Sequential(Scaled(list(scale)))
    with ls.record(model, how.pop("taps", "0"), to=to, **{"statistics": "channels", **how}) as rec:
        for x in inputs:
            model(x)
    return rec.run


def ones(*, steps=3, tokens=10):
    """Tokens of magnitude one, alternating in sign."""
    return [torch.tensor([1.0, -1.0]).repeat(tokens // 2)[:, None].expand(tokens, 32).clone() for _ in range(steps)]


@pytest.mark.parametrize("disk", [False, True], ids=["in memory", "on disk"])
def test_a_channel_that_is_large_throughout_is_found_with_its_numbers(disk, tmp_path):
    scale = [1.0] * 32
    scale[5] = 16.0
    run = recorded(ones(), to=tmp_path / "run" if disk else None, scale=scale)
    found = ls.outliers(tmp_path / "run" if disk else run)
    [row] = found.to_dicts()
    assert row == {
        "point": "0:output", "channel": 5, "absmax": 16.0, "mean": 0.0, "rms": 16.0, "share": 1.0, "kurtosis": 1.0,
        "tokens": 1.0, "bits": 4.0, "records": 3, "of": 3, "stays": "most tokens, every record",
    }  # fmt: skip
    [layer] = found.layers.to_dicts()
    kurtosis = layer.pop("kurtosis")
    squares = np.array([1.0] * 31 + [256.0])
    assert kurtosis == pytest.approx((squares**2).mean() / squares.mean() ** 2)
    assert layer == {
        "point": "0:output", "channels": 32, "axis": -1, "records": 3, "absmax": 16.0, "largest": 5, "without": 1.0,
        "outliers": 1, "bits": 4.0,
    }  # fmt: skip
    assert list(found.to_pandas()["channel"]) == [5]
    assert "1 channel stands out in 1 of 1 point; the most expensive costs 4.0 bits, in 0:output" in str(found)


def test_a_layer_of_equal_channels_has_none():
    found = ls.outliers(recorded(ones()))
    assert (len(found), list(found), found.to_dicts()) == (0, [], [])
    assert found.layers[0]["outliers"] == 0
    assert "no channel stands out in 1 point" in str(found)


def test_what_is_large_in_one_token_or_in_one_record_does_not_stay():
    inputs = ones()
    inputs[0][4, 7] = inputs[1][2, 7] = inputs[2][8, 7] = 50.0
    inputs[1][:, 9] = 20.0
    rows = {row["channel"]: row for row in ls.outliers(recorded(inputs))}
    assert (rows[7]["stays"], rows[7]["records"], rows[7]["of"]) == ("few tokens, every record", 3, 3)
    assert (rows[9]["stays"], rows[9]["records"], rows[9]["of"]) == ("most tokens, some records", 1, 3)
    assert rows[7]["tokens"] == pytest.approx((27 + 3 * 2500) ** 2 / (30 * (27 + 3 * 2500**2)))


def test_one_step_may_be_asked_for_and_another_measure_of_standing_out():
    inputs = ones()
    inputs[1][:, 9] = 20.0
    run = recorded(inputs)
    assert [row["channel"] for row in ls.outliers(run, step=1)] == [9]
    assert len(ls.outliers(run, step=0)) == 0
    assert len(ls.outliers(run, times=21)) == 0


def test_tensors_stand_in_for_statistics_that_were_not_asked_for():
    inputs = [x[None, :, :, None].expand(2, 10, 32, 5).clone() for x in ones()]
    for x in inputs:
        x[:, :, 3] = 99.0
    model = nn.Sequential(nn.Identity())
    with ls.record(model, "0") as rec:
        for x in inputs:
            model(x)
    assert [(row["channel"], row["of"]) for row in ls.outliers(rec.run, axis=2)] == [(3, 3)]
    assert ls.outliers(rec.run).layers[0]["channels"] == 5


def test_a_run_with_neither_is_refused_with_the_way_out(tmp_path):
    recorded(ones(), to=tmp_path / "run", keep="summary", statistics="full")
    with pytest.raises(NoSuchPoint, match=r"has statistics of channels.*record with statistics='channels'"):
        ls.outliers(tmp_path / "run")


def test_integers_and_other_widths_are_left_out_and_said():
    model = nn.Sequential(nn.Identity())
    with ls.record(model, ["0:input", "0"], statistics="channels", keep="summary") as rec:
        model(torch.ones(4, 8))
        model(torch.ones(4, 9))
    found = ls.outliers(rec.run, "0")
    assert (found.layers[0]["channels"], found.layers[0]["records"]) == (8, 1)
    assert found.left_out == ("1 record with other channels than the first left out: 0:output, for one",)
    with ls.record(model, "0", statistics="channels") as rec:
        model(torch.ones(4, 8, dtype=torch.long))
    found = ls.outliers(rec.run)
    assert len(found.layers) == 0
    assert found.left_out == ("1 point of integers or truth values left out: 0:output, for one",)


def test_channels_that_stand_out_in_several_points_are_named():
    scale = [1.0] * 32
    scale[5] = 16.0
    model = nn.Sequential(Scaled(scale), nn.Identity())
    with ls.record(model, ["0", "1"], statistics="channels") as rec:
        model(ones()[0])
    assert "channel 5 stands out in 2 points" in str(ls.outliers(rec.run))
    assert [row["point"] for row in ls.outliers(rec.run, "1")] == ["1:output"]


def test_a_record_that_cannot_be_read_does_not_hide_the_others(tmp_path, monkeypatch):
    recorded(ones(), to=tmp_path / "run", keep="summary")
    run = open_run(tmp_path / "run")
    from layerscope.errors import Damaged
    from layerscope.stats import Channels

    whole, calls = Channels.unpacked, []

    def once(data):
        calls.append(data)
        if len(calls) == 1:
            raise Damaged("a flipped byte")
        return whole(data)

    monkeypatch.setattr(Channels, "unpacked", once)
    found = ls.outliers(run)
    assert found.layers[0]["records"] == 2
    assert [damage.reason for damage in found.damaged] == ["a flipped byte"]
