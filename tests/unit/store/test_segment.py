"""segment.py: safetensors files with a table behind the tensors; the oracles are the stock reader and numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Dropped, Manifest, Writer
from layerscope.store.address import LocalFolder
from layerscope.store.checksum import bytes_of, crc32c
from layerscope.store.columns import TableRow
from layerscope.store.segment import HEADER_ROOM, ROOM, Partial, Sealed, Sealing, entry, seal

ONE = np.arange(6, dtype=np.float32).reshape(2, 3)
TWO = np.arange(5, dtype=np.int16)


def rows_of(partial: Partial, *arrays: np.ndarray | None, first: int = 12, **more) -> list[TableRow]:
    rows = []
    for n, array in enumerate(arrays, first):
        row = TableRow(n, f"p{n}:output", None, n, n, 0, 0, **more)
        if array is not None:
            offset = partial.write([bytes_of(array)])
            row = row._replace(
                has_tensor=True, dtype=str(array.dtype), shape=array.shape, bytes_of=n,
                offset=offset, length=array.nbytes, crc32c=crc32c(bytes_of(array)),
            )  # fmt: skip
        rows.append(row)
    return rows


def sealed(folder, *arrays, number: int = 0, rank: int = 1, losses=(), **more):
    partial = Partial.create(folder, number)
    rows = rows_of(partial, *arrays, **more)
    seal(folder, number, Sealing(b"whatever", rank, rows, losses=losses), partial.fd, following=lambda: None)
    partial.close()
    return folder / f"segment-{number:05d}.safetensors", rows


def test_the_stock_reader_reads_a_sealed_segment(tmp_path):
    path, _ = sealed(tmp_path, ONE, np.zeros((0, 4), np.float32), TWO, np.array(2.5), number=3)
    assert path == tmp_path / "segment-00003.safetensors"
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "layerscope", "version": "2", "rank": "1"}
        keys = sorted(k for k in file.keys() if k.isdecimal())  # noqa: SIM118
        assert keys == ["00000012", "00000013", "00000014", "00000015"]
        np.testing.assert_array_equal(file.get_tensor("00000012"), ONE)
        np.testing.assert_array_equal(file.get_tensor("00000014"), TWO)
        assert file.get_tensor("00000013").shape == (0, 4)
        assert file.get_tensor("00000015") == 2.5
        np.testing.assert_array_equal(file.get_tensor("table.step"), [12, 13, 14, 15])
        points = json.loads(zlib.decompress(file.get_tensor("table.points").tobytes()))
        assert points == [f"p{n}:output" for n in range(12, 16)]


def test_the_bytes_begin_behind_the_room_and_have_no_gaps(tmp_path):
    path, _ = sealed(tmp_path, TWO, ONE)
    raw = path.read_bytes()
    assert raw[:8] == (65528).to_bytes(8, "little")
    assert raw[ROOM : ROOM + 34] == TWO.tobytes() + ONE.tobytes()
    header = json.loads(raw[8:ROOM])
    assert header["00000013"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [10, 34]}
    spans = sorted(tuple(e["data_offsets"]) for k, e in header.items() if k != "__metadata__")
    assert [a[1] for a in spans[:-1]] == [b[0] for b in spans[1:]]
    assert spans[-1][1] == len(raw) - ROOM
    assert header["table.mean"]["data_offsets"][0] % 4 == 0


def test_a_segment_without_tensors_takes_no_room_for_their_header(tmp_path):
    rows = [TableRow(n, "a:output", 1, n, n, 0, 0, summary=summarize(ONE * n)) for n in range(5)]
    size = seal(tmp_path, 0, Sealing(b"whatever", 0, rows), following=lambda: None)
    path = tmp_path / "segment-00000.safetensors"
    assert size == path.stat().st_size < 20_000
    with safe_open(path, "np") as file:
        np.testing.assert_allclose(file.get_tensor("table.mean"), [2.5 * n for n in range(5)])
        assert file.get_tensor("table.epoch").tolist() == [1]  # one number where all are the same
    found = Sealed(LocalFolder(tmp_path), "segment-00000.safetensors")
    assert found.array("epoch").tolist() == [1] * 5
    found.look_through()
    assert found.damage == []


def test_the_table_gives_the_statistics_that_numpy_gives_of_the_tensors_beside_it(tmp_path):
    rng = np.random.default_rng(0)
    writer = Writer(tmp_path / "run", Manifest())
    for n in range(40):
        values = rng.normal(n, 1 + n, (7, 11)).astype(np.float32)
        values.flat[: n % 5] = [np.nan, np.inf, -np.inf, 0.0][: n % 5]
        blob = Blob("float32", values.shape, values.nbytes, lambda values=values: values)
        writer.write(Point("a"), Moment(step=n), blob=blob, summary=summarize(values))
    writer.close()
    with safe_open(tmp_path / "run/rank-00000/segment-00000.safetensors", "np") as file:
        names = ["record", "count", "nan", "posinf", "neginf", "zeros", "mean", "std", "min", "max", "l1", "first"]
        table = {name: file.get_tensor(f"table.{name}") for name in names}
        assert len(table["record"]) == 40
        for at, record in enumerate(table["record"]):
            values = file.get_tensor(f"{record:08d}").astype(np.float64)
            finite = values[np.isfinite(values)]
            told = {name: column[at if len(column) > 1 else 0] for name, column in table.items()}
            assert told["count"] == values.size
            assert told["nan"] == np.isnan(values).sum()
            assert told["posinf"] == np.isposinf(values).sum()
            assert told["neginf"] == np.isneginf(values).sum()
            assert told["zeros"] == (values == 0).sum()
            assert (told["min"], told["max"]) == (finite.min(), finite.max())
            np.testing.assert_allclose(told["mean"], finite.mean(), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(told["std"], finite.std(), rtol=1e-12)
            np.testing.assert_allclose(told["l1"], np.abs(finite).sum(), rtol=1e-12)
            np.testing.assert_array_equal(told["first"], values.flat[:10])


def test_the_snippet_of_the_readme_reads_the_table_with_nothing_but_safetensors(tmp_path):
    import layerscope.store

    readme = Path(layerscope.store.__file__).with_name("README.md").read_text()
    snippet = readme.split("```python\n")[1].split("```")[0]
    assert "layerscope" not in snippet
    arrays = [ONE * n for n in range(3)]
    writer = Writer(tmp_path / "run", Manifest())
    for n, array in enumerate(arrays):
        writer.write(Point(f"p{n}"), Moment(step=7), summary=summarize(array))
    writer.close()
    segment = tmp_path / "run/rank-00000/segment-00000.safetensors"
    done = subprocess.run([sys.executable, "-c", snippet, str(segment)], capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        [f"p{n}:output", "7", str(array.mean()), str(array.max())] for n, array in enumerate(arrays)
    ]


def test_rows_losses_and_what_a_footer_says_read_back(tmp_path):
    losses = [Dropped("x\ud800", 3, "the disk", "step=1")]
    path, rows = sealed(tmp_path, ONE, None, TWO, losses=losses, note=b'{"a":"NaN"}')
    found = Sealed(LocalFolder(tmp_path), path.name)
    assert (found.rows, found.rank, found.run, found.unique) == (3, 1, b"whatever".hex(), True)
    assert (found.steps, found.ranks, found.losses) == ((12, 14), [0], losses)
    assert [found.columns().row(at) for at in range(3)] == rows
    found.look_through()
    assert (found.damage, found.bad) == ([], set())


def test_the_same_point_and_moment_twice_is_not_unique(tmp_path):
    rows = [TableRow(n, "a:output", None, 1, 1, 0, 0) for n in range(2)]
    seal(tmp_path, 0, Sealing(b"whatever", 0, rows), following=lambda: None)
    assert not Sealed(LocalFolder(tmp_path), "segment-00000.safetensors").unique


def test_an_unsealed_segment_is_refused_by_the_stock_reader(tmp_path):
    partial = Partial.create(tmp_path, 0)
    partial.write([bytes_of(ONE)])
    with pytest.raises(SafetensorError), safe_open(partial.path, "np"):
        pass
    partial.close()
    assert partial.path.stat().st_size == ROOM + 24


def test_the_headers_room_is_written_and_not_just_seeked_over(tmp_path):
    partial = Partial.create(tmp_path, 0)
    os.fsync(partial.fd)
    assert os.fstat(partial.fd).st_blocks * 512 >= ROOM
    partial.close()


def test_what_was_not_kept_is_cut_off(tmp_path):
    partial = Partial.create(tmp_path, 0)
    rows = rows_of(partial, TWO)
    partial.write([bytes_of(ONE)])
    seal(tmp_path, 0, Sealing(b"whatever", 0, rows), partial.fd, following=lambda: None)
    with safe_open(tmp_path / "segment-00000.safetensors", "np") as file:  # or it would find uncovered bytes
        assert [k for k in file.keys() if not k.startswith("table.")] in (["00000012"], ["00000012", "padding"])  # noqa: SIM118


def test_bytes_that_no_row_vouches_for_are_told_as_plain_bytes(tmp_path):
    partial = Partial.create(tmp_path, 0)
    rows = rows_of(partial, TWO, ONE, TWO + 1)
    what = Sealing(b"whatever", 0, [rows[0], rows[2]], unkeyed=frozenset([14]))
    seal(tmp_path, 0, what, partial.fd, following=lambda: None)
    with safe_open(tmp_path / "segment-00000.safetensors", "np") as file:
        keys = sorted(k for k in file.keys() if "table" not in k)  # noqa: SIM118
        assert keys == ["00000012", f"gap-{ROOM + 10}", "padding"]
        assert file.get_tensor(f"gap-{ROOM + 10}").tobytes() == ONE.tobytes() + (TWO + 1).tobytes()


def test_a_seal_that_fails_leaves_the_pair_as_it_was(tmp_path):
    partial = Partial.create(tmp_path, 0)
    rows = rows_of(partial, ONE)
    before = partial.path.read_bytes()

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            seal(tmp_path, 0, Sealing(b"whatever", 0, rows), partial.fd, following=refuse)
        assert [p.name for p in tmp_path.iterdir()] == ["segment-00000.partial"]
        after = partial.path.read_bytes()
        assert (after[:8], after[ROOM:]) == (before[:8], before[ROOM:])
    with pytest.raises(OSError, match="No space"):
        seal(tmp_path, 1, Sealing(b"whatever", 0, [rows[0]._replace(has_tensor=False)]), following=refuse)
    assert [p.name for p in tmp_path.iterdir()] == ["segment-00000.partial"]


def test_files_follow_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        path, _ = sealed(tmp_path, ONE)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_existing_file_is_never_overwritten(tmp_path):
    (tmp_path / "segment-00000.partial").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        Partial.create(tmp_path, 0)
    assert (tmp_path / "segment-00000.partial").read_bytes() == b"precious"


def test_512_ordinary_tensors_fit():
    entries = [entry(10**7 + n, "bfloat16", (16, 2048, 12288), n * 10**12, (n + 1) * 10**12) for n in range(512)]
    assert sum(len(each) + 1 for each in entries) <= HEADER_ROOM


def test_the_header_of_the_table_fits_what_is_reserved_for_it(tmp_path):
    big = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8)
    rows = rows_of(Partial.create(tmp_path, 0), *[big] * 300, note=b'{"a":1}')
    rows = [
        row._replace(summary=summarize(big.astype(np.float32) * n), step=-(2**60) * (n % 2))
        for n, row in enumerate(rows)
    ]
    with (tmp_path / "segment-00000.partial").open("r+b") as file:
        seal(tmp_path, 0, Sealing(b"whatever", 0, rows), file.fileno(), following=lambda: None)
    header = json.loads((tmp_path / "segment-00000.safetensors").read_bytes()[8:ROOM])
    table = {k: v for k, v in header.items() if not k.isdecimal()}
    assert len(json.dumps(table, separators=(",", ":"))) + 50 * 30 < (8 << 10)


def test_a_header_too_large_for_its_room_is_refused_and_the_pair_kept(tmp_path):
    partial = Partial.create(tmp_path, 0)
    rows = rows_of(partial, *[np.zeros((1,) * 60, np.float32)] * 500)
    with pytest.raises(ValueError, match="does not fit the 65528 reserved"):
        seal(tmp_path, 0, Sealing(b"whatever", 0, rows), partial.fd, following=lambda: None)
    assert [p.name for p in tmp_path.iterdir()] == ["segment-00000.partial"]
