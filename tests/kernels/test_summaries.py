"""The summaries that kernels make are those of the CPU: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest
import torch

from kernels.laws import BYTES, FLOATS, WORDS, assert_like_the_cpu, values
from layerscope.stats.device import Results, Slots

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where it plays the device's arithmetic

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
REAL = DEVICE.type == "cuda"  # the interpreter takes a second for what a device does in microseconds
NAN, INF = math.nan, math.inf
LARGE = 1_000_000 if REAL else 2_500


def gathered(slots, used):
    buffer = slots.buffer(used)
    slots.gather(buffer)
    if REAL:
        torch.cuda.synchronize()
    return Results.read(buffer)


def swept(tensors, *, level="full", together=False):
    """Summaries of tensors that share one gathering; `together`, one launch for those of each dtype."""
    stream = torch.cuda.current_stream().cuda_stream if REAL else 0
    slots = Slots(DEVICE, level, stream, wide=level == "full" and tensors[0].dtype is torch.float64)
    there = [tensor.to(DEVICE) for tensor in tensors]
    if together:
        at = 0
        for dtype, group in groupby(there, lambda tensor: tensor.dtype):
            tile, most = slots.tiling(dtype)
            tiles = [(tensor, -(-tensor.numel() // tile)) for tensor in group]
            entries = [(tensor.data_ptr(), tensor.numel(), -(-count // most)) for tensor, count in tiles]
            programs = max(-(-count // each) for (_, count), (_, _, each) in zip(tiles, entries, strict=True))
            table = torch.tensor(entries, device=DEVICE)
            slots.starting_all(dtype)(at, table.data_ptr(), len(entries), programs)
            at += len(entries)
    else:
        for index, tensor in enumerate(there):
            slots.starting(tensor.dtype)(index, tensor.data_ptr(), tensor.numel())
    numbers = gathered(slots, len(there))
    return [
        one.summary(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for one, tensor in zip(numbers, tensors, strict=True)
    ]


@pytest.mark.parametrize("level", ["moments", "full"])
@pytest.mark.parametrize("dtype", FLOATS + WORDS + BYTES, ids=str)
def test_summaries_are_those_of_the_cpu(dtype, level):
    sizes = [1, 9, 1024, 4097, 1_000_003] if REAL else [9, 4097]
    tensors = [values(dtype, size) for size in sizes]
    for summary, tensor in zip(swept(tensors, level=level), tensors, strict=True):
        assert_like_the_cpu(summary, tensor, level=level)


@pytest.mark.parametrize("level", ["moments", "full"])
def test_tensors_of_many_sizes_and_dtypes_are_swept_in_one_launch_of_each(level):
    sizes = [1, 9, 1024, 4097, 1_000_003] if REAL else [9, 4097]
    kinds = [dtype for dtype in FLOATS + WORDS + BYTES if dtype is not torch.float64]
    kinds = kinds if REAL else [torch.bfloat16, torch.float32, torch.int64, torch.bool]
    tensors = [values(dtype, size) for dtype in kinds for size in sizes]
    alone = swept(tensors, level=level)
    for summary, one, tensor in zip(swept(tensors, level=level, together=True), alone, tensors, strict=True):
        assert_like_the_cpu(summary, tensor, level=level)
        assert repr(summary) == repr(one)  # to the bit, because the same programs take the same items


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("level", ["moments", "full"])
def test_numbers_that_are_not_finite_or_all_alike_have_an_answer(dtype, level):
    tensors = [
        torch.full((3,), NAN),
        torch.tensor([INF, -INF, 1.0, -2.0, 0.0, -0.0] * (LARGE // 6)),
        torch.cat([torch.randn(LARGE), torch.tensor([NAN])]),
        torch.tensor([-0.0, 0.0] * 40),
        torch.full((LARGE // 2,), -3.25),
        torch.randn(LARGE) + 1e4,
        torch.cat([torch.full((2048,), 3e4), torch.rand(LARGE)]),
        torch.randn(LARGE) * 1e-39,
        torch.relu(torch.randn(LARGE)),
    ]
    tensors = [tensor.to(dtype) for tensor in (tensors if REAL or dtype is torch.bfloat16 else tensors[:3])]
    wide = 7 if dtype is torch.float64 else len(tensors)
    for few in (tensors[:wide], tensors[wide:]):
        if few:
            for summary, tensor in zip(swept(few, level=level), few, strict=True):
                assert_like_the_cpu(summary, tensor, level=level)


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1e-310, 1e-160, 1e155] if REAL else [1e300, 1e-310])
def test_squares_that_leave_the_range_of_float64_do_no_harm(scale):
    tensor = torch.randn(LARGE, dtype=torch.float64) * scale
    for level in ("moments", "full"):
        [summary] = swept([tensor], level=level)
        assert_like_the_cpu(summary, tensor, level=level)


def test_a_sheet_lists_the_buckets_of_each_tensor_one_after_the_other_and_nothing_else():
    tensors = [values(torch.float32, 3000), torch.zeros(40), torch.tensor([1.0, -1.0, 1.0, 2.0, -0.0]), torch.ones(1)]
    stream = torch.cuda.current_stream().cuda_stream if REAL else 0
    slots = Slots(DEVICE, "full", stream)
    there = [tensor.to(DEVICE) for tensor in tensors]
    for index, tensor in enumerate(there):
        slots.starting(tensor.dtype)(index, tensor.data_ptr(), tensor.numel())
    words, used, buckets, _ = buffer = slots.buffer(len(there))
    assert (used, buckets, words.numel()) == (4, 1 << 15, slots.size * (32 + (1 << 15)))
    assert words.nbytes <= 32 << 20
    assert words.is_pinned() == REAL
    slots.gather(buffer)
    if REAL:
        torch.cuda.synchronize()
    words = words.numpy()
    heads, listed = words[: 4 * 32].reshape(4, 32), words[4 * 32 :]
    end = 0
    for index in np.argsort(heads[:, 14], kind="stable"):
        size, begin = heads[index, 13:15]
        bits = tensors[index].numpy()[tensors[index].numpy() != 0].view(np.uint32) >> 17
        places, counts = np.unique(bits, return_counts=True)
        assert size == places.size
        if size:  # an empty list may begin anywhere
            assert begin == end
            assert (listed[begin : begin + size] % (1 << 32)).tolist() == places.tolist()
            assert (listed[begin : begin + size] >> 32).tolist() == counts.tolist()
            end += size


def test_a_sheet_of_nothing_but_zeros_has_an_empty_list():
    tensors = [torch.zeros(size) for size in (1, 9, 300)]
    for summary, tensor in zip(swept(tensors), tensors, strict=True):
        assert_like_the_cpu(summary, tensor)


def test_slots_are_empty_again_after_they_were_gathered():
    stream = torch.cuda.current_stream().cuda_stream if REAL else 0
    slots = Slots(DEVICE, "full", stream)
    for step in range(3):
        tensor = torch.randn(300 + step) * 2.0 ** (20 * step)
        there = tensor.to(DEVICE)
        slots.starting(there.dtype)(0, there.data_ptr(), there.numel())
        [numbers] = gathered(slots, 1)
        assert_like_the_cpu(numbers.summary("float32", tuple(tensor.shape)), tensor)
