"""Laws of the store: what is written is read, bit for bit and name for name; damage never reads as something else."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from layerscope.errors import NewerFormat
from layerscope.points import Moment, Point
from layerscope.stats import Sketch, Summary, summarize
from layerscope.store import Blob, Manifest, MemoryRun, Writer, open_run, strictjson
from layerscope.store.address import LocalFolder, rank_of, segment_of
from layerscope.store.checksum import crc32c
from layerscope.store.columns import Columns, TableRow, pack, unpack
from layerscope.store.dtypes import STORED
from layerscope.store.journal import frame, read, row_frame
from layerscope.store.segment import Sealed, Sealing, seal

FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=200, deadline=None)

NUMBERS = st.integers(-(2**63), 2**63 - 1)
MOMENTS = st.builds(Moment, epoch=st.none() | NUMBERS, step=NUMBERS, batch=NUMBERS, call=NUMBERS, rank=NUMBERS)
NAMES = st.text(max_size=30) | st.sampled_from(
    [
        "../../x",
        "/etc/passwd",
        "</script>",
        "a\nb",
        "x" * 300,
        "ä日本",
        "\x00",
        "\ud800",
        "op:a",
        "a[0]",
        "a:input",
        "..",
    ]
)
POINTS = st.builds(
    Point,
    name=NAMES,
    side=st.sampled_from(["input", "output", "grad_input", "grad_output"]),
    leaf=st.lists(st.integers(-3, 10) | st.text(max_size=8), max_size=3).map(tuple),
    op=st.booleans(),
).filter(lambda p: not (p.op and p.name == ""))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["NaN", "\\Infinity"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.5, 3e38, 1e-45]


@st.composite
def tensors(draw) -> torch.Tensor:
    """Draw a tensor of any storable dtype: special values, any layout, empty, 0-d."""
    dtype = getattr(torch, draw(st.sampled_from(sorted(STORED))))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    if draw(st.booleans()) and dtype.is_floating_point and dtype.itemsize >= 2:
        values = draw(st.lists(st.sampled_from(SPECIAL), min_size=count, max_size=count))
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape)
    else:
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        data = data % 2 if dtype == torch.bool else data
        tensor = data.view(dtype).reshape(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "expanded"]))
    if dtype == torch.float4_e2m1fn_x2 or tensor.dim() < 1 or layout == "plain":
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, -1)
    return tensor[::2] if layout == "strided" else tensor.unsqueeze(0).expand(2, *tensor.shape)


def bits(tensor: torch.Tensor) -> bytes:
    # clone, not contiguous(): a tensor of one element may keep an odd stride and still count as contiguous
    plain = tensor.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a, b) -> bool:
    """Compare JSON values, where NaN is equal to itself and 1 is not 1.0 or True."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def files_below(path: Path) -> set[str]:
    return {p.name for p in path.rglob("*")}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@FEW
@given(records=st.lists(st.tuples(POINTS, MOMENTS, st.none() | tensors(), VALUES), max_size=6), tiny=st.booleans())
@example(records=[(Point("a"), Moment(call=call), None, 0) for call in (-1, 2**53 + 1)], tiny=True)
@example(records=[(Point("a"), Moment(call=call), None, 0) for call in (-1, 2**63 - 1)], tiny=False)
def test_what_is_written_is_read_back_bit_for_bit_and_no_path_is_made_of_it(records, tiny):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        writer = Writer(path, Manifest(), segment_tensors=1 if tiny else 512)
        memory = MemoryRun()
        last = {}
        for point, moment, tensor, value in records:
            blob = None
            if tensor is not None:
                data = bits(tensor)
                kind = str(tensor.dtype).removeprefix("torch.")
                blob = Blob(kind, tuple(tensor.shape), len(data), lambda data=data: data)
            writer.write(point, moment, blob=blob, note={"value": value})
            memory.add(point, moment, tensor=tensor, note={"value": value})
            last[(point, moment)] = (tensor, value)
        done = writer.close()
        assert (done.records, done.dropped) == (len(records), [])
        run = open_run(path)
        assert (
            {(e.point, e.moment) for e in run.records()} == {(e.point, e.moment) for e in memory.records()} == set(last)
        )
        assert run.replaced == memory.replaced == len(records) - len(last)
        assert set(run.points) == {p for p, _ in last}
        assert set(run.moments) == {m for _, m in last}
        for entry in run.records():
            tensor, value = last[(entry.point, entry.moment)]
            assert same(entry.note, {"value": value})
            when = {name: getattr(entry.moment, name) for name in ("step", "batch", "call", "rank")}
            if tensor is None:
                assert entry.dtype is None
                continue
            if entry.moment.epoch is not None:
                when["epoch"] = entry.moment.epoch
            elif sum(p == entry.point and m == replace(entry.moment, epoch=m.epoch) for p, m in last) > 1:
                continue  # "no epoch" cannot be asked for beside others that have one
            back = run.tensor(entry.point, **when)
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert bits(back) == bits(tensor)
            if back.dim():
                rows = slice(0, back.shape[0], 2)
                part = run.tensor(entry.point, **when, rows=rows)
                if tensor.dtype != torch.float4_e2m1fn_x2:
                    assert bits(part) == bits(tensor[rows])
        assert all(
            name in ("run.json", "lock") or rank_of(name) is not None or segment_of(name) for name in files_below(path)
        )
        assert files_below(Path(folder)) - files_below(path) == {"run"}


