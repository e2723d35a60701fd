"""What is measured where, on models small enough to know by heart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.diagnose.replay.captured_calls import capture
from layerscope.diagnose.replay.passes import pair
from layerscope.diagnose.replay.replay import Guidance, Nudge, Site, cast, guide


class Pair(nn.Module):
    """Two layers and something of its own between and after them."""

    def __init__(self, *, between=1.0, after=0.0, inplace=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between, self.after, self.inplace = between, after, inplace

    def forward(self, x):
        h = self.first(x)
        h = h.mul_(self.between) if self.inplace else h * self.between
        return self.second(h) + self.after


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


def guided(candidate, reference=None, guidance=None):
    reference = reference or Pair()
    captured = capture(reference, lambda: reference(X), lambda: None)
    names = {name: None for name, _ in candidate.named_modules()}
    partners = pair(names, names).candidate
    with torch.no_grad():
        return guide(dict(candidate.named_modules()), lambda: candidate(X), captured, partners, guidance)


def wrong(result):
    return {str(place) if place.into else place.owner[0] or "." for place, m in result.measured.items() if not m.equal}


def test_the_same_model_differs_nowhere():
    result = guided(Pair())
    assert wrong(result) == set()
    assert {place.owner[0] for place in result.measured} == {"", "first", "second"}


def test_a_changed_layer_is_seen_at_its_own_output_alone():
    candidate = Pair()
    with torch.no_grad():
        candidate.first.weight.mul_(2)
    assert wrong(guided(candidate)) == {"first"}


def test_code_between_two_layers_is_seen_at_what_it_hands_on():
    result = guided(Pair(between=2.0))
    assert wrong(result) == {"input[0] of second"}
    place = Site(("", 0), ("second", 0), (0,))
    assert result.measured[place].scale == pytest.approx(2.0)


def test_code_after_the_last_layer_is_seen_at_the_output():
    assert wrong(guided(Pair(after=1.0))) == {"."}


def test_values_that_are_changed_in_place_afterwards_are_kept_as_they_were():
    assert wrong(guided(Pair(between=2.0, inplace=True), Pair(between=2.0, inplace=True))) == set()
    assert wrong(guided(Pair(between=2.0), Pair(between=2.0, inplace=True))) == set()


def test_nothing_is_replaced_inside_a_whole_call():
    candidate = Pair(between=2.0)
    result = guided(candidate, guidance=Guidance(whole=frozenset({""})))
    with torch.no_grad():
        assert torch.equal(result.outputs["", 0][()], candidate(X))
    assert {place.owner[0] for place in result.measured} == {""}


def test_a_nudge_moves_every_value_by_a_unit_in_the_last_place():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        like = value.to(dtype)
        nudged = cast(value, like=like, nudge=Nudge(0))
        off = ((nudged.double() - like.double()) / like.double()).abs()
        assert nudged.dtype == dtype
        assert float((off > 0).float().mean()) > 0.99
        assert float(off.max()) <= 2 * torch.finfo(dtype).eps


def test_finite_numbers_stay_finite_in_a_narrower_dtype():
    value = torch.tensor([-3.4e38, 1.0, float("-inf"), float("nan"), 7e4])
    made = cast(value, like=torch.empty(5, dtype=torch.float16))
    assert made.tolist()[:3] == [-65504.0, 1.0, float("-inf")]
    assert made[3].isnan()
    assert float(made[4]) == 65504.0


def test_what_a_module_raises_is_kept_with_the_call_it_came_from():
    candidate = Pair()
    candidate.second.forward = lambda x: x @ torch.ones(3, 3)
    result = guided(candidate)
    assert isinstance(result.raised, RuntimeError)
    assert result.at == ("second", 0)


def test_no_hook_is_left_behind():
    candidate = Pair()
    guided(candidate)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in candidate.modules())
