"""columns.py: rows as bytes, and rows as columns. That both read back, of any row: tests/laws/test_store.py."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from layerscope.errors import Damaged
from layerscope.stats import Summary, summarize
from layerscope.store.checksum import crc32c
from layerscope.store.columns import COUNTS, MOMENTS, Columns, TableRow, pack, unpack

PLAIN = TableRow(3, "a:output", None, 1, 2, 3, 4)
TENSOR = PLAIN._replace(
    has_tensor=True, dtype="bfloat16", shape=(2, 0, 3), bytes_of=1, offset=65536, length=12, crc32c=7
)
BOTH = TENSOR._replace(summary=summarize(np.array([1.5, -0.0, math.nan, math.inf], np.float32)), note=b'{"a":1}')


@pytest.mark.parametrize("row", [PLAIN, TENSOR, BOTH, PLAIN._replace(epoch=0), PLAIN._replace(point="\ud800:input")])
def test_a_row_reads_back_from_bytes_and_from_columns(row):
    assert pack(unpack(pack(row))) == pack(row)
    assert unpack(pack(row)) == row
    assert Columns.of([PLAIN, row, BOTH]).row(1) == row


def test_every_byte_of_a_row_counts():
    whole = pack(BOTH._replace(epoch=5))
    for at in range(len(whole)):
        for bit in (1, 0x80):
            changed = bytearray(whole)
            changed[at] ^= bit
            try:
                assert pack(unpack(changed)) != whole, at
            except Damaged:
                continue


def test_every_truncation_and_what_is_too_long_is_damaged():
    whole = pack(BOTH)
    for data in (*(whole[:end] for end in range(len(whole))), whole + b"\0"):
        with pytest.raises(Damaged, match="does not say what a record must"):
            unpack(data)


def test_columns_are_as_narrow_as_their_values():
    columns = Columns.of([PLAIN._replace(record=n, step=300 * n, batch=-n, call=70_000 * n) for n in range(5)])
    kinds = {name: columns.arrays[name].dtype.str[1:] for name in ("record", "step", "batch", "call", "mean")}
    assert kinds == {"record": "u1", "step": "u2", "batch": "i1", "call": "u4", "mean": "f4"}
    wide = Columns.of([PLAIN._replace(step=2**63 - 1), PLAIN._replace(step=-(2**63))])
    assert [wide.row(at).step for at in range(2)] == [2**63 - 1, -(2**63)]
    beyond = Columns.of([TENSOR._replace(offset=2**64 - 1), TENSOR._replace(offset=1)])
    assert [beyond.row(at).offset for at in range(2)] == [2**64 - 1, 1]


def test_numbers_stay_float32_only_where_that_keeps_every_bit():
    fields = {name: getattr(BOTH.summary, name) for name in Summary.__dataclass_fields__}
    for mean, kind in ((0.5, "f4"), (-0.0, "f4"), (math.inf, "f4"), (0.1, "f8"), (1e300, "f8"), (5e-324, "f8")):
        row = PLAIN._replace(summary=Summary(**(fields | {"mean": mean})))
        columns = Columns.of([row])
        assert columns.arrays["mean"].dtype.str[1:] == kind
        back = columns.row(0).summary.mean
        assert (back, math.copysign(1, back)) == (mean, math.copysign(1, mean))


def test_names_and_shapes_are_numbers_in_lists():
    columns = Columns.of([TENSOR, TENSOR._replace(point="b:output"), TENSOR._replace(shape=())])
    assert (columns.points, columns.dtypes) == (["a:output", "b:output"], ["bfloat16"])
    assert columns.shapes == [(2, 0, 3), ()]
    assert columns.arrays["point"].tolist() == [0, 1, 0]


def test_the_checks_are_those_of_the_rows_as_bytes():
    columns = Columns.of([PLAIN, BOTH])
    assert columns.arrays["check"].tolist() == [crc32c(pack(PLAIN)), crc32c(pack(BOTH))]


def test_no_rows_are_columns_too():
    columns = Columns.of([])
    assert (columns.rows, columns.points) == (0, [])
    assert all(len(array) == 0 for array in columns.arrays.values())


@pytest.mark.parametrize(
    ("name", "value"), [("point", 9), ("dtype", 9), ("shape", 9), ("note_size", 200), ("sketch_size", 250)]
)
def test_columns_that_contradict_each_other_are_damaged(name, value):
    columns = Columns.of([BOTH, BOTH])
    columns.arrays[name] = np.array([value, value])
    with pytest.raises(Damaged, match="do not fit together"):
        columns.row(0)


def test_every_field_of_a_summary_has_a_column():
    kept = {*COUNTS, *MOMENTS, "first", "fingerprint", "placed", "sketch", "channels", "dtype", "shape"}
    assert kept == {field.name for field in dataclasses.fields(Summary)}
