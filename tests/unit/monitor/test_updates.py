from __future__ import annotations

import numpy as np
import torch

from layerscope.monitor.updates import Updates


def measured(model, change, *, level="moments"):
    updates = Updates(model, level=level)
    updates.before()
    with torch.no_grad():
        change()
    return {reading.name: reading for reading in updates.after()}


def test_the_ratio_is_the_norm_of_the_change_over_the_norm_before_it():
    model = torch.nn.Linear(30, 20)
    before = model.weight.detach().numpy().astype(np.float64)
    shift = torch.randn(20, 30) * 1e-3
    reading = measured(model, lambda: model.weight.add_(shift))["weight"]
    change = model.weight.detach().numpy().astype(np.float64) - before
    assert np.isclose(reading.update_ratio, np.linalg.norm(change) / np.linalg.norm(before), rtol=1e-5)
    assert np.isclose(reading.weight_rms, np.sqrt(np.mean(before**2)), rtol=1e-6)


def test_what_did_not_move_has_a_ratio_of_exactly_zero():
    model = torch.nn.Linear(3, 2)
    assert [reading.update_ratio for reading in measured(model, lambda: None).values()] == [0.0, 0.0]


def test_a_parameter_of_zeros_is_measured_by_what_it_became():
    model = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(model.bias)
    torch.nn.init.zeros_(model.weight)
    found = measured(model, lambda: model.bias.add_(5.0))
    assert (found["bias"].update_ratio, found["weight"].update_ratio) == (1.0, 0.0)


def test_an_update_that_bfloat16_swallows_is_seen_to_be_none():
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(model.weight, 1.0)
    assert measured(model, lambda: model.weight.add_(1e-4))["weight"].update_ratio == 0.0
    assert measured(model, lambda: model.weight.add_(1e-1))["weight"].update_ratio > 0.0


def test_gradients_are_those_from_before_the_step_and_none_where_there_are_none():
    model = torch.nn.Linear(3, 2)
    model.weight.grad = torch.full((2, 3), 4.0)
    found = measured(model, lambda: model.weight.grad.zero_())
    assert found["weight"].gradient.mean == 4.0
    assert found["bias"].gradient is None


def test_a_sparse_gradient_is_read_by_the_values_it_has():
    model = torch.nn.Embedding(10, 2, sparse=True)
    model(torch.tensor([1, 1, 3])).sum().backward()
    assert measured(model, lambda: None)["weight"].gradient.count == 4


def test_frozen_parameters_are_not_read():
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert list(measured(model, lambda: None)) == ["bias"]


def test_a_step_that_was_not_finished_leaves_nothing_for_the_next():
    updates = Updates(torch.nn.Linear(3, 2), level="moments")
    updates.before()
    updates.forget()
    assert updates.after() == ()
