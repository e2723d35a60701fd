"""Scales from calibration: what they are, and when they are remembered."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from asserts import hooks_on
from layerscope.errors import BadText, Unsupported
from layerscope.models.mamba import Mamba, MambaConfig
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.drawing import drawn_weights
from layerscope.modes.quamba import calibration as module
from layerscope.modes.quamba.calibration import Calibration, calibrate

CONFIG = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever the model is run rather than the cache believed."""
    times: list[int] = []
    real = module._measured
    monkeypatch.setattr(module, "_measured", lambda *args: (times.append(1), real(*args))[1])
    return times


def tiny(seed: int = 0) -> Mamba:
    return assembled(CONFIG, drawn_weights(CONFIG, seed=seed), source="tests")


def ids(seed: int = 0, *, samples: int = 6, length: int = 40) -> torch.Tensor:
    return torch.randint(32, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alpha", [1.0, 0.9999, 0.99, 0.5])
def test_a_scale_is_the_quantile_of_the_magnitudes_seen_over_127(alpha, cache):
    model, seen = tiny(), {}

    def keep(name):
        return lambda _, args: seen.setdefault(name, []).append([arg.detach().numpy().copy() for arg in args])

    mixer = model.backbone.layers[1].mixer
    stages = ("in_proj", "conv1d", "x_proj", "dt_proj", "scan", "out_proj")
    handles = [getattr(mixer, stage).register_forward_pre_hook(keep(stage)) for stage in stages]
    with torch.no_grad():
        for batch in ids().split(2):
            model(batch)
    for handle in handles:
        handle.remove()
    found = calibrate(model, ids().split(2), percentile_alpha=alpha).layers[1]
    places = {
        **{stage: (stage, 0) for stage in ("in_proj", "conv1d", "dt_proj", "out_proj")},
        "u": ("scan", 0),
        "delta": ("scan", 1),
        "B": ("scan", 3),
        "C": ("scan", 4),
    }
    for name, (stage, at) in places.items():
        sizes = np.abs(np.concatenate([args[at].ravel() for args in seen[stage]]))
        quantile = np.quantile(sizes, alpha, method="inverted_cdf")
        assert getattr(found, name) == pytest.approx(quantile / 127, rel=1e-6), name


def test_scales_do_not_depend_on_how_samples_are_batched(cache):
    model = tiny()
    whole, apart = (calibrate(model, ids().split(n), percentile_alpha=0.99).layers for n in (6, 1))
    for one, other in zip(whole, apart, strict=True):
        for name in ("in_proj", "conv1d", "u", "dt_proj", "delta", "B", "C", "out_proj"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5)


def test_the_model_is_left_as_it_was(cache):
    model = tiny()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    calibrate(model, [ids()])
    assert hooks_on(model) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_model_that_fails_is_left_without_hooks(cache):
    model = tiny()
    with pytest.raises(IndexError):
        calibrate(model, [torch.tensor([[99]])])
    assert hooks_on(model) == 0


def test_a_site_that_is_always_zero_has_a_scale_all_the_same(cache):
    model = tiny()
    torch.nn.init.zeros_(model.backbone.layers[0].mixer.in_proj.weight)
    found = calibrate(model, [ids()]).layers[0]
    assert (found.conv1d, found.out_proj) == (1.0, 1.0)


def test_values_that_are_not_finite_are_refused_by_the_name_of_their_site(cache):
    model = tiny()
    model.backbone.layers[1].mixer.in_proj.weight.data[3, 0] = torch.nan
    with pytest.raises(Unsupported, match=r"backbone\.layers\.1\.mixer: conv1d has values that are not finite"):
        calibrate(model, [ids()])
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.0001, float("nan")])
def test_an_alpha_that_is_no_share_is_refused(alpha):
    with pytest.raises(BadText, match="share of activations that is not clipped, above 0 and at most 1"):
        calibrate(tiny(), [ids()], percentile_alpha=alpha)


def test_no_tokens_are_refused():
    with pytest.raises(BadText, match="given no tokens"):
        calibrate(tiny(), [])


def test_the_same_settings_are_remembered(cache, measured):
    first = calibrate(tiny(), ids().split(2), percentile_alpha=0.99)
    assert calibrate(tiny(), ids().split(2), percentile_alpha=0.99) == first
    assert len(measured) == 1


def _other_weight(model: Mamba) -> None:
    model.backbone.layers[0].mixer.D.data[0] += 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"percentile_alpha": 0.999},
        {"batches": [ids(seed=1)]},
        {"batches": [ids(samples=5)]},
        {"batches": [ids(length=39)]},
        {"model": tiny(seed=1)},
        {"model": _other_weight},
    ],
    ids=["alpha", "text", "number", "length", "model", "one weight"],
)
def test_a_changed_setting_is_calibrated_anew(change, cache, measured):
    model = tiny()
    calibrate(model, [ids()], percentile_alpha=0.99)
    given = {"model": model, "batches": [ids()], "percentile_alpha": 0.99} | change
    if given["model"] is _other_weight:
        _other_weight(model)
        given["model"] = model
    calibrate(**given)
    assert len(measured) == 2


def _flip(path: Path) -> None:
    text = path.read_bytes()
    at = text.index(b'"u":0.0') + 7
    path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])


def _of_another(path: Path) -> None:
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"samples":6', b'"samples":7')
    path.write_bytes(module.text(module.crc32c(body)).encode() + b"\n" + body)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        _of_another,
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe nonsense \n{}"),
    ],
    ids=["one bit", "other settings", "cut", "empty", "nonsense"],
)
def test_a_damaged_memory_is_not_believed_and_said(damage, cache, measured, caplog):
    first = calibrate(tiny(), [ids()])
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    damage(path)
    with caplog.at_level(logging.WARNING, "layerscope"):
        assert calibrate(tiny(), [ids()]) == first
    assert "cannot be used" in caplog.text
    assert "calibrating anew" in caplog.text
    assert len(measured) == 2
    assert path.read_bytes() == whole


def test_without_a_place_to_remember_it_is_calibrated_each_time(measured, monkeypatch):
    monkeypatch.setattr(module, "cache_folder", lambda: None)
    assert calibrate(tiny(), [ids()]) == calibrate(tiny(), [ids()])
    assert len(measured) == 2


def test_a_calibration_reads_back_from_json(cache):
    found = calibrate(tiny(), [ids()], percentile_alpha=0.99)
    assert Calibration.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    settings = found.settings
    assert (settings.samples, settings.tokens, settings.percentile_alpha) == (6, 240, 0.99)


@pytest.mark.parametrize("values", [{}, {"settings": {}, "layers": []}, {"settings": 3, "layers": []}])
def test_what_is_no_calibration_is_refused(values):
    with pytest.raises(ValueError, match="this is no calibration"):
        Calibration.from_dict(values)
