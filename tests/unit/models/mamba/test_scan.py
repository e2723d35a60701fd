"""The selective scan against the recurrence, one step after another in float64."""

# ruff: noqa: N803, N806 (A, B, C and D are the letters of the equation)

import pytest
import torch
from torch.nn.functional import softplus

from layerscope.models.mamba.scan import linear_recurrence, selective_scan


def step_by_step(u, delta, A, B, C, D):
    u, delta, A, B, C, D = (tensor.double() for tensor in (u, delta, A, B, C, D))
    state = torch.zeros(u.shape[0], *A.shape, dtype=torch.float64)
    outputs = []
    for t in range(u.shape[1]):
        state = torch.exp(delta[:, t, :, None] * A) * state + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None, :]
        outputs.append((state * C[:, t, None, :]).sum(-1) + D * u[:, t])
    return torch.stack(outputs, dim=1)


def drawn(*, batch=1, length=64, channels=6, states=4, dtype=torch.float32, steps=-3.0):
    g = torch.Generator().manual_seed(length)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return [
        value.to(dtype)
        for value in (
            normal(batch, length, channels),
            softplus(normal(batch, length, channels) + steps),
            -torch.exp(normal(channels, states)),
            normal(batch, length, states),
            normal(batch, length, states),
            normal(channels),
        )
    ]


def relative(found, true):
    return ((found.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 31, 64, 100, 509])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_agrees_with_the_recurrence_at_any_length(length, batch):
    inputs = drawn(batch=batch, length=length)
    assert relative(selective_scan(*inputs), step_by_step(*inputs)) < 1e-5


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 49, 50, 51, 1000])
def test_the_state_passes_every_edge_of_a_chunk(chunk):
    inputs = drawn(length=50)
    assert relative(selective_scan(*inputs, chunk=chunk), step_by_step(*inputs)) < 1e-5


def test_it_agrees_at_the_size_it_is_made_for():
    inputs = drawn(length=512, channels=256, states=16)
    assert relative(selective_scan(*inputs), step_by_step(*inputs)) < 1e-5


@pytest.mark.parametrize(("channels", "length"), [(4, 100), (256, 150), (1536, 21), (20_000, 9)])
def test_a_sample_has_the_same_bits_alone_and_among_others(channels, length):
    u, delta, A, B, C, D = inputs = drawn(batch=3, length=length, channels=channels, states=16)
    together = selective_scan(*inputs)
    for at in range(3):
        sample = slice(at, at + 1)
        assert torch.equal(selective_scan(u[sample], delta[sample], A, B[sample], C[sample], D), together[sample])
    assert relative(together, step_by_step(*inputs)) < 1e-5


@pytest.mark.parametrize("step", [0.0, 1e-30, 1e-6, 50.0, 1e4, 1e30])
def test_no_time_step_is_too_long_or_too_short_for_it(step):
    u, _, A, B, C, D = drawn(length=70)
    inputs = (u, torch.full_like(u, step), A, B, C, D)
    found = selective_scan(*inputs)
    assert torch.isfinite(found).all()
    assert relative(found, step_by_step(*inputs)) < 1e-5


def test_long_and_short_steps_side_by_side_do_not_disturb_each_other():
    u, delta, A, B, C, D = drawn(length=90)
    delta[:, ::7] = 1e3  # forgets everything
    delta[:, 3::11] = 0  # remembers everything and takes nothing in
    found = selective_scan(u, delta, A, B, C, D)
    assert relative(found, step_by_step(u, delta, A, B, C, D)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]
)
def test_the_result_has_the_dtype_and_the_precision_of_what_came_in(dtype, within):
    inputs = drawn(length=70, dtype=dtype)
    found = selective_scan(*inputs)
    assert found.dtype == dtype
    assert relative(found, step_by_step(*inputs)) < within


def test_what_came_in_is_left_as_it_was():
    inputs = drawn(length=40)
    before = [tensor.clone() for tensor in inputs]
    selective_scan(*inputs)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.mark.parametrize("chunk", [None, 5])
def test_its_gradients_are_those_of_finite_differences(chunk):
    inputs = [t.requires_grad_() for t in drawn(batch=2, length=13, channels=3, states=2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *given: selective_scan(*given, chunk=chunk), inputs)


def test_its_gradients_are_those_of_the_recurrence():
    inputs = [t.requires_grad_() for t in drawn(batch=2, length=100, dtype=torch.float64)]
    weights = torch.randn(2, 100, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((selective_scan(*inputs) * weights).sum(), inputs)
    true = torch.autograd.grad((step_by_step(*inputs) * weights).sum(), inputs)
    for mine, theirs in zip(found, true, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_recurrence_starts_at_its_drive_and_decays_by_halves():
    halves = torch.full((1, 5, 1), 0.5)
    drive = torch.tensor([8.0, 0, 0, 0, 1]).reshape(1, 5, 1)
    assert linear_recurrence(halves, drive).flatten().tolist() == [8, 4, 2, 1, 1.5]
