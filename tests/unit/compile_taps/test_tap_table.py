"""The table of taps reads back from its JSON, and says when it is none."""

import json

import pytest

from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.tap_table import TapEntry, TapTable
from layerscope.errors import BadModel
from layerscope.store import Missing

TABLE = TapTable(
    points=("a:output",),
    arguments=Arguments(("x",), {"is": "dict", "fields": [["x", {"tensor": 0}]]}, {"y": {"value": None}}),
    output={"is": "tuple", "parts": [{"tensor": 0}, {"value": float("inf")}]},
    outputs=1,
    taps=(TapEntry("a:output", 0), TapEntry("a:output", 1)),
    hidden=(0, 1),
    embedded=False,
    logits=("tap", 1),
    missing=(Missing("b:output", "never called"),),
    notes=("said",),
    observer_effect="not measured",
)


def test_it_reads_back():
    assert TapTable.loads(TABLE.dumps(backend="onnx")) == ("onnx", TABLE)
    without = TapTable((), TABLE.arguments, TABLE.output, 1, (), (), False, None)
    assert TapTable.loads(without.dumps(backend="export")) == ("export", without)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "layerscope-compiled", "version": 99}', "{" * 9999])
def test_anything_else_is_refused(text):
    with pytest.raises(BadModel, match=r"taps\.json is not a table of taps"):
        TapTable.loads(text)


@pytest.mark.parametrize(
    "damage",
    [
        {"hidden": [99]},
        {"hidden": [-1]},
        {"hidden": ["a"]},
        {"logits": ["tap", 2]},
        {"logits": ["nowhere", 0]},
        {"output": {"tensor": 7}},
        {"output": {"is": "tuple", "parts": [{"tensor": 0}, {"tensor": 1}]}},
        {"output": {"is": 3, "parts": []}},
        {"outputs": 2},
        {"taps": [{"point": "::::", "call": 0}] * 2},
        {"taps": [{"point": "a:output", "call": "0"}] * 2},
        {"arguments": {"parameters": ["x"], "form": {"tensor": 0}, "defaults": {}}},
        {"arguments": {"parameters": ["x"], "form": {"is": "dict", "fields": [["x", 3]]}, "defaults": {}}},
    ],
    ids=str,
)
def test_a_table_that_names_what_it_has_not_is_refused(damage):
    said = {**json.loads(TABLE.dumps(backend="onnx")), **damage}
    with pytest.raises(BadModel, match=r"taps\.json is not a table of taps that this layerscope reads: .*[^.]\.$"):
        TapTable.loads(json.dumps(said))


def test_a_tap_is_called_by_what_tells_it_apart():
    entries = [("m.3:output", 0), ("m.3:output", 2), ("m.3:output[0]", 0), ("m.3:input[x]", 0), (".:output", 0)]
    keys = [TapEntry(*entry).key for entry in entries]
    assert keys == ["m.3", "m.3 call=2", "m.3:output[0]", "m.3:input[x]", "."]
