"""merging.py: one segment of many small ones, with nothing lost and nothing called good that was not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from layerscope.errors import Damaged
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Writer
from layerscope.store.address import LocalFolder
from layerscope.store.checksum import crc32c
from layerscope.store.columns import pack
from layerscope.store.merging import merge
from layerscope.store.segment import ROOM, Sealed

UNDER = "rank-00000"


def sources(path: Path) -> list[Sealed]:
    """Return the sealed segments of a run."""
    files = LocalFolder(path)
    names = sorted(each.name for each in (path / UNDER).glob("*.safetensors"))
    return [Sealed(files, f"{UNDER}/{name}") for name in names]


def merged(parts: list[Sealed], folder: Path) -> Sealed:
    names = [part.name.rpartition("/")[2].removesuffix(".safetensors") for part in parts]
    records, size = merge(parts, folder, folder / "merged.safetensors", names=names)
    whole = Sealed(LocalFolder(folder), "merged.safetensors")
    assert (whole.rows, whole.size, whole.merged) == (records, size, names)
    return whole


def record(path: Path, tensors: list[torch.Tensor | None], *, segment_tensors: int = 2) -> None:
    writer = Writer(path, Manifest(), segment_tensors=segment_tensors)
    for k, x in enumerate(tensors):
        blob = None
        if x is not None:
            raw = x.contiguous().reshape(-1).view(torch.uint8).numpy() if x.numel() else np.empty(0, np.uint8)
            blob = Blob(str(x.dtype).removeprefix("torch."), tuple(x.shape), raw.nbytes, lambda raw=raw: raw)
        summary = None if k % 3 == 1 or x is None or not x.dtype.is_floating_point else summarize(x)
        point = Point(f"blocks.{k % 5}.é\ud800") if k % 7 == 0 else Point(f"blocks.{k % 5}")
        writer.write(point, Moment(None if k % 2 else k, k, 0, k % 3, -k), blob=blob, summary=summary, note={"k": k})
    writer.close()


def assorted() -> list[torch.Tensor | None]:
    seed = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 5, generator=seed),
        torch.randn(7, generator=seed, dtype=torch.float64),
        torch.empty(0, 4),
        torch.tensor(True),
        None,
        torch.randn(9, generator=seed).to(torch.float8_e4m3fn),
        torch.arange(11, dtype=torch.int16),
        torch.randn(2, generator=seed, dtype=torch.complex64),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]),
        torch.randn(3, 5, generator=seed).to(torch.bfloat16),
        torch.full((1000,), 1e300, dtype=torch.float64),
    ]


def test_a_merged_segment_holds_every_row_and_every_byte(tmp_path):
    record(tmp_path, assorted())
    parts = sources(tmp_path)
    assert len(parts) > 4
    whole = merged(parts, tmp_path)
    whole.look_through()
    assert whole.damage == []
    got, at = whole.columns(), 0
    data = (tmp_path / "merged.safetensors").read_bytes()
    for part in parts:
        columns, old = part.columns(), (tmp_path / part.name).read_bytes()
        for row in map(columns.row, range(part.rows)):
            new = got.row(at)
            assert new._replace(offset=row.offset, summary=None) == row._replace(summary=None)
            assert pack(new._replace(offset=row.offset)) == pack(row)  # statistics to the last bit
            assert crc32c(pack(new)) == got.arrays["check"][at]
            assert data[new.offset : new.offset + new.length] == old[row.offset : row.offset + row.length]
            at += 1
    assert at == whole.rows == len(assorted())


def test_any_safetensors_reader_opens_it(tmp_path):
    tensors = [torch.randn(k + 1, generator=torch.Generator().manual_seed(k)) for k in range(9)]
    record(tmp_path, tensors)
    merged(sources(tmp_path), tmp_path)
    with safe_open(tmp_path / "merged.safetensors", "pt") as file:
        for k, x in enumerate(tensors):
            assert torch.equal(file.get_tensor(f"{k:08d}"), x)
        wanted = [0.0 if k % 3 == 1 else x.double().numpy().mean() for k, x in enumerate(tensors)]
        assert file.get_tensor("table.mean").double().numpy() == pytest.approx(wanted, rel=1e-6)
        assert file.get_tensor("table.record").tolist() == list(range(9))


def test_the_header_gets_the_room_that_its_tensors_take(tmp_path):
    record(tmp_path, [torch.full((1,), float(k)) for k in range(1500)], segment_tensors=100)
    whole = merged(sources(tmp_path), tmp_path)
    whole.look_through()
    assert whole.damage == []
    begins = 8 + int.from_bytes((tmp_path / "merged.safetensors").read_bytes()[:8], "little")
    assert begins > ROOM
    assert begins % ROOM == 0
    with safe_open(tmp_path / "merged.safetensors", "pt") as file:
        assert [file.get_tensor(f"{k:08d}").item() for k in range(1500)] == list(range(1500))


def test_records_without_bytes_need_no_room(tmp_path):
    writer = Writer(tmp_path, Manifest(), segment_tensors=1)  # 32 records to a segment
    for k in range(100):
        writer.write(Point("s"), Moment(step=k), summary=summarize(torch.full((4,), float(k))))
    writer.close()
    parts = sources(tmp_path)
    whole = merged(parts, tmp_path)
    whole.look_through()
    assert (len(parts), whole.damage, whole.steps) == (4, [], (0, 99))
    assert [whole.columns().row(k).summary.mean for k in range(100)] == list(range(100))
    assert whole.size < ROOM


def test_losses_are_those_of_the_last_that_speaks_of_them(tmp_path):
    writer = Writer(tmp_path, Manifest(), segment_tensors=1)
    for k in range(3):
        writer.lose(Point("a"), Moment(step=k), "no memory")
        x = np.full(2, k)
        writer.write(Point("b"), Moment(step=k), blob=Blob("int64", (2,), 16, lambda x=x: x))
        writer.flush()
    writer.close()
    (loss,) = merged(sources(tmp_path), tmp_path).losses
    assert (loss.point, loss.count, loss.first) == ("a:output", 3, str(Moment(step=0)))


def test_a_damaged_segment_is_not_merged(tmp_path, wrong):
    record(tmp_path, assorted())
    parts = sources(tmp_path)
    path = tmp_path / parts[1].name
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    wrong(path, begin + json.loads(raw[8:begin])["table.check"]["data_offsets"][0])
    with pytest.raises(Damaged, match="is not merged"):
        merged(sources(tmp_path), tmp_path)
