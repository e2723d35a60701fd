"""strictjson.py: JSON for any parser, with names for what JSON cannot say."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from layerscope.store import strictjson


def test_non_finite_numbers_are_named_strings():
    text = strictjson.dumps({"a": math.nan, "b": [math.inf, -math.inf], "c": 0.5})
    assert json.loads(text) == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": 0.5}


def test_they_read_back_as_themselves():
    back = strictjson.loads(strictjson.dumps({"a": math.nan, "b": [math.inf, -math.inf]}))
    assert math.isnan(back["a"])
    assert back["b"] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\-Infinity", "nan", "NaN!", "", "\ud800"]
)
def test_a_text_that_is_such_a_name_stays_a_text(text):
    assert strictjson.loads(strictjson.dumps({"note": text})) == {"note": text}


def test_a_bare_nan_is_not_json():
    with pytest.raises(ValueError, match="NaN is not JSON"):
        strictjson.loads('{"a": NaN}')


def test_numpys_numbers_are_numbers():
    assert strictjson.dumps({"a": np.float32(0.5), "b": np.int64(3), "c": True}) == '{"a":0.5,"b":3,"c":true}'


@pytest.mark.parametrize(
    ("value", "sentence"),
    [({1: 2}, "keys are text; 1 is int"), ({"a": object}, "JSON has no word for"), ({"a": b"x"}, "bytes")],
)
def test_what_json_has_no_word_for_is_refused(value, sentence):
    with pytest.raises(TypeError, match=sentence):
        strictjson.dumps(value)
