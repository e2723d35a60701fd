"""Each kind of module is checked by few rows of its weights: healthy in each dtype, off by 1 %, exchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from layerscope.checks import numbers_of, rows_kept
from layerscope.checks.check import check_of
from layerscope.checks.forms import other_form

X = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 16, 12, 12, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(2))


def rms_norm():
    norm = nn.RMSNorm(64, eps=1e-6)
    norm.weight.data.add_(torch.randn(64) / 10)
    return norm


def batch_norm():
    norm = nn.BatchNorm2d(16).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


MODULES = {
    "linear": (lambda: nn.Linear(64, 48), X),
    "conv": (lambda: nn.Conv2d(16, 24, 3, padding=1, stride=2), IMAGE),
    "grouped conv": (lambda: nn.Conv2d(16, 32, 3, groups=4), IMAGE),
    "embedding": (lambda: nn.Embedding(50, 32), IDS),
    "layer norm": (lambda: nn.LayerNorm(64), X),
    "RMS norm": (rms_norm, X),
    "batch norm": (batch_norm, IMAGE),
    "gelu": (nn.GELU, X),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_agrees_with_its_own_check_and_one_that_is_scaled_does_not(name):
    torch.manual_seed(0)
    make, x = MODULES[name]
    module = make()
    with torch.no_grad():
        y = module(x)
        check = check_of(module, x, y, name=name)
        assert check is not None
        assert check.residual(x, y) < 1e-6
        assert check.residual(x, y * 1.01) == pytest.approx(0.01 / 1.01, rel=0.7)
        assert check.residual(x, torch.roll(y, 1, 1)) > 0.1


def test_two_exchanged_rows_of_a_linear_are_seen():
    torch.manual_seed(0)
    module = nn.Linear(64, 48)
    with torch.no_grad():
        check = check_of(module, X, module(X))
        order = torch.arange(48)
        order[3:5] = order[3:5].flip(0)
        module.weight.copy_(module.weight[order])
        assert check.residual(X, module(X)) > 0.05


def test_what_is_kept_of_a_linear_is_eight_rows():
    module = nn.Linear(512, 512)
    with torch.no_grad():
        check = check_of(module, torch.randn(8, 512), module(torch.randn(8, 512)))
        assert check is None  # its output is another input's: nothing to go by
        x = torch.randn(8, 512)
        check = check_of(module, x, module(x))
    assert sum(t.numel() for t in check.tensors.values()) == 8 * 512 + 8


def test_another_activation_is_told_by_its_function():
    assert other_form(X, nn.functional.gelu(X, approximate="tanh"), within=1e-5) == "gelu, tanh form"
    assert other_form(X, X**3, within=1e-5) is None


def test_numbers_are_what_numpy_says():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 25, 32))
    b = a * (1 + 1e-3 * rng.standard_normal(a.shape))
    found = numbers_of(torch.from_numpy(a), torch.from_numpy(b))
    d, rows = b - a, (np.linalg.norm(b - a, axis=-1) / np.linalg.norm(a, axis=-1)).ravel()
    assert found.relative_l2 == pytest.approx(np.linalg.norm(d) / np.linalg.norm(a))
    assert (found.median, found.p90, found.worst) == pytest.approx((*np.percentile(rows, (50, 90)), rows.max()))
    columns = np.sqrt((d**2).sum((0, 1)) / (a**2).sum((0, 1)))
    assert found.column == pytest.approx(columns.max())
    assert found.factor == pytest.approx(abs((a * b).sum() / (a * a).sum() - 1))


@pytest.mark.parametrize(
    "value", [torch.empty(0, 4), torch.zeros(3, 4), torch.full((2, 2), torch.nan), torch.tensor(2.0)]
)
def test_odd_tensors_have_numbers(value):
    assert numbers_of(value, value).largest == 0.0


def test_rows_of_padding_are_told_by_shape():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert rows_kept(mask, (2, 3, 8)).tolist() == mask.flatten().tolist()
    assert rows_kept(mask, (6, 8)).tolist() == mask.flatten().tolist()
    assert rows_kept(mask, (2, 4, 3, 8)).sum() == 4 * 3
    assert rows_kept(mask, (5, 8)) is None
