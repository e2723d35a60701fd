"""Many tensors are copied in one launch, byte for byte, and nothing beside them is touched."""

from __future__ import annotations

import pytest
import torch

from layerscope.recorder.ferrying import _LOAD, BLOCK, CARRIERS, carrying, ferrying

REAL = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")


@pytest.mark.parametrize("sizes", [[1], [4096], [2, 3, 4, 5, 4095, 4097, 12_289], [16] * 40], ids=str)
def test_every_byte_arrives_and_no_other(sizes):
    stream = torch.cuda.current_stream().cuda_stream if REAL else 0
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE) for size in sizes]
    places = [sum(-(-(s + 16) // 16) * 16 for s in sizes[:at]) for at in range(len(sizes) + 1)]
    host = torch.full((places[-1],), 7, dtype=torch.uint8)
    host = host.pin_memory() if REAL else host
    entries = [[s.data_ptr(), host.data_ptr() + at, s.numel()] for s, at in zip(sources, places, strict=False)]
    table = torch.tensor(entries, device=DEVICE)
    programs = -(-max(sizes) // BLOCK)
    ferrying(DEVICE)(stream)(0, 0, table.data_ptr(), programs, len(sizes) * programs)
    if REAL:
        torch.cuda.synchronize()
    expected = torch.full_like(host, 7)
    for source, at in zip(sources, places, strict=False):
        expected[at : at + source.numel()] = source.cpu()
    assert torch.equal(host, expected)


@pytest.mark.parametrize("lines", [1, _LOAD // 64, 3 * _LOAD // 64 - 1, (CARRIERS + 2) * _LOAD // 64 + 5], ids=str)
def test_a_piece_is_carried_whole_and_nothing_behind_it(lines):
    stream = torch.cuda.current_stream().cuda_stream if REAL else 0
    source = torch.randint(0, 256, (64 * lines + 64,), dtype=torch.uint8, device=DEVICE)
    host = torch.full((64 * lines + 64,), 7, dtype=torch.uint8)
    host = host.pin_memory() if REAL else host
    carrying(DEVICE)(stream)(source.data_ptr(), host.data_ptr(), lines, CARRIERS)
    if REAL:
        torch.cuda.synchronize()
    assert torch.equal(host[:-64], source[:-64].cpu())
    assert host[-64:].tolist() == [7] * 64
