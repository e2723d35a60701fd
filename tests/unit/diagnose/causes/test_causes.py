"""The causes of results that differ: planted after a healthy module, and never seen in rounding alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.diagnose import causes
from layerscope.diagnose.causes import Case, cause_of
from layerscope.diagnose.operations import Operation


def zero_token(got):
    got = got.clone()
    got[:, 5] = 0
    return got


def drop_token(got):
    return torch.cat([got[:, :5], got[:, 6:], got[:, -1:]], 1)


def scale_feature(got):
    got = got.clone()
    got[..., 7] *= 30
    return got


def on_a_grid(levels, *, rows=False):
    def after(got):
        step = (got.abs().amax(-1, keepdim=True) if rows else got.abs().max()) / levels
        return (got / step).round() * step

    return after


def swap_heads(got):
    return got.view(2, 16, 6, 16)[:, :, [1, 0, 3, 2, 5, 4]].flatten(2)


FAULTS = {
    "a factor": (lambda got: 1.05 * got, "scale", "its output is the reference's times 1.0"),
    "a sign": (torch.neg, "scale", "its output is the reference's with the sign turned"),
    "one feature times 30": (scale_feature, "scale", "in feature 7 of 96"),
    "a bound": (lambda got: got.clamp(-1, 1), "saturation", "of its values lie on the bound 1 and -1 where"),
    "an upper bound": (lambda got: got.clamp(max=1.0), "saturation", "of its values lie on the bound 1 where"),
    "int8": (on_a_grid(127), "grid", "(8 bits)"),
    "int4": (on_a_grid(7), "grid", "(4 bits)"),
    "int8 per token": (on_a_grid(127, rows=True), "grid", "(8 bits, one per row)"),
    "int4 per token": (on_a_grid(7, rows=True), "grid", "(4 bits, one per row)"),
    "float8": (lambda got: got.to(torch.float8_e4m3fn).to(got.dtype), "cast", "one of float8_e4m3fn's"),
    "a shift": (lambda got: got.roll(1, 1), "tokens", "its tokens are shifted by 1"),
    "a shift back": (lambda got: got.roll(-2, 1), "tokens", "its tokens are shifted by -2"),
    "a zero token": (zero_token, "tokens", "token 5 of 16 in its output is zero"),
    "a dropped token": (drop_token, "tokens", "token 5 of 16 is dropped, and those after move up"),
    "a shorter result": (lambda got: got[:, 1:], "tokens", "token 0 is dropped along axis 1"),
    "reversed tokens": (lambda got: got.flip(1), "order", "its tokens are the reference's in reverse order"),
    "other heads": (swap_heads, "heads", "its heads are in another order: blocks of 16 features"),
    "a transposition": (lambda got: got.transpose(1, 2), "shape", "axes 1 and 2 are exchanged"),
    "a lost axis": (lambda got: got[None], "shape", "the same but for axes of size 1"),
    "a constant": (lambda got: got + 0.25, "constant", "its output is the reference's plus 0.25"),
    "nothing": (torch.zeros_like, "operation", "its output is all zero"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named(planted, dtype, fault):
    after, kind, words = FAULTS[fault]
    cause = cause_of(planted(after=after, dtype=dtype))
    assert cause.kind == kind
    assert words in cause.because
    assert str(cause) == cause.because


@pytest.mark.parametrize("width", [64, 192])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_has_no_cause(planted, dtype, seed, width):
    inputs = torch.randn(2, 16, width, generator=torch.Generator().manual_seed(seed))
    for module in (nn.Linear(width, 96), nn.LayerNorm(width), nn.GELU(), nn.ReLU(), nn.Hardtanh()):
        assert cause_of(planted(module, inputs=inputs, dtype=dtype)).kind == "unknown"


def test_rounding_of_another_order_has_no_cause(planted, dtype):
    unit = torch.finfo(dtype).eps
    noisy = planted(after=lambda got: got * (1 + unit * torch.randn_like(got)), dtype=dtype)
    assert cause_of(noisy).kind == "unknown"


def test_what_fits_no_pattern_is_unknown(planted, dtype):
    cause = cause_of(planted(after=lambda got: got + 0.1 * torch.randn_like(got), dtype=dtype))
    assert (cause.kind, cause.because, dict(cause.evidence)) == ("unknown", "no known cause", {})


def test_where_it_is_confined_to_is_told(planted, dtype):
    def after(got):
        return torch.cat([got[:, :-2], got[:, -2:] + 0.3 * torch.randn_like(got[:, -2:])], 1)

    cause = cause_of(planted(after=after, dtype=dtype))
    assert cause.kind == "unknown"
    assert cause.because.endswith("only tokens 14 and 15 of 16 differ along axis 1")


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_a_cast_inside_is_seen_in_the_values(planted, narrow):
    cause = cause_of(planted(after=lambda got: got.to(narrow).to(got.dtype)))
    assert cause.kind == "cast"
    assert cause.evidence["dtype"] == str(narrow).removeprefix("torch.")


def test_the_narrowest_dtype_is_not_one_that_the_candidate_has_anyway(planted):
    healthy = planted(dtype=torch.float16)
    assert cause_of(healthy).kind == "unknown"
    cause = cause_of(planted(after=lambda got: got.to(torch.bfloat16).to(got.dtype), dtype=torch.float16))
    assert cause.evidence["dtype"] == "bfloat16"


def test_small_numbers_of_eight_bits_are_cast_not_quantised(planted, dtype):
    small = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2)) / 200
    cause = cause_of(
        planted(nn.Identity(), inputs=small, after=lambda got: got.to(torch.float8_e4m3fn).to(got.dtype), dtype=dtype)
    )
    assert cause.kind == "cast"


def test_a_missing_residual_is_told(planted, dtype):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return x + self.inner(x)

    inputs = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3))
    cause = cause_of(planted(Residual(), inputs=inputs, after=lambda got: got - inputs.to(dtype), dtype=dtype))
    assert cause.because == "its input is not added: a missing residual"
    assert cause_of(planted(Residual(), inputs=inputs, dtype=dtype)).kind == "unknown"


def test_a_module_that_is_skipped_is_told(planted, dtype):
    inputs = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3))
    cause = cause_of(planted(nn.Linear(64, 64), inputs=inputs, after=lambda got: inputs.to(dtype), dtype=dtype))
    assert cause.because == "its output is its input unchanged"


def test_a_bias_that_is_not_added_is_named(planted, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 96)
    nn.init.normal_(linear.bias)
    cause = cause_of(planted(linear, after=lambda got: got - linear.bias.to(dtype), dtype=dtype))
    assert cause.because == "its bias is not added"


def test_two_runs_that_differ_are_random(planted, dtype):
    dropout = nn.Dropout(0.2)
    dropout.eval()
    cause = cause_of(planted(dropout, lambda m: m.train(), again=lambda got: dropout.train()(got), dtype=dtype))
    assert cause.kind == "randomness"
    assert cause.because.endswith("dropout (p 0.2) is on")
    steady = planted(after=lambda got: 1.05 * got, again=lambda got: 1.05 * got, dtype=dtype)
    assert cause_of(steady).kind == "scale"


def test_what_is_not_finite_is_counted_and_placed(planted, dtype):
    def after(got):
        got = got.clone()
        got[1, 2, 3:5] = float("nan")
        return got

    cause = cause_of(planted(after=after, dtype=dtype))
    assert cause.because == "its output has 2 NaN values, first at [1, 2, 3], and its inputs are finite"


def test_an_overflow_is_told_from_its_dtype():
    wanted = torch.full((4, 4), 1e5)
    case = Case("m", nn.Identity(), nn.Identity(), (wanted,), wanted, wanted.half())
    assert cause_of(case).because.endswith("float16 ends at 65504, the reference has 1e+05")


def test_an_exception_is_repeated_in_its_first_line():
    case = Case("m", nn.Identity(), nn.Identity(), raised=RuntimeError("mat1 and mat2\nmore"))
    assert str(cause_of(case)) == "it raises RuntimeError: mat1 and mat2"


def test_the_first_operation_that_differs_is_the_cause(planted):
    found = Operation("mul", "scale", "it multiplies by 0.25 where the reference has 0.5", 0.5, 1e-7, 3)
    cause = cause_of(planted(own_code=True, operations=(found,), uncalled=()))
    assert cause.kind == "operation"
    assert cause.because == found.because


def test_a_detector_that_fails_is_named_and_loses_nothing(planted, monkeypatch):
    def fail(case, values):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(causes, "_PATTERNS", (fail,))
    cause = cause_of(planted(after=lambda got: got + torch.randn_like(got)))
    assert cause.evidence["failed"] == {"fail": "RuntimeError: out of memory"}


def test_the_two_modules_are_left_as_they_were(planted):
    case = planted(spoil=lambda m: m.weight.mul_(1.05))
    before = [tensor.clone() for module in (case.reference, case.candidate) for tensor in module.state_dict().values()]
    state = torch.random.get_rng_state()
    cause_of(case)
    after = [tensor for module in (case.reference, case.candidate) for tensor in module.state_dict().values()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert torch.equal(state, torch.random.get_rng_state())


def integers(got, wanted, **known):
    return Case("m", nn.Identity(), nn.Identity(), wanted=torch.tensor(wanted), got=torch.tensor(got), **known)


def test_integers_show_their_first_differing_values_and_a_common_step():
    cause = cause_of(integers([[0, 1, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6]]))
    assert cause.because == (
        "its output is 3, 4, 5 and 6 where the reference's is 2, 3, 4 and 5, from [0, 2] on: 5 of 7 differ, all by +1"
    )
    assert cause.evidence["values"] == ([2, 3, 4, 5], [3, 4, 5, 6])
    assert "all by" not in cause_of(integers([1, 5], [2, 3])).because
    assert cause_of(integers([1, 5], [1, 5])).kind == "unknown"


def test_integers_that_an_operation_makes_are_told_with_it():
    made = Operation("arange", "operation", "its arange has start 1 where the reference has 0", None, None, 0)
    cause = cause_of(integers([1, 2], [0, 1], operations=(made,)))
    assert cause.because.endswith("all by +1; its arange has start 1 where the reference has 0")
