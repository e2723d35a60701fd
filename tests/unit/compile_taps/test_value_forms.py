"""Forms of nested values: taken apart in the order of `leaves`, and made again, type included."""

import copy
import json
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from layerscope.compile_taps.value_forms import FlatValue, counted, opaque_parts, rebuilt, same, tensors_of
from layerscope.runtimes.values import leaves

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Parts:
    hidden: torch.Tensor
    label: str = "none"


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor


@dataclass
class Late:
    hidden: torch.Tensor
    extra: int = field(init=False, default=3)
    unset: int = field(init=False)


@dataclass
class Doubling:
    hidden: torch.Tensor

    def __post_init__(self):
        self.hidden = self.hidden * 2
        self.norm = self.hidden.norm().reshape(1)


class Attributes(dict):
    def __init__(self, needed, **items):
        super().__init__(needed=needed, **items)
        self.__dict__ = self


class Tagged(dict):
    pass


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
    Frozen(a(0)),
    Late(a(0)),
    Attributes(a(0), other=a(1)),
    Tagged(x=a(0)),
    torch.stack([a(0), a(1)]).max(0),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_made_again_with_other_tensors_and_its_own_types(value):
    taken = FlatValue.of(value)
    again = rebuilt(taken.form, [tensor + 10 for tensor in taken.tensors], taken.classes)
    assert type(again) is type(value)
    paths = [(path, float(tensor[0])) for path, tensor in leaves(value)]
    assert [(path, float(tensor[0]) - 10) for path, tensor in leaves(again)] == paths
    assert [float(tensor[0]) for tensor in taken.tensors] == [number for _, number in paths]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_form_is_plain_json(value):
    form = FlatValue.of(value).form
    assert json.loads(json.dumps(form)) == form


def test_what_is_no_tensor_comes_back_as_it_was():
    taken = FlatValue.of({"n": 3, "deep": [None, "text", 1.5]})
    assert rebuilt(taken.form, []) == {"n": 3, "deep": [None, "text", 1.5]}


def test_no_code_of_a_class_is_run_to_make_it_again():
    taken = FlatValue.of(Doubling(a(3)))
    again = rebuilt(taken.form, [a(7), a(8)], taken.classes)
    assert type(again) is Doubling
    assert float(again.hidden[0]) == 7.0
    assert float(again.norm[0]) == 8.0
    late = rebuilt(FlatValue.of(Late(a(0))).form, [a(1)], {f"{__name__}:Late": Late})
    assert late.extra == 3
    assert not hasattr(late, "unset")
    named = rebuilt(FlatValue.of(Attributes(a(0))).form, [a(5)], {f"{__name__}:Attributes": Attributes})
    assert named.needed is named["needed"]


def test_what_topk_returns_has_its_names():
    taken = FlatValue.of(torch.tensor([[3.0, 1.0, 2.0]]).topk(2))
    again = rebuilt(json.loads(json.dumps(taken.form)), taken.tensors)
    assert type(again) is torch.return_types.topk
    assert again.values.tolist() == [[3.0, 2.0]]
    assert again.indices.tolist() == [[0, 2]]
    odd = {"is": "torch.return_types:__name__", "parts": [{"value": 1}]}
    assert rebuilt(odd, []) == (1,)


@pytest.mark.parametrize("factory", [None, list, int])
def test_a_defaultdict_keeps_its_factory(factory):
    taken = FlatValue.of(defaultdict(factory, y=a(0)))
    again = rebuilt(json.loads(json.dumps(taken.form)), taken.tensors)
    assert type(again) is defaultdict
    assert again.default_factory is factory


def test_what_is_more_than_its_items_is_named_and_left_out():
    tagged = Tagged(x=a(0))
    tagged.tag = object()
    for value in (tagged, UserDict(x=a(0)), defaultdict(lambda: 3, x=a(0))):
        assert opaque_parts(FlatValue.of(value).form) == [type(value).__name__]


def test_what_is_left_out_cannot_be_taken_for_a_number():
    left_out = rebuilt({"opaque": "computed int"}, [])
    for use in (bool, int, float, len, lambda n: n == 6, lambda n: n + 1, list, range):
        with pytest.raises(TypeError, match=r"computed int here, which a compiled graph cannot|LeftOut"):
            use(left_out)


def test_forms_are_the_same_where_a_model_could_not_tell():
    one = FlatValue.of({"x": [a(0), 1], "y": float("nan")}).form
    assert same(one, FlatValue.of({"x": [a(5), 1], "y": float("nan")}).form)
    for other in ({"x": [a(0), True], "y": float("nan")}, {"x": (a(0), 1), "y": float("nan")}, {"x": [a(0), 1]}):
        assert not same(one, FlatValue.of(other).form)


def test_only_the_tensors_that_the_form_has_are_taken():
    form = {"is": "tuple", "parts": [{"tensor": 0}, {"opaque": "computed int"}, {"is": "dict", "fields": []}]}
    assert [float(t[0]) for t in tensors_of(form, (a(4), a(5), {"z": a(6)}))] == [4.0]
    named = FlatValue.of(Parts(a(1), "b")).form
    assert [float(t[0]) for t in tensors_of(named, Parts(a(2), a(3)))] == [2.0]


@pytest.mark.parametrize(
    "form", [3, {}, {"tensor": 1}, {"tensor": "0"}, {"parts": []}, {"value": 1, "tensor": 0}], ids=repr
)
def test_what_is_no_form_is_told(form):
    with pytest.raises(ValueError, match=r"is no form|are numbered|does not say"):
        counted(form)


def test_an_object_that_has_no_parts_is_named_and_left_out():
    taken = FlatValue.of((a(0), object()))
    assert opaque_parts(taken.form) == ["object"]
    left_out = rebuilt(taken.form, taken.tensors)[1]
    assert repr(copy.deepcopy(left_out)) == "<a object that the compiled graph left out>"
    with pytest.raises(AttributeError, match=r"no 'update': the model returns a object here.*backend='inductor'"):
        left_out.update  # noqa: B018


def test_a_class_of_transformers_is_imported_and_another_one_is_stood_in_for():
    taken = FlatValue.of(CausalLMOutputWithPast(logits=a(0)))
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
    assert opaque_parts(FlatValue.of(value).form) == ["list"]