@MANY
@given(VALUES)
def test_json_reads_back_as_itself_and_is_json_for_others(value):
    import json

    text = strictjson.dumps({"value": value})
    json.loads(text, parse_constant=lambda name: 1 / 0)
    assert same(strictjson.loads(text), {"value": value})


@MANY
@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_a_checksum_goes_on_where_another_stopped(data, cut):
    cut = min(cut, len(data))
    value = google_crc32c.value(data)
    assert crc32c(data[cut:], crc32c(data[:cut])) == value


@st.composite
def summaries(draw) -> Summary:
    """Draw statistics: of tensors where that is quick, and of numbers that no tensor has."""
    if draw(st.booleans()):
        values = torch.tensor(draw(st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), max_size=12)))
        return summarize(values, channels=draw(st.none() | st.just(0)))
    counts = draw(st.lists(st.integers(0, 2**63 - 1), min_size=6, max_size=6))
    moments = draw(st.lists(st.floats() | st.sampled_from(SPECIAL), min_size=5, max_size=5))
    first = tuple(draw(st.lists(st.floats(), max_size=10)))
    shape = draw(st.none() | st.lists(st.integers(0, 2**40), max_size=4).map(tuple))
    buckets = draw(st.dictionaries(st.integers(-73_000, 73_000), st.integers(1, 2**40), max_size=5))
    sketch = Sketch(np.array(sorted(buckets), np.int32), np.array([buckets[k] for k in sorted(buckets)], np.int64))
    prints = st.none() | st.integers(0, 2**64 - 1)
    return Summary(
        *counts[1:], *moments, first, draw(st.sampled_from([*sorted(STORED), "mixed", ""])), shape, counts[0],
        draw(st.none() | st.just(sketch)), draw(prints), draw(prints),
    )  # fmt: skip


@st.composite
def rows(draw) -> TableRow:
    """Draw a row of any kind."""
    moment = draw(MOMENTS)
    numbers = st.integers(0, 2**63 - 1)
    row = TableRow(draw(numbers), str(draw(POINTS)), moment.epoch, moment.step, moment.batch, moment.call, moment.rank)
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=4)))
        places = {name: draw(st.integers(0, 2**64 - 1)) for name in ("bytes_of", "offset", "length")}
        row = row._replace(has_tensor=True, dtype=draw(st.sampled_from(sorted(STORED))), shape=shape, **places)
        row = row._replace(crc32c=draw(st.integers(0, 2**32 - 1)))
    return row._replace(
        summary=draw(st.none() | summaries()), note=draw(st.just(b"") | st.binary(min_size=1, max_size=9))
    )


@FEW
@given(st.lists(rows(), max_size=6))
def test_rows_read_back_to_the_last_bit_from_bytes_from_columns_and_from_a_sealed_segment(drawn):
    forms = [pack(row) for row in drawn]
    assert [pack(unpack(form)) for form in forms] == forms
    columns = Columns.of(drawn)
    assert [pack(columns.row(at)) for at in range(len(drawn))] == forms
    assert columns.arrays["check"].tolist() == [google_crc32c.value(form) for form in forms]
    plain = [
        row._replace(has_tensor=False, dtype="", shape=(), bytes_of=0, offset=0, length=0, crc32c=0) for row in drawn
    ]
    with tempfile.TemporaryDirectory() as folder:
        seal(Path(folder), 0, Sealing(b"whatever", 0, plain), following=lambda: None)
        found = Sealed(LocalFolder(Path(folder)), "segment-00000.safetensors")
        back = found.columns()
        assert [pack(back.row(at)) for at in range(found.rows)] == [pack(row) for row in plain]
        found.look_through()
        assert found.damage == []


RUN = b"thisrun!"


@MANY
@given(st.integers(0, 10**6), POINTS, MOMENTS)
def test_a_journals_frame_reads_back(number, point, moment):
    [row] = read(row_frame(RUN, TableRow(number, str(point), *moment_of(moment)))[0]).rows
    assert (row.record, Point.parse(row.point), row.moment) == (number, point, moment)


def moment_of(moment: Moment) -> tuple:
    return moment.epoch, moment.step, moment.batch, moment.call, moment.rank


@MANY
@given(st.lists(POINTS, min_size=1, max_size=4), st.data())
def test_a_changed_journal_loses_rows_and_never_gains_or_alters_one(points, data):
    schema = frame(RUN, 1, b'{"format":"layerscope","version":2,"rank":0,"run":"%s"}' % RUN.hex().encode())
    raw = schema + b"".join(row_frame(RUN, TableRow(n, str(p), None, n, 0, 0, 0))[0] for n, p in enumerate(points))
    originals = set(read(raw).rows)
    assert len(originals) == len(points)
    start = data.draw(st.integers(0, len(raw) - 1))
    end = data.draw(st.integers(start, min(len(raw), start + 30)))
    changed = raw[:start] + data.draw(st.binary(max_size=30)) + raw[end:]
    assert set(read(changed).rows) <= originals


@MANY
@given(st.binary(max_size=500))
def test_any_bytes_can_be_read_as_a_journal(raw):
    try:
        assert read(raw).rows == []
    except NewerFormat:
        raise AssertionError("random bytes were taken for a journal of the future") from None
