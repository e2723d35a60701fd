"""A copy has the values of the moment it was taken; memory is used again only when nothing looks into it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asserts import assert_same_bits
from layerscope.recorder import host_memory
from layerscope.recorder.host_memory import Arena
from layerscope.recorder.tensors import dtype_name

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64,
]  # fmt: skip


@pytest.fixture
def idle(monkeypatch):
    """The memory that arenas share, empty at first."""
    monkeypatch.setattr(host_memory, "_idle", host_memory._Idle(64 << 20))
    return host_memory._idle


def bits_of(dtype, *shape):
    """A tensor of any dtype with every kind of bits in it."""
    size = torch.empty((), dtype=torch.uint8).view(dtype).itemsize if dtype.itemsize == 1 else dtype.itemsize
    count = int(torch.tensor(shape).prod()) if shape else 1
    raw = (torch.arange(count * size) % 251).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (300, 1000)], ids=str)
def test_copies_have_the_same_bits(dtype, shape):
    tensor = bits_of(dtype, *shape)
    kept = Arena().copy(tensor)()
    passing = Arena(budget=1 << 20).copy(tensor)()
    assert kept.dtype == dtype
    assert kept.shape == tensor.shape
    for copy in (kept, passing):
        assert bytes(copy.reshape(-1).view(torch.uint8).numpy()) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("make", [lambda t: t.T, lambda t: t[::2], lambda t: t[:, 1:2].expand(-1, 7), lambda t: t[1]])
def test_strided_tensors_become_contiguous_with_the_same_values(make):
    tensor = make(torch.randn(6, 8))
    kept = Arena().copy(tensor)()
    assert kept.is_contiguous()
    assert_same_bits(kept, tensor.contiguous())


def test_a_copy_does_not_follow_the_tensor():
    tensor = torch.randn(200_000)
    before = tensor.clone()
    arena = Arena()
    copies = [arena.copy(tensor)() for _ in range(3)]
    tensor.zero_()
    for copy in copies:
        assert_same_bits(copy, before)
    copies[0].fill_(7)
    assert_same_bits(copies[1], before)


def test_a_chunk_is_used_again_once_nothing_looks_into_it(idle):
    arena, tensor = Arena(), torch.randn(200_000)
    kept = arena.copy(tensor)()
    address, view = kept.data_ptr(), kept[100:].numpy()
    del arena, kept
    assert not idle.mapped  # a view is left
    assert Arena().copy(tensor)().data_ptr() != address
    idle.mapped.clear()
    del view
    assert len(idle.mapped) == 1
    again = Arena().copy(tensor * 2)()
    assert again.data_ptr() == address
    assert_same_bits(again, tensor * 2)
    assert not idle.mapped


def test_idle_chunks_are_few(idle):
    arenas = [Arena() for _ in range(5)]
    tensors = [arena.copy(torch.ones(100_000))() for arena in arenas]
    arenas.clear()
    tensors.clear()
    assert len(idle.mapped) == 2
    assert sum(map(len, idle.mapped)) <= 64 << 20


def test_threads_that_let_go_and_begin_never_share_a_chunk():
    def work(seed):
        tensor, clean = torch.full((100_000,), float(seed)), True
        for _ in range(20):
            copies = [Arena().copy(tensor)() for _ in range(2)]
            clean &= all(torch.equal(copy, tensor) for copy in copies)
        return clean

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_memory_of_copies_that_pass_through_is_used_again_up_to_the_budget(idle):
    arena, large = Arena(budget=64 << 20), torch.ones(10_000_000)
    first, second = (arena.copy(large * value)() for value in (1, 2))
    address = first.data_ptr()
    del first
    third = arena.copy(large * 3)()
    assert third.data_ptr() == address
    assert [copy.unique().tolist() for copy in (second, third)] == [[2.0], [3.0]]
    del second, third
    assert [len(memory) >= large.nbytes for memory in arena._idle.mapped] == [True]  # two would be more than 64 MiB
    assert not idle.mapped
