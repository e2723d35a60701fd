"""A plain tensor has the values of the moment, whatever the tensor looks like and whoever listens."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerscope as ls
from layerscope.errors import NothingRecorded, Unsupported
from layerscope.recorder.host_memory import Arena
from layerscope.recorder.tensors import plain, undisturbed


def test_lazy_views_are_resolved():
    z = torch.tensor([1 - 2j, 3 + 4j])
    values, _ = plain(z.conj())
    assert Arena().copy(values)().tolist() == [1 + 2j, 3 - 4j]
    values, _ = plain(torch._neg_view(torch.tensor([-1.0, -2.0])))
    assert Arena().copy(values)().tolist() == [1.0, 2.0]


def test_a_result_of_inference_mode_can_be_trained_on_afterwards():
    with torch.inference_mode():
        tensor = torch.ones(3)
        with undisturbed():
            kept = Arena().copy(plain(tensor)[0])()
    assert not kept.is_inference()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse_coo tensor is not stored"),
        (lambda: torch.empty(3, device="meta"), "has no values"),
    ],
)
def test_what_has_no_dense_values_is_refused_with_the_way_out(make, reason):
    with pytest.raises(Unsupported, match=reason):
        plain(make())


def test_the_users_modes_do_not_see_our_operations():
    class Counter(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counter.seen += 1
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(3)
    with Counter(), torch.device("meta"), undisturbed():
        kept = Arena().copy(plain(tensor)[0])()
    assert Counter.seen == 0
    assert kept.device.type == "cpu"


@pytest.mark.parametrize("keep", ["tensor", "summary"])
def test_a_tensor_without_memory_of_its_own_is_refused_and_not_read(keep):
    model = torch.nn.Linear(4, 4)
    with (
        pytest.raises(NothingRecorded, match=r"inside torch\.func\.functionalize a tensor has no memory"),
        ls.record(model, ".", keep=keep),
    ):
        torch.func.functionalize(model)(torch.ones(2, 4))
