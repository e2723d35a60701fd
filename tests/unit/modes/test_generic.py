"""The generic modes: what they do to weights, by numpy in float64 and by torch's own casts."""

import copy
import sys

import numpy as np
import pytest
import torch
from torch import nn

from layerscope.errors import MissingExtra
from layerscope.models.tiny import tiny_transformer
from layerscope.modes import generic
from layerscope.modes.registry import choose, modes_of, variant, why_not

QUANTISED = ["int8-weight", "int8-dynamic", "int4-weight", "fp8"]


def by_name(name: str, model: nn.Module):
    return next(one for one in modes_of(model) if one.name == name)


def stored(linear: nn.Linear) -> np.ndarray:
    """Return the values that a quantised weight stands for, by its library's own word."""
    return linear.weight.dequantize().detach().double().numpy()


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_floating_mode_is_torchs_own_cast(name, dtype):
    model = tiny_transformer(layers=2, hidden=32, heads=2)
    ids = torch.arange(9).view(1, 9)
    got = variant(model, name)(ids)
    assert got.dtype == dtype
    assert torch.equal(got, copy.deepcopy(model).to(dtype)(ids))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_fp32_is_the_reference_whatever_the_model_is_in(dtype):
    assert variant(nn.Linear(2, 2, dtype=dtype), "fp32").weight.dtype == torch.float32


def test_whole_numbers_stay_what_they_are_in_another_dtype():
    model = nn.BatchNorm1d(3)
    assert variant(model, "bf16").num_batches_tracked.dtype == torch.int64


def test_int8_weights_are_within_half_a_step_of_a_grid_of_256_for_each_row():
    model = nn.Linear(48, 5)
    weight = model.weight.detach().double().numpy()
    got = stored(variant(model, "int8-weight"))
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(got - weight) <= 0.501 * step).all()
    assert not np.array_equal(got, weight)
    for row in got:
        gaps = np.diff(np.unique(row))
        assert np.allclose(gaps / gaps.min(), np.round(gaps / gaps.min()), atol=1e-3)


def test_int8_dynamic_sums_products_of_codes():
    model, x = nn.Linear(64, 5, bias=False), torch.randn(3, 64)
    x[:, 0], model.weight.data[:, 0] = (
        5,
        1,
    )  # the largest lies half-way between two codes; of a positive one, one is left
    weight, rows = model.weight.detach().double().numpy(), x.double().numpy()
    # Symmetric codes of 8 bits: 255 steps from end to end.
    steps = [np.abs(values).max(axis=1, keepdims=True) / 127.5 for values in (rows, weight)]
    codes = [np.clip(np.round(v / s), -128, 127) for v, s in zip((rows, weight), steps, strict=True)]
    expected = (codes[0] @ codes[1].T) * steps[0] * steps[1].T
    got = variant(model, "int8-dynamic")(x).detach().double().numpy()
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(got - rows @ weight.T).max() > 1e-3 * np.abs(expected).max()


def test_int4_weights_have_at_most_16_values_in_each_group_of_32():
    model = nn.Linear(96, 4)
    weight = model.weight.detach().double().numpy().reshape(4, 3, 32)
    got = stored(variant(model, "int4-weight")).reshape(4, 3, 32)
    assert max(len(np.unique(group)) for row in got for group in row) <= 16
    step = np.abs(weight).max(axis=-1, keepdims=True) / 7
    assert (np.abs(got - weight) <= 0.501 * step).all()


def test_int4_leaves_layers_of_another_width_as_they_are():
    model = nn.Sequential(nn.Linear(32, 30), nn.Linear(30, 2))
    own = variant(model, "int4-weight")
    assert type(own[0].weight) is not nn.Parameter
    assert torch.equal(own[1].weight, model[1].weight)


