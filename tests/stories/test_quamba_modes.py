"""Somebody holds the quantised modes of a trained Mamba against each other and against fp32.

The errors come in an order that has reasons, and what is said to be INT8 is: a float that leaks into it is caught.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from integers import convolution, products
from layerscope import record
from layerscope.errors import Unsupported
from layerscope.models.mamba import Mamba, quamba_small, sample_batches
from layerscope.modes.quamba import QUAMBA_MODES, Calibration, Codes, calibrate, quantised, stages
from layerscope.modes.quamba.stages import Convolution, Int8Scan, Projection


@pytest.fixture(scope="module")
def model() -> Mamba:
    return quamba_small()


@pytest.fixture(scope="module")
def calibration(model: Mamba, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYERSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return calibrate(model, sample_batches(4, 256, split="calibration"))


def layers_of(model: nn.Module) -> list[torch.Tensor]:
    """What every layer gives on text that calibration has not seen."""
    outputs: list[torch.Tensor] = []
    layers = model.backbone.layers
    handles = [layer.register_forward_hook(lambda _, args, out: outputs.append(out)) for layer in layers]
    with torch.no_grad():
        model(torch.cat(sample_batches(2, 256, split="recorded")))  # of fewer tokens the processor's rounding decides
    for handle in handles:
        handle.remove()
    return outputs


@pytest.fixture(scope="module")
def given(model: Mamba, calibration: Calibration) -> dict[str, list[torch.Tensor]]:
    variants = {mode: layers_of(quantised(model, mode, calibration)) for mode in QUAMBA_MODES}
    return {"fp32": layers_of(model), **variants}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("2-4", "u is not rounded for the scan, and all else is as in 0"),
        ("1", "neither the convolution nor the scan rounds anything"),
    ],
    ids=["2-4", "1"],
)
def test_modes_that_round_less_end_closer_to_fp32_than_0(given, mode, reason):
    assert apart(given[mode][-1], given["fp32"][-1]) < apart(given["0"][-1], given["fp32"][-1]), reason


def test_every_mode_is_near_fp32_and_none_is_fp32(given):
    for mode in QUAMBA_MODES:
        assert 1e-3 < apart(given[mode][-1], given["fp32"][-1]) < 0.5, mode


def test_2_0_is_0_because_codes_survive_being_floats(given):
    assert all(torch.equal(one, other) for one, other in zip(given["2-0"], given["0"], strict=True))


@pytest.mark.parametrize("mode", ["2-1", "2-2"])
def test_2_1_and_2_2_differ_from_0_by_rounding_which_is_far_less_than_what_0_loses(given, mode):
    for layer, (one, base, exact) in enumerate(zip(given[mode], given["0"], given["fp32"], strict=True)):
        assert apart(one, base) < 0.25 * apart(base, exact), layer
    assert apart(given[mode][0], given["0"][0]) < 1e-3  # before any layer could carry a step on


# A float leak ------------------------------------------------------------------------------------


def leaks(variant: nn.Module, *, layer: int = 0) -> list[str]:
    """Run a variant, and name the stages of a layer whose sums are not the integers that int8 codes add up to."""
    found: list[str] = []
    checked: set[str] = set()

    def watched(name: str, compute: Callable, oracle: Callable) -> Callable:
        def check(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            checked.add(name)
            sums = compute(x, weight)
            if not x.dtype == weight.dtype == torch.int8 or sums.dtype != torch.int32:
                found.append(f"{name}: {x.dtype} x {weight.dtype} -> {sums.dtype}")
            elif not np.array_equal(sums.numpy(), oracle(x, weight)):
                found.append(f"{name}: other sums than the integers'")
            return sums

        return check

    for name, stage in variant.backbone.layers[layer].mixer.named_children():
        if isinstance(stage, Projection):
            stage.arithmetic = stage.arithmetic._replace(products=watched(name, stage.arithmetic.products, products))
        if isinstance(stage, Convolution):
            stage.arithmetic = stage.arithmetic._replace(
                convolution=watched(name, stage.arithmetic.convolution, convolution)
            )
    with torch.no_grad():
        variant(sample_batches(1, 16, split="recorded")[0])
    assert checked >= {"in_proj", "x_proj", "dt_proj", "out_proj"}
    return found


@pytest.mark.parametrize("mode", QUAMBA_MODES)
def test_without_a_leak_every_sum_of_every_int8_stage_is_the_integers(model, calibration, mode):
    assert leaks(quantised(model, mode, calibration)) == []


def _float_weight(stage: Projection, linear: nn.Linear) -> None:
    stage.weight = (linear.weight / stage.weight_scale[:, None]).detach()  # the weight, not rounded


def _float_sums(stage: Projection, linear: nn.Linear) -> None:
    almost = (linear.weight / stage.weight_scale[:, None]).detach()
    stage.arithmetic = stage.arithmetic._replace(products=lambda x, weight: (x.float() @ almost.t()).to(torch.int32))


@pytest.mark.parametrize(
    ("leak", "says"),
    [
        (_float_weight, "x_proj: torch.int8 x torch.float32 -> torch.int32"),
        (_float_sums, "x_proj: other sums than the integers'"),
    ],
    ids=["float weight", "int32 sums of a float weight"],
)
def test_a_float_that_leaks_into_a_projection_is_caught_by_name(model, calibration, leak, says):
    variant = quantised(model, "2-1", calibration)
    leak(variant.backbone.layers[0].mixer.x_proj, model.backbone.layers[0].mixer.x_proj)
    assert leaks(variant) == [says]


@pytest.mark.parametrize("stage", [Convolution, Int8Scan, Projection])
def test_a_stage_that_forgets_to_round_cannot_run(model, calibration, stage, monkeypatch):
    variant = quantised(model, "0", calibration)
    real = stage.forward

    def leaking(self, *args):
        with monkeypatch.context() as patch:
            patch.setattr(stages, "quantise", lambda x, scale: Codes((x / scale).clamp(-127, 127), scale))
            return real(self, *args)

    monkeypatch.setattr(stage, "forward", leaking)
    with pytest.raises(Unsupported, match="these are float32: a float leaked into an INT8 stage"):
        variant(sample_batches(1, 8, split="recorded")[0])


def test_codes_between_the_stages_are_recorded_as_the_int8_they_are(model, calibration):
    variant = quantised(model, "0", calibration)
    with record(variant, "backbone.layers.3.mixer.conv1d") as recording, torch.no_grad():
        variant(sample_batches(1, 32, split="recorded")[0])
    found = {str(point): recording.run.tensor(str(point)) for point in recording.run.points}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "backbone.layers.3.mixer.conv1d:output[codes]": torch.int8,
        "backbone.layers.3.mixer.conv1d:output[scale]": torch.float32,
    }
