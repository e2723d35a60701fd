"""Every way in which weights go wrong is named with its parameter; rounded weights are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.diagnose.causes import Case, cause_of
from layerscope.diagnose.causes.weights import differing_weights, quantised_weights

ORDER = torch.randperm(96, generator=torch.Generator().manual_seed(1))


def quantised(weight, levels):
    step = weight.float().abs().amax(1, keepdim=True) / levels
    return ((weight.float() / step).round() * step).to(weight.dtype)


def test_weights_that_are_cast_do_not_differ(planted, dtype):
    assert differing_weights(planted(dtype=dtype)) is None
    assert quantised_weights(planted(dtype=dtype)) is None


@pytest.mark.parametrize("factor", [1.05, 1.01, 1.003, 0.5, 30.0])
def test_a_factor_is_found_exactly_whatever_the_rounding(planted, dtype, factor):
    cause = cause_of(planted(spoil=lambda m: m.weight.mul_(factor), dtype=dtype))
    assert cause.kind == "weights"
    assert cause.evidence["parameter"] == "weight"
    assert cause.evidence["factor"] == pytest.approx(factor, rel=3e-4)
    assert cause.because.startswith("its weight is the reference's times")


def test_a_sign_that_is_turned_is_said_to_be(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight.neg_(), dtype=dtype))
    assert cause.because == "its weight is the reference's with the sign turned"


def test_one_row_times_thirty_is_named(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight[3].mul_(30), dtype=dtype))
    assert cause.evidence["at"] == [3]
    assert cause.evidence["axis"] == "row"
    assert cause.evidence["factor"] == pytest.approx(30, rel=1e-2)


def test_scaled_columns_are_named(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight[:, 4:7].mul_(2), dtype=dtype))
    assert cause.because == "its weight is the reference's times 2.000 in columns 4 to 6 of 64"


def test_zeroed_rows_are_named(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight[5:9].zero_(), dtype=dtype))
    assert cause.because == "its weight has zeros in rows 5 to 8 of 96"
    whole = cause_of(planted(spoil=lambda m: m.weight.zero_(), dtype=dtype))
    assert whole.because == "its weight is all zero"


def test_a_bias_that_should_be_zero_is_named(planted):
    def plain():
        linear = nn.Linear(64, 96)
        nn.init.zeros_(linear.bias)
        return linear

    cause = cause_of(planted(plain(), lambda m: m.bias.fill_(0.25)))
    assert cause.because == "its bias goes up to 0.25 where the reference's is all zero"


def test_permuted_rows_are_found_with_their_order(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight.copy_(m.weight[ORDER]), dtype=dtype))
    assert cause.evidence["relation"] == "permuted"
    assert cause.evidence["axis"] == "row"
    assert cause.evidence["places"] == tuple(ORDER.tolist())


def test_permuted_columns_are_found(planted, dtype):
    order = torch.arange(64).roll(1)
    cause = cause_of(planted(spoil=lambda m: m.weight.copy_(m.weight[:, order]), dtype=dtype))
    assert cause.because == "its weight has the reference's columns rolled by 1"


def test_heads_in_another_order_are_blocks_of_rows(planted, dtype):
    def swap(m):
        m.weight.copy_(m.weight.view(6, 16, 64)[[1, 0, 2, 3, 4, 5]].reshape(96, 64))

    assert cause_of(planted(spoil=swap, dtype=dtype)).evidence["block"] == 16


def test_a_transposed_square_weight_is_found(planted, dtype):
    cause = cause_of(planted(nn.Linear(64, 64), lambda m: m.weight.copy_(m.weight.T.clone()), dtype=dtype))
    assert cause.because == "its weight is the reference's transposed"


def test_a_transposed_oblong_weight_is_found():
    one, two = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
    two.weight.data = one.weight.data.T.clone()
    cause = differing_weights(Case("suspect", one, two))
    assert cause.because == "its weight is the reference's transposed"


def test_a_flipped_kernel_is_found(planted):
    conv = nn.Conv2d(3, 4, 3)
    cause = cause_of(planted(conv, lambda m: m.weight.copy_(m.weight.flip(3)), inputs=torch.randn(1, 3, 8, 8)))
    assert cause.because == "its weight is the reference's flipped along axis 3"


def test_one_element_is_named_with_both_values(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight[5, 7].fill_(9), dtype=dtype))
    assert cause.evidence["at"] == (5, 7)
    assert cause.evidence["values"][1] == 9


def test_a_constant_that_was_added_is_told(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.bias.add_(0.5), dtype=dtype))
    assert cause.evidence["parameter"] == "bias"
    assert cause.evidence["offset"] == pytest.approx(0.5, rel=1e-2)


def test_other_weights_are_unrelated(planted, dtype):
    def other(m):
        m.weight.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(5)) / 8)

    assert "is unrelated to the reference's" in cause_of(planted(spoil=other, dtype=dtype)).because


def test_a_value_that_is_not_finite_is_found_in_the_weight(planted, dtype):
    cause = cause_of(planted(spoil=lambda m: m.weight[5, 7].fill_(float("nan")), dtype=dtype))
    assert cause.kind == "nonfinite"
    assert cause.because == "its weight has 1 value that is not finite, first at [5, 7]"


@pytest.mark.parametrize(("levels", "bits"), [(127, 8), (7, 4)])
def test_a_quantised_weight_lies_on_a_grid(planted, dtype, levels, bits):
    case = planted(spoil=lambda m: m.weight.copy_(quantised(m.weight, levels)), dtype=dtype)
    assert differing_weights(case) is None
    cause = quantised_weights(case)
    assert cause.evidence["bits"] == bits
    assert cause.evidence["per"] == "row"


def test_a_wrong_scale_shows_through_the_grid(planted, dtype):
    cause = differing_weights(planted(spoil=lambda m: m.weight.copy_(1.3 * quantised(m.weight, 7)), dtype=dtype))
    assert cause.evidence["factor"] == pytest.approx(1.3, rel=2e-2)
    assert cause.evidence["bits"] == 4


def test_one_wrong_scale_of_many_shows_through_the_grid(planted, dtype):
    def spoil(m):
        weight = quantised(m.weight, 127)
        weight[11] *= 1.5
        m.weight.copy_(weight)

    cause = differing_weights(planted(spoil=spoil, dtype=dtype))
    assert cause.evidence["at"] == [11]


def test_the_module_whose_weights_it_holds_is_named():
    torch.manual_seed(0)
    layers = {f"layers.{i}": nn.Linear(8, 8) for i in range(3)}
    candidate = nn.Linear(8, 8).to(torch.bfloat16)
    candidate.load_state_dict(layers["layers.2"].state_dict())
    cause = differing_weights(Case("layers.1", layers["layers.1"], candidate, others=layers))
    assert cause.because == "it holds the weights of layers.2"
    healthy = nn.Linear(8, 8).to(torch.bfloat16)
    healthy.load_state_dict(layers["layers.1"].state_dict())
    assert differing_weights(Case("layers.1", layers["layers.1"], healthy, others=layers)) is None


def test_parameters_that_are_exchanged_are_named():
    one, two = nn.ParameterDict(), nn.ParameterDict()
    torch.manual_seed(0)
    one["query"], one["key"] = torch.randn(4, 4), torch.randn(4, 4)
    two["query"], two["key"] = one["key"], one["query"]
    assert differing_weights(Case("m", one, two)).because.startswith("its query is the reference's key")


def test_a_buffer_and_a_mask_that_is_off_by_one_are_named(planted):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    one, two = Masked(), Masked()
    assert differing_weights(Case("m", one, two)) is None
    two.mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    assert differing_weights(Case("m", one, two)).because == "its mask is the reference's shifted by 1 along axis 0"


def test_weights_used_functionally_go_by_their_path():
    one = nn.MultiheadAttention(8, 2)
    two = nn.MultiheadAttention(8, 2)
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        two.out_proj.weight.mul_(1.05)
    cause = differing_weights(Case("attn", one, two, own_code=True, uncalled=("out_proj",)))
    assert cause.because == "its out_proj.weight is the reference's times 1.050"
    assert differing_weights(Case("attn", one, two, own_code=True, uncalled=())) is None


def test_a_missing_bias_is_told():
    one, two = nn.Linear(8, 4), nn.Linear(8, 4, bias=False)
    two.weight = one.weight
    assert differing_weights(Case("m", one, two)).because == "it has no bias where the reference has one"


def test_counters_are_no_weights():
    one, two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    two.num_batches_tracked += 5
    assert differing_weights(Case("m", one, two)) is None


def test_an_adapter_and_what_it_wraps_are_told_apart():
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.base_layer, self.lora_a = inner, nn.Linear(8, 2)

    one = nn.Linear(8, 8)
    assert differing_weights(Case("m", one, Adapter(one))) is None
    other = nn.Linear(8, 8)
    other.load_state_dict({name: 2 * tensor for name, tensor in one.state_dict().items()})
    assert differing_weights(Case("m", one, Adapter(other))).evidence["parameters"] == ["weight", "bias"]


def test_a_torchao_weight_is_compared_by_its_values():
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    one, two = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
    two.load_state_dict(one.state_dict())
    quantization.quantize_(two, quantization.Int8WeightOnlyConfig())
    case = Case("0", one[0], two[0])
    assert differing_weights(case) is None
    assert quantised_weights(case).evidence["bits"] == 8


@pytest.mark.stress
def test_fifty_thousand_rows_are_matched_in_seconds():
    torch.manual_seed(0)
    one, two = nn.Embedding(50_000, 128), nn.Embedding(50_000, 128)
    order = torch.randperm(50_000)
    two.weight.data = one.weight.data[order]
    cause = differing_weights(Case("embed", one, two))
    assert cause.evidence["places"] == tuple(order[:256].tolist())


def test_another_rope_base_is_told():
    class Rotary(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.register_buffer("inv_freq", base ** (-torch.arange(0, 16, 2).float() / 16))

    assert differing_weights(Case("rotary", Rotary(1e4), Rotary(1e4).to(torch.bfloat16))) is None
    cause = differing_weights(Case("rotary", Rotary(1e4), Rotary(5e5)))
    assert (
        cause.because == "its inv_freq has powers of 5e+05 where the reference's has powers of 1e+04: another rope base"
    )
