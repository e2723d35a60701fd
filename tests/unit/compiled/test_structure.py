"""Forms of nested values: taken apart in the order of `leaves`, and made again, type included."""

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from layerscope.compiled.structure import Taken, opaque_parts, rebuilt
from layerscope.runtimes.values import leaves

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Parts:
    hidden: torch.Tensor
    label: str = "none"


def a(n):
    return torch.full((2,), float(n))


VALUES = [
    a(0),
    (a(0), None, [a(1), 3, True]),
    {"x": a(0), "y": {"z": a(1)}, 3: a(2)},
    Pair(a(0), (a(1),)),
    Parts(a(0), "kept"),
    CausalLMOutputWithPast(logits=a(0), hidden_states=(a(1), a(2))),
    OrderedDict(b=a(0), a=a(1)),
    (),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_made_again_with_other_tensors_and_its_own_types(value):
    taken = Taken.of(value)
    again = rebuilt(taken.form, [tensor + 10 for tensor in taken.tensors], taken.classes)
    assert type(again) is type(value)
    paths = [(path, float(tensor[0])) for path, tensor in leaves(value)]
    assert [(path, float(tensor[0]) - 10) for path, tensor in leaves(again)] == paths
    assert [float(tensor[0]) for tensor in taken.tensors] == [number for _, number in paths]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_form_is_plain_json(value):
    form = Taken.of(value).form
    assert json.loads(json.dumps(form)) == form


def test_what_is_no_tensor_comes_back_as_it_was():
    taken = Taken.of({"n": 3, "deep": [None, "text", 1.5]})
    assert rebuilt(taken.form, []) == {"n": 3, "deep": [None, "text", 1.5]}


def test_an_object_that_has_no_parts_is_named_and_left_out():
    taken = Taken.of((a(0), object()))
    assert opaque_parts(taken.form) == ["object"]
    assert rebuilt(taken.form, taken.tensors)[1] is None


def test_a_class_of_transformers_is_imported_and_another_one_is_stood_in_for():
    taken = Taken.of(CausalLMOutputWithPast(logits=a(0)))
    assert type(rebuilt(taken.form, taken.tensors)) is CausalLMOutputWithPast
    form = {"is": "nowhere.at_all:Output", "fields": [["logits", {"tensor": 0}]]}
    stand_in = rebuilt(form, [a(7)])
    assert stand_in.logits is stand_in["logits"]
    with pytest.raises(AttributeError, match="it has logits"):
        stand_in.loss  # noqa: B018


def test_a_file_cannot_have_anything_called_but_a_class_of_fields():
    form = {"is": "os:system", "fields": [["command", {"value": "exit 1"}]]}
    assert rebuilt(form, []) == {"command": "exit 1"}


def test_a_value_inside_itself_is_walked_once():
    value = [a(0)]
    value.append(value)
    assert opaque_parts(Taken.of(value).form) == ["list"]
