"""A decoder layer by hand, with one fault planted in its own code at a time: the operation and its role are named."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy

import pytest
import torch
from torch import nn

from layerscope.diagnose.operations import differences, traced

HEADS, SIZE, TOKENS = 4, 8, 6
HIDDEN = HEADS * SIZE


class Attention(nn.Module):
    """Rotary causal attention, as it is written everywhere; `fault` names what is wrong with it."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        query, key = self.turned(query, x.dtype), self.turned(key, x.dtype)
        scale = 0.25 if self.fault == "scale" else SIZE**-0.5
        scores = query @ key.transpose(-1, -2)
        if self.fault != "no scale":
            scores = scores * scale
        if self.fault == "cast":
            scores = scores.to(torch.float8_e4m3fn).to(x.dtype)
        lowest = torch.finfo(x.dtype).min
        mask = torch.full((TOKENS, TOKENS), lowest, dtype=x.dtype).triu(2 if self.fault == "mask" else 1)
        if self.fault != "no mask":
            scores = scores + mask
        weights = scores.softmax(-2 if self.fault == "softmax" else -1)
        mixed = weights @ (key if self.fault == "wiring" else value)
        if self.fault != "transposition":
            mixed = mixed.transpose(1, 2)
        return mixed.reshape(x.shape)

    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)

    def turned(self, x, dtype):
        base = 500000.0 if self.fault == "rope" else 10000.0
        angles = torch.outer(torch.arange(TOKENS).float(), base ** (-torch.arange(0, SIZE, 2).float() / SIZE))
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
        return x * cos - half * sin if self.fault == "turn" else x * cos + half * sin


class Layer(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.attention, self.mlp, self.norm = Attention(), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x):
        hidden = self.attention(self.norm(x))
        hidden = hidden if self.fault == "first residual" else x + hidden
        further = self.mlp(self.norm(hidden))
        if self.fault == "second residual":
            return further
        return hidden - further if self.fault == "sign" else hidden + further


def logged(module, inputs, *, given=None):
    """Log a module's own code; `given` are the results of modules inside that it goes on with."""
    values, seen, running = iter(given or ()), [], [module]

    def leave(inner, args, output):
        running.pop()
        seen.append(output)
        return next(values) if given else None

    with ExitStack() as stack:
        for inner in module.children():
            stack.callback(inner.register_forward_pre_hook(lambda inner, args: running.append(inner)).remove)
            stack.callback(inner.register_forward_hook(leave).remove)
        return traced(lambda: module(inputs), inside=lambda: running[-1] is module), seen


def compared(kind, fault, dtype=torch.float32, *, floor=True):
    torch.manual_seed(0)
    good = kind().eval()
    bad = deepcopy(good).to(dtype)
    bad.fault = fault
    inputs = torch.randn(2, TOKENS, HIDDEN)
    reference, given = logged(good, inputs)
    low = (
        logged(deepcopy(good).to(dtype), inputs.to(dtype), given=[value.to(dtype) for value in given])[0]
        if floor
        else None
    )
    return differences(reference, logged(bad, inputs.to(dtype), given=[value.to(dtype) for value in given])[0], low)


