"""The state-space model: each stage against float64, the residual stream, causality, and what a hook sees."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from layerscope.models.mamba import CausalConv, Mamba, MambaConfig
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.drawing import drawn_weights

TINY = MambaConfig(hidden_size=16, num_hidden_layers=3, state_size=4, time_step_rank=2)
IDS = torch.tensor([list(b"a state space model reads bytes")])


@pytest.fixture
def model() -> Mamba:
    return assembled(TINY, drawn_weights(TINY, seed=0), source="a test")


def conv_step_by_step(conv, x):
    """Each output is the sum of the last taps, written out, in float64."""
    weight, x = conv.weight.double(), x.double()
    kernel = weight.shape[-1]
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for k in range(kernel):
            if t - kernel + 1 + k >= 0:
                out[:, t] += weight[:, 0, k] * x[:, t - kernel + 1 + k]
        if conv.bias is not None:
            out[:, t] += conv.bias.double()
    return out / (1 + torch.exp(-out))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64])
@pytest.mark.parametrize(("kernel", "bias"), [(4, True), (4, False), (1, True), (7, True)])
@torch.no_grad()
def test_the_convolution_agrees_with_float64(length, kernel, bias):
    torch.manual_seed(0)
    conv = CausalConv(5, kernel=kernel, bias=bias)
    for parameter in conv.parameters():
        parameter.normal_()
    x = torch.randn(2, length, 5)
    true = conv_step_by_step(conv, x)
    assert ((conv(x) - true).norm() / true.norm()).item() < 1e-5


@torch.no_grad()
def test_a_position_never_sees_what_comes_after_it(model):
    changed = IDS.clone()
    changed[0, 10:] = 0
    torch.testing.assert_close(model(IDS)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(IDS)[:, 10:], model(changed)[:, 10:])


@torch.no_grad()
def test_a_sample_does_not_see_its_neighbours_in_the_batch(model):
    both = torch.cat((IDS, IDS.flip(1)))
    torch.testing.assert_close(model(both)[1:], model(IDS.flip(1)))


@torch.no_grad()
def test_the_last_position_remembers_the_first(model):
    changed = IDS.clone()
    changed[0, 0] = 0
    assert not torch.equal(model(IDS)[:, -1], model(changed)[:, -1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_the_residual_stream_is_float32_whatever_the_weights_are(model, dtype):
    full = model(IDS)
    model.to(dtype)
    seen = {}
    for name in ("backbone.layers.0", "backbone.layers.2", "backbone.layers.1.mixer"):
        model.get_submodule(name).register_forward_hook(lambda m, a, out, n=name: seen.update({n: out.dtype}))
    logits = model(IDS)
    assert seen == {
        "backbone.layers.0": torch.float32,
        "backbone.layers.1.mixer": dtype,
        "backbone.layers.2": torch.float32,
    }
    assert logits.dtype == dtype
    assert ((logits.float() - full).norm() / full.norm()).item() < {torch.float16: 0.01, torch.bfloat16: 0.05}[dtype]


@torch.no_grad()
def test_in_float64_everything_is_float64(model):
    full = model(IDS)
    wide = model.double()(IDS)
    assert wide.dtype == torch.float64
    assert ((wide - full).norm() / wide.norm()).item() < 1e-5


def test_every_stage_is_called_as_a_module_once_in_order(model):
    called = []
    for name, module in model.backbone.layers[1].mixer.named_children():
        module.register_forward_hook(lambda m, a, out, n=name: called.append(n))
    model(IDS)
    assert called == ["in_proj", "conv1d", "x_proj", "dt_proj", "scan", "out_proj"]


@torch.no_grad()
def test_a_mode_may_pass_something_else_than_tensors_from_the_convolution_to_the_scan(model):
    class Coded:
        def __init__(self, value):
            self.value = value

    class Coding(torch.nn.Module):
        def __init__(self, stage, wrap):
            super().__init__()
            self.stage, self.wrap = stage, wrap

        def forward(self, first, *rest):
            return Coded(self.stage(first)) if self.wrap else self.stage(first.value, *rest)

    plain = model(IDS)
    for layer in model.backbone.layers:
        for name in ("conv1d", "x_proj", "scan"):
            setattr(layer.mixer, name, Coding(getattr(layer.mixer, name), name == "conv1d"))
    assert torch.equal(model(IDS), plain)


def test_the_head_is_the_embeddings_when_they_are_tied(model):
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_it_learns(model):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
