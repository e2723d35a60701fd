"""What is wanted of a tensor is taken in the hook, and one sight of it stands for no other."""

from __future__ import annotations

import pytest
import torch

from asserts import assert_same_bits
from layerscope.recorder.taking import Taking
from layerscope.recorder.taps import Wish
from layerscope.stats import summarize

TENSOR, BOTH = Wish(tensor=True), Wish(tensor=True, summary=True)


def taking(**options):
    return Taking(**{"in_memory": True, "budget": 1 << 20} | options)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.data.add_(1), lambda x: x.numpy().__iadd__(1)])
def test_a_copy_is_shared_until_the_bits_change_whether_torch_counts_it_or_not(change):
    hand, looks, x = taking(), {}, torch.arange(3.0)
    first = hand.look(looks, x, TENSOR)
    assert hand.look(looks, x, TENSOR) is first
    change(x)
    second = hand.look(looks, x, TENSOR)
    assert_same_bits(first.copy(), torch.tensor([0.0, 1.0, 2.0]))
    assert_same_bits(second.copy(), torch.tensor([1.0, 2.0, 3.0]))


def test_zeros_of_either_sign_and_another_shape_or_dtype_are_not_the_same():
    hand, looks, x = taking(), {}, torch.zeros(4)
    hand.look(looks, x, TENSOR)
    x.data = -x
    assert torch.signbit(hand.look(looks, x, TENSOR).copy()).all()
    x.data = x.view(2, 2)
    assert hand.look(looks, x, TENSOR).copy().shape == (2, 2)
    x.data = x.view(torch.int32)
    assert hand.look(looks, x, TENSOR).copy().dtype is torch.int32


def test_what_is_missing_is_taken_in_addition():
    hand, looks, x = taking(), {}, torch.arange(3.0)
    assert hand.look(looks, x, TENSOR).summary is None
    look = hand.look(looks, x, BOTH)
    assert_same_bits(look.copy(), x)
    assert look.summary == summarize(torch.arange(3.0), level="moments")


def test_on_its_way_to_disk_it_is_a_blob_and_not_a_copy():
    look = taking(in_memory=False).look({}, torch.arange(3.0), TENSOR)
    assert look.copy is None
    assert (look.blob.dtype, look.blob.shape, look.blob.nbytes) == ("float32", (3,), 12)
    assert look.blob.data().tobytes() == torch.arange(3.0).numpy().tobytes()
