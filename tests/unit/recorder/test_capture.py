"""What is wanted of a tensor is taken in the hook, and one sight of it stands for no other."""

from __future__ import annotations

import pytest
import torch

from asserts import assert_same_bits
from layerscope.recorder.capture import Capture
from layerscope.recorder.taps import Want
from layerscope.stats import summarize

TENSOR, BOTH = Want(tensor=True), Want(tensor=True, summary=True)


def capture(**options):
    return Capture(**{"in_memory": True, "budget": 1 << 20} | options)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.data.add_(1), lambda x: x.numpy().__iadd__(1)])
def test_a_copy_is_shared_until_the_bits_change_whether_torch_counts_it_or_not(change):
    hand, shared, x = capture(), {}, torch.arange(3.0)
    first = hand.take(shared, x, TENSOR)
    assert hand.take(shared, x, TENSOR) is first
    change(x)
    second = hand.take(shared, x, TENSOR)
    assert_same_bits(first.copy(), torch.tensor([0.0, 1.0, 2.0]))
    assert_same_bits(second.copy(), torch.tensor([1.0, 2.0, 3.0]))


def test_zeros_of_either_sign_and_another_shape_or_dtype_are_not_the_same():
    hand, shared, x = capture(), {}, torch.zeros(4)
    hand.take(shared, x, TENSOR)
    x.data = -x
    assert torch.signbit(hand.take(shared, x, TENSOR).copy()).all()
    x.data = x.view(2, 2)
    assert hand.take(shared, x, TENSOR).copy().shape == (2, 2)
    x.data = x.view(torch.int32)
    assert hand.take(shared, x, TENSOR).copy().dtype is torch.int32


def test_what_is_missing_is_taken_in_addition():
    hand, shared, x = capture(), {}, torch.arange(3.0)
    assert hand.take(shared, x, TENSOR).summary is None
    taken = hand.take(shared, x, BOTH)
    assert_same_bits(taken.copy(), x)
    assert taken.summary == summarize(torch.arange(3.0), level="moments")


def test_on_its_way_to_disk_it_is_a_blob_and_not_a_copy():
    taken = capture(in_memory=False).take({}, torch.arange(3.0), TENSOR)
    assert taken.copy is None
    assert (taken.blob.dtype, taken.blob.shape, taken.blob.nbytes) == ("float32", (3,), 12)
    assert taken.blob.data().tobytes() == torch.arange(3.0).numpy().tobytes()
