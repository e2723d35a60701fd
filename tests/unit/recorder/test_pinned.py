"""Page-locked memory is handed out in parts, comes back when nobody looks into it, and never exceeds its budget."""

from __future__ import annotations

import gc

import pytest
import torch

from layerscope.recorder import pinned
from layerscope.recorder.pinned import Pinned

CHUNK = 1 << 16


@pytest.fixture
def memory(monkeypatch):
    """Memory for three chunks, of ordinary pages: what locks them is the driver, which is not here."""
    monkeypatch.setattr(pinned, "_CHUNK", CHUNK)
    return Pinned(3 * CHUNK, allocate=lambda size: torch.zeros(size, dtype=torch.uint8))


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


def test_the_default_budget_is_at_most_a_quarter_of_the_machine():
    assert 0 < pinned._default_budget() <= 4 << 30