def test_fp8_weights_are_torchs_own_cast_to_e4m3_of_scaled_rows():
    model = nn.Linear(40, 6)
    weight = model.weight.detach().double()
    scale = weight.abs().amax(dim=1, keepdim=True) / 448  # the largest e4m3
    expected = (weight / scale).float().to(torch.float8_e4m3fn).double() * scale
    torch.testing.assert_close(torch.from_numpy(stored(variant(model, "fp8"))), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_zeros_gives_zero_and_its_bias(name, dtype):
    model = nn.Linear(32, 4).to(dtype)
    model.weight.data[1] = 0
    model.weight.data[2] = torch.tensor([0, -0.0]).repeat(16)
    x = torch.randn(3, 32).to(dtype)
    got = variant(model, name)(x)
    assert torch.equal(got[:, 1:3], model.bias[1:3].expand(3, 2))
    torch.testing.assert_close(got[:, ::3], model(x)[:, ::3], rtol=0.2, atol=0.2)
    nn.init.zeros_(model.weight)
    assert torch.equal(variant(model, name)(x), model.bias.expand(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_makes_zeros_of_a_row_that_is_too_small_for_a_scale(dtype):
    model = nn.Linear(32, 4, bias=False).to(dtype)
    model.weight.data[1] = 0
    model.weight.data[1, :5] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert model.weight.data[1].any()
    got = variant(model, "fp8")(torch.ones(1, 32, dtype=dtype))
    assert torch.isfinite(got).all()
    assert got[0, 1] == 0


def test_fp8_of_other_rows_is_what_torchao_makes_of_them():
    ao = pytest.importorskip("torchao.quantization")
    model = nn.Linear(40, 6)
    theirs = copy.deepcopy(model)
    ao.quantize_(theirs, ao.Float8WeightOnlyConfig(set_inductor_config=False))
    model.weight.data[3] = 0
    ours = variant(model, "fp8").weight
    others = [0, 1, 2, 4, 5]
    assert torch.equal(ours.qdata.view(torch.uint8)[others], theirs.weight.qdata.view(torch.uint8)[others])
    assert torch.equal(ours.scale[others], theirs.weight.scale[others])


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_an_empty_batch_gives_an_empty_output_as_in_float(name, bias, shape):
    model = nn.Linear(32, 4, bias=bias)
    own = variant(model, name)
    got, wanted = own(torch.empty(shape)), model(torch.empty(shape))
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    x = torch.randn(3, 32)
    again = copy.deepcopy(own)
    own.weight = None
    assert torch.isfinite(again(x)).all()  # the copy has nothing of what it was copied from


def test_a_linear_with_a_forward_of_its_own_keeps_it():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model, x = Doubled(32, 4), torch.randn(2, 32)
    torch.testing.assert_close(variant(model, "int8-dynamic")(x), model(x), rtol=0.1, atol=0.1)
    model = nn.Linear(32, 4)
    model.forward = lambda input: torch.full((7,), 3.0)
    assert torch.equal(variant(model, "int8-dynamic")(x), torch.full((7,), 3.0))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_quantised_model_computes_in_the_models_own_dtype(name, dtype):
    model = tiny_transformer(layers=1, hidden=32, heads=2).to(dtype)
    ids = torch.arange(5).view(1, 5)
    wanted, got = model(ids), variant(model, name)(ids)
    assert got.dtype == dtype
    error = ((got - wanted).float().norm() / wanted.float().norm()).item()
    assert 0 < error < 0.5


def test_more_bits_are_less_error():
    model, ids = tiny_transformer(layers=2), torch.arange(20).view(1, 20)
    wanted = model(ids)
    errors = [
        (variant(model, name)(ids) - wanted).norm().item() for name in ("fp32", "int8-weight", "fp8", "int4-weight")
    ]
    assert errors[0] == 0
    assert errors == sorted(errors)


def test_a_layer_under_two_names_is_quantised_once_and_a_tied_embedding_stays():
    model = nn.Module()
    model.embed, model.one = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    model.inner = nn.Module()
    model.inner.two, model.one.weight = model.one, model.embed.weight
    own = variant(model, "int8-weight")
    assert own.one is own.inner.two
    assert type(own.one.weight) is not nn.Parameter
    assert type(own.embed.weight) is nn.Parameter
    assert own.embed(torch.tensor([3])).shape == (1, 32)


def test_the_projection_that_attention_uses_as_a_bare_weight_stays_in_float():
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(1, 4, 32)
    own = variant(model, "int8-weight")
    assert type(own.self_attn.out_proj.weight) is nn.Parameter
    assert type(own.linear1.weight) is not nn.Parameter
    with torch.enable_grad():  # torch's fused fast path reads weights behind the layer's back
        assert torch.isfinite(own.train()(x)).all()


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (nn.Conv2d(1, 1, 1), "fp8", "it has no Linear layer"),
        (nn.Linear(4, 4, dtype=torch.float64), "int8-weight", "none of its Linear layers has a weight in float32"),
        (nn.LazyLinear(4), "int8-weight", "none of its Linear layers"),
        (nn.LazyLinear(4), "fp16", "weight is not initialised yet; run the model once"),
        (nn.Linear(33, 4), "int4-weight", "no Linear layer is a multiple of 32 wide, which is the size of a group"),
        (nn.Linear(4, 4, dtype=torch.complex64), "bf16", "weight is complex, which has no bfloat16"),
        (nn.ReLU(), "fp16", "it has no floating-point parameter or buffer"),
    ],
)
def test_a_mode_that_does_not_fit_says_why_before_it_is_made(model, name, reason):
    assert why_not(by_name(name, model), model).startswith(reason)


def test_what_is_quantised_already_is_not_quantised_again():
    own = variant(nn.Linear(32, 4), "int8-weight")
    assert "none of its Linear layers" in why_not(by_name("fp8", own), own)
    assert "weight is quantised already (a Int8Tensor)" in why_not(by_name("bf16", own), own)


def test_without_torchao_the_mode_names_the_extra(monkeypatch):
    model = nn.Linear(32, 4)
    assert why_not(by_name("fp8", model), model) is None
    monkeypatch.setattr(generic, "find_spec", lambda name: None)
    assert why_not(by_name("fp8", model), model) == "it takes torchao: pip install 'layerscope[quant]'"
    with pytest.raises(MissingExtra, match=r"pip install 'layerscope\[quant\]'"):
        choose(["fp8"], model)
    assert [one.name for one in choose(["all"], model).modes] == ["fp32", "fp16", "bf16"]


def test_a_torchao_that_does_not_import_is_told_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingExtra, match=r"layerscope\[quant\]' \(importing it failed: "):
        variant(nn.Linear(32, 4), "fp8")


def test_no_setting_of_the_compiler_changes():
    import torch._inductor.config as settings

    before = settings.save_config_portable()
    for name in QUANTISED:
        variant(nn.Linear(32, 4), name)
    assert settings.save_config_portable() == before