FAULTS = {
    "scale": (
        "mul",
        "softmax scale",
        "it multiplies by 0.25 where the reference multiplies by 0.3536: the softmax scale",
    ),
    "no scale": ("mul", "softmax scale", "it lacks the reference's mul by 0.3536: the softmax scale"),
    "mask": ("triu", "mask", "its triu has diagonal 2 where the reference has 1: the mask"),
    "no mask": ("add", "mask", "it lacks the reference's add: the mask"),
    "rope": ("pow", "rope", "it has powers of 5e+05 where the reference has powers of 1e+04: the rope"),
    "turn": ("sub", "rope", "it has sub where the reference has add"),
    "softmax": ("softmax", "attention", "its softmax has dim -2 where the reference has -1: the attention"),
    "transposition": ("transpose", "transposition", "it lacks the reference's transpose"),
    "wiring": ("bmm", "operation", "is another tensor than the reference's"),
    "cast": ("to", "cast", "it has a cast to float8_e4m3fn that the reference has not"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_operation_is_named(fault, dtype):
    found = compared(Attention, fault, dtype)
    name, what, words = FAULTS[fault]
    assert (found[0].name, found[0].what) == (name, what)
    assert words in found[0].because


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fault", "index"), [("first residual", 0), ("second residual", 1)])
def test_a_missing_residual_is_told_from_the_other(fault, index, dtype):
    [found] = compared(Layer, fault, dtype)
    assert found.what == "residual"
    assert found.because == "it lacks the reference's add: its input is not added, a missing residual"
    assert found.index == index


def test_a_difference_is_told_from_a_sum():
    [found] = compared(Layer, "sign")
    assert found.because == "it has sub where the reference has add: the residual"


@pytest.mark.parametrize("floor", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Attention, Layer])
def test_rounding_makes_no_difference(kind, dtype, floor):
    if floor or dtype is torch.float32:
        assert compared(kind, "", dtype, floor=floor) == ()


def test_an_attention_kernel_tells_its_scale_and_its_mask():
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))

    def attend(**how):
        return traced(lambda: nn.functional.scaled_dot_product_attention(x, x, x, **how))

    [scaled] = differences(attend(scale=0.3), attend(scale=0.5))
    assert scaled.because == "its attention has scale 0.5 where the reference has 0.3: the softmax scale"
    [causal] = differences(attend(is_causal=True), attend(is_causal=False))
    assert causal.what == "mask"
    assert differences(attend(scale=0.3), attend(scale=0.3)) == ()


def test_a_mask_that_is_given_from_outside_is_off_by_one():
    torch.manual_seed(0)
    scores, lowest = torch.randn(1, 2, 5, 5), torch.finfo(torch.float32).min

    def masked(diagonal):
        mask = torch.full((1, 1, 5, 5), lowest).triu(diagonal)
        return traced(lambda: (scores + mask).softmax(-1))

    [found] = differences(masked(1), masked(0))
    assert found.what == "mask"
    assert found.because == "its mask is off by one along axis 3: 5 of 25 places differ"
    assert differences(masked(1), masked(1)) == ()


def test_what_changes_nothing_makes_no_difference():
    x, empty = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.empty(0, 6)

    def cached():
        return traced(lambda: (torch.cat([empty, x]) * 0.5).softmax(-1))

    [found] = differences(cached(), traced(lambda: (x * 0.25).softmax(-1)))
    assert found.what == "softmax scale"
    assert differences(cached(), traced(lambda: (x * 0.5).softmax(-1))) == ()


def test_other_code_is_not_set_against_this_one():
    x = torch.randn(4, 4)
    assert (
        differences(
            traced(lambda: (x @ x).relu()), traced(lambda: x.sin().exp().tanh().sigmoid().cos().sqrt().abs().neg() * 2)
        )
        == ()
    )


def test_only_the_own_code_is_logged():
    torch.manual_seed(0)
    layer, inputs = Layer(), torch.randn(2, TOKENS, HIDDEN)
    assert [call.name for call in logged(layer, inputs)[0]] == ["add", "add"]


def test_what_is_written_over_later_is_kept_as_it_was():
    x = torch.ones(3)

    def run():
        y = x * 2
        y.add_(5)

    doubled, added = traced(run)
    assert doubled.outputs[0].tolist() == [2, 2, 2]
    assert added.inputs[0].tolist() == [2, 2, 2]
    assert added.outputs[0].tolist() == [7, 7, 7]
    assert added.sources == (0,)


def test_what_the_code_raises_passes_through():
    with pytest.raises(RuntimeError, match="shape"):
        traced(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))


def test_gradients_flow_through_what_is_logged():
    x = torch.ones(3, requires_grad=True)
    calls = traced(lambda: (x * 2).sum().backward(), inside=lambda: True)
    assert x.grad.tolist() == [2, 2, 2]
    assert calls[0].outputs[0].tolist() == [2, 2, 2]
