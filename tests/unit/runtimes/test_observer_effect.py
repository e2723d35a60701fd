"""What tapping does to the output, as a number and a sentence."""

import math
import threading

import pytest
import torch
from torch import nn

from layerscope.runtimes.observer_effect import Observer, ObserverEffect


def test_equal_outputs_are_unchanged():
    effect = ObserverEffect.between({"a": torch.ones(3)}, {"a": torch.ones(3)})
    assert effect.identical
    assert (effect.max_abs, effect.sqnr_db) == (0.0, math.inf)
    assert str(effect) == "the taps change nothing in the output"


def test_a_difference_is_its_largest_element_and_its_sqnr():
    effect = ObserverEffect.between((torch.tensor([3.0, 4.0]),), (torch.tensor([3.0, 4.5]),))
    assert not effect.identical
    assert effect.max_abs == 0.5
    assert math.isclose(effect.sqnr_db, 20.0)  # 25 over 0.25
    assert str(effect) == "the taps change the output: max abs 5.00e-01, 20.0 dB"


def test_where_nothing_can_be_measured_it_says_so():
    effect = ObserverEffect.between(torch.tensor([1]), torch.tensor([2]))
    assert not effect.identical
    assert str(effect) == "not measured: the model returns no floating tensor"


@pytest.mark.parametrize(
    ("untapped", "tapped", "largest", "decibels"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0, math.inf),
        ([1.0, math.inf], [1.0, math.inf], 0.0, math.inf),
        ([1.0, 0.0], [1.0, math.nan], math.inf, -math.inf),
        ([1.0, math.inf], [1.0, 5.0], math.inf, -math.inf),
        ([0.0, 0.0], [0.0, 1.0], 1.0, -math.inf),
    ],
)
def test_what_is_not_finite_counts(untapped, tapped, largest, decibels):
    effect = ObserverEffect.between(torch.tensor(untapped), torch.tensor(tapped))
    assert (effect.max_abs, effect.sqnr_db) == (largest, decibels)


def test_large_outputs_are_compared_a_piece_at_a_time():
    a = torch.zeros(3_000_001, dtype=torch.bfloat16) + 1
    b = a.clone()
    b[-1], b[0] = 3, 2
    effect = ObserverEffect.between(a, b)
    assert effect.max_abs == 2
    assert math.isclose(effect.sqnr_db, 10 * math.log10(3_000_001 / 5))


def test_outputs_of_other_shapes_are_not_compared():
    effect = ObserverEffect.between((torch.ones(2),), (torch.ones(3),))
    assert str(effect) == "not measured: tapped and untapped, the model returns tensors of other shapes"
    effect = ObserverEffect.between({"a": torch.ones(2)}, {"b": torch.ones(2)})
    assert effect.max_abs is None


def test_threads_that_call_at_once_measure_once():
    observer, runs, start = Observer(), [], threading.Barrier(4)

    def untapped(x):
        runs.append("untapped")
        return x

    def call():
        start.wait()
        observer.run(lambda args, kwargs: (args[0], []), untapped, (torch.ones(2),), {}, model=nn.Linear(2, 2))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == ["untapped"]
    assert observer.effect.identical


def test_the_untapped_call_has_copies_that_are_alike_and_the_model_itself():
    model, x = nn.Linear(2, 2), torch.randn(4, 6)[:, ::3]
    torch._dynamo.mark_dynamic(x, 0)
    given = []

    def untapped(*args, **kwargs):
        given.extend([*args, kwargs])
        args[0].zero_()
        args[1]["again"].append(1)
        return args[0]

    before, nested = x.clone(), {"x": x, "again": []}
    args = (x, nested, model.weight)
    Observer().run(lambda args, kwargs: (args[0], []), untapped, args, {"own": model}, model=model)
    assert torch.equal(x, before)
    assert nested["again"] == []
    copy, other, weight, named = given
    assert copy is other["x"]
    assert copy is not x
    assert (copy.stride(), copy._dynamo_dynamic_indices) == (x.stride(), {0})
    assert weight is model.weight
    assert named["own"] is model
