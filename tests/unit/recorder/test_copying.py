"""A copy has the values of the moment it was taken, whatever the tensor looks like and whoever listens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerscope as ls
from asserts import assert_same_bits
from layerscope.errors import NothingRecorded, Unsupported
from layerscope.recorder import copying
from layerscope.recorder.copying import Arena, Pool, dtype_name, plain, undisturbed

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64,
]  # fmt: skip


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
    lease = Pool(1 << 20).copy(tensor)
    assert kept.dtype == dtype
    assert kept.shape == tensor.shape
    assert bytes(lease.data()) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    if tensor.numel():
        assert bytes(kept.reshape(-1).view(torch.uint8).numpy()) == bytes(lease.data())


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


def test_a_buffer_is_used_again_only_after_its_release():
    pool = Pool(1 << 20)
    first = pool.copy(torch.zeros(1000))
    second = pool.copy(torch.ones(1000))
    assert bytes(first.data()) == bytes(4000)
    address = first.data().ctypes.data
    first.release()
    third = pool.copy(torch.full((900,), 2.0))
    assert third.data().ctypes.data == address
    assert bytes(second.data()) == bytes(torch.ones(1000).numpy())


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


def test_a_chunk_is_used_again_once_nothing_looks_into_it():
    copying._idle.clear()
    arena, tensor = Arena(), torch.randn(200_000)
    kept = arena.copy(tensor)()
    address, view = kept.data_ptr(), kept[100:].numpy()
    del arena, kept
    assert not copying._idle  # a view is left
    assert Arena().copy(tensor)().data_ptr() != address
    copying._idle.clear()
    del view
    assert len(copying._idle) == 1
    again = Arena().copy(tensor * 2)()
    assert again.data_ptr() == address
    assert_same_bits(again, tensor * 2)
    assert not copying._idle


def test_idle_chunks_are_few():
    arenas = [Arena() for _ in range(5)]
    tensors = [arena.copy(torch.ones(100_000))() for arena in arenas]
    arenas.clear()
    tensors.clear()
    assert len(copying._idle) == 2
    assert sum(map(len, copying._idle)) <= 64 << 20


def test_threads_that_let_go_and_begin_never_share_a_chunk():
    def work(seed):
        tensor, clean = torch.full((100_000,), float(seed)), True
        for _ in range(20):
            copies = [Arena().copy(tensor)() for _ in range(2)]
            clean &= all(torch.equal(copy, tensor) for copy in copies)
        return clean

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("keep", ["tensor", "summary"])
def test_a_tensor_without_memory_of_its_own_is_refused_and_not_read(keep):
    model = torch.nn.Linear(4, 4)
    with (
        pytest.raises(NothingRecorded, match=r"inside torch\.func\.functionalize a tensor has no memory"),
        ls.record(model, ".", keep=keep),
    ):
        torch.func.functionalize(model)(torch.ones(2, 4))
