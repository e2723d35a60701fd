"""Page-locked memory is handed out in parts, comes back when nobody looks into it, and never exceeds its budget."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from layerscope.recorder.gpu import pinned_pool
from layerscope.recorder.gpu.pinned_pool import PinnedPool

CHUNK = 1 << 16


@pytest.fixture
def memory(monkeypatch):
    """Memory for three chunks, of ordinary pages: what locks them is the driver, which is not here."""
    monkeypatch.setattr(pinned_pool, "_CHUNK", CHUNK)
    return PinnedPool(3 * CHUNK, allocate=lambda size: torch.zeros(size, dtype=torch.uint8))


def grown(memory, *sizes):
    """Ask for what is not there, so that it is there the next time."""
    for size in sizes:
        assert memory.room(size) is None
    memory.grow()
    return memory


def octets(room, size):
    """The bytes of a room."""
    chunk, at, _ = room
    return chunk[at : at + size]


def test_at_first_there_is_no_room_and_it_grows_by_what_was_missing(memory):
    assert memory.room(100) is None
    assert memory.total == 0
    memory.grow()
    assert memory.total == CHUNK
    assert octets(memory.room(100), 100).size == 100


def test_parts_lie_apart_and_their_addresses_are_where_their_bytes_are(memory):
    grown(memory, 1000)
    sizes = (1000, 3, 64, 1)
    rooms = [memory.room(size) for size in sizes]
    parts = [octets(room, size) for room, size in zip(rooms, sizes, strict=True)]
    for number, ((_, _, address), part) in enumerate(zip(rooms, parts, strict=True)):
        assert part.ctypes.data == address
        assert address % 64 == rooms[0][2] % 64
        part[:] = number + 1
    assert [set(part.tolist()) for part in parts] == [{1}, {2}, {3}, {4}]


def test_a_chunk_comes_back_only_when_no_tensor_looks_into_it(memory):
    grown(memory, CHUNK)
    kept = torch.from_numpy(octets(memory.room(CHUNK), CHUNK)).view(torch.float32)[7:9]
    assert memory.room(CHUNK) is None
    del kept
    gc.collect()
    assert memory.room(CHUNK) is not None
    assert memory.total == CHUNK


def test_the_budget_is_never_exceeded(memory):
    grown(memory, *[CHUNK] * 10)
    rooms = [memory.room(CHUNK) for _ in range(5)]
    assert memory.total == 3 * CHUNK
    assert [room is None for room in rooms] == [False, False, False, True, True]


def test_a_tensor_larger_than_a_chunk_has_one_of_its_own_that_is_used_again(memory):
    size = 2 * CHUNK - 5
    grown(memory, size)
    room = memory.room(size)
    address = room[2]
    assert (octets(room, size).size, octets(room, size).ctypes.data) == (size, address)
    assert memory.room(size) is None
    del room
    gc.collect()
    assert memory.room(size - 10)[2] == address
    assert memory.total == 2 * CHUNK


def test_a_large_one_beyond_the_budget_finds_no_room_and_small_ones_still_do(memory):
    grown(memory, 5 * CHUNK, 10)
    assert memory.total == CHUNK
    assert memory.room(5 * CHUNK) is None
    assert memory.room(10) is not None


@pytest.mark.parametrize(("gibibytes", "budget"), [(2, 1 << 29), (8, 2 << 30), (1024, 4 << 30)])
def test_the_default_budget_is_a_quarter_of_the_machine_and_at_most_4_gib(gibibytes, budget, monkeypatch):
    machine = {"SC_PHYS_PAGES": gibibytes << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(pinned_pool.os, "sysconf", machine.__getitem__)
    assert pinned_pool._default_budget() == budget


# Ahead of need ----------------------------------------------------------------------------------


@pytest.fixture
def asking(monkeypatch):
    """Memory for three chunks that notes when it asks for more."""
    monkeypatch.setattr(pinned_pool, "_CHUNK", CHUNK)
    asked = []
    memory = PinnedPool(
        3 * CHUNK, allocate=lambda size: torch.zeros(size, dtype=torch.uint8), ask=lambda: asked.append(memory.total)
    )
    memory.asked = asked
    return memory


def test_the_first_chunks_are_there_before_anything_is_missed_and_only_once(memory):
    memory.prepare()
    memory.prepare()
    assert memory.total == 2 * CHUNK
    assert memory.room(CHUNK) is not None


def test_the_first_chunks_do_not_exceed_the_budget(monkeypatch):
    monkeypatch.setattr(pinned_pool, "_CHUNK", CHUNK)
    memory = PinnedPool(CHUNK + 1, allocate=lambda size: torch.zeros(size, dtype=torch.uint8))
    memory.prepare()
    assert memory.total == CHUNK


def test_more_is_asked_for_when_the_last_free_chunk_is_taken_while_the_budget_lasts(asking):
    asking.prepare()
    kept = [asking.room(CHUNK)]
    assert asking.asked == []
    kept.append(asking.room(CHUNK))
    assert asking.asked == [2 * CHUNK]
    asking.grow()
    assert asking.total == 3 * CHUNK
    kept.append(asking.room(CHUNK))
    assert asking.asked == [2 * CHUNK]
    asking.grow()
    assert asking.total == 3 * CHUNK
    assert all(room is not None for room in kept)


def test_a_chunk_that_has_come_back_is_the_successor(asking):
    asking.prepare()
    first = asking.room(CHUNK)
    second = asking.room(CHUNK)
    assert asking.asked
    del first
    gc.collect()
    asking.grow()
    assert asking.total == 2 * CHUNK
    assert asking.room(CHUNK) is not None
    assert second is not None


def test_what_is_missed_is_asked_for_once_until_it_grows(asking):
    for _ in range(2):
        assert asking.room(2 * CHUNK) is None
    assert asking.asked == [0]
    asking.grow()
    room = asking.room(2 * CHUNK)
    assert room is not None
    assert asking.room(2 * CHUNK) is None
    assert asking.asked == [0, 2 * CHUNK]


def test_chunks_that_are_done_with_are_let_go_of_before_more_is_asked_for(monkeypatch):
    monkeypatch.setattr(pinned_pool, "_CHUNK", CHUNK)
    asked, held = [], []
    memory = PinnedPool(
        9 * CHUNK,
        allocate=lambda size: torch.zeros(size, dtype=torch.uint8),
        let_go=held.clear,
        ask=lambda: asked.append(1),
    )
    memory.prepare()
    for _ in range(20):
        held.append(memory.room(CHUNK))
    assert (asked, memory.total) == ([], 2 * CHUNK)
    assert None not in held


def test_what_could_not_be_had_is_not_tried_again_and_less_is(monkeypatch):
    monkeypatch.setattr(pinned_pool, "_CHUNK", CHUNK)
    tried = []

    def allocate(size):
        tried.append(size)
        if size > CHUNK:
            raise RuntimeError("out of memory")
        return torch.zeros(size, dtype=torch.uint8)

    memory = PinnedPool(9 * CHUNK, allocate=allocate)
    for _ in range(2):
        memory.room(2 * CHUNK)
        with pytest.raises(RuntimeError, match="out of memory") if tried == [] else nullcontext():
            memory.grow()
    assert (tried, memory.total) == ([2 * CHUNK], 0)
    grown(memory, 10)
    assert memory.total == CHUNK
