"""Modes as values: what they are called, which fit, and that making one leaves the model alone."""

import copy

import pytest
import torch
from torch import nn

from layerscope.errors import BadText, LayerscopeError, MissingExtra, NoSuchMode, Unsupported
from layerscope.models.tiny import tiny_transformer
from layerscope.modes import registry
from layerscope.modes.registry import Mode, Setting, choose, copied, mode, modes_of, variant, why_not


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """What a test declares is gone after it."""
    monkeypatch.setattr(registry, "_DECLARED", {})


def same(model: nn.Module, setting: Setting) -> nn.Module:
    return copied(model)


def test_any_model_has_the_generic_modes_in_this_order():
    assert [one.name for one in modes_of(nn.Linear(2, 2))] == [
        *("fp32", "fp16", "bf16", "int8-weight", "int8-dynamic", "int4-weight", "fp8")
    ]


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("fp_only", ["fp32", "fp16", "bf16"]),
        ("quant_only", ["int8-weight", "int8-dynamic", "int4-weight", "fp8"]),
        ("essential", ["fp32", "bf16", "int8-weight", "int8-dynamic"]),
        ("all", ["fp32", "fp16", "bf16", "int8-weight", "int8-dynamic", "int4-weight", "fp8"]),
    ],
)
def test_a_group_stands_for_its_modes(group, names):
    assert [one.name for one in choose([group], nn.Linear(32, 2)).modes] == names


def test_names_and_groups_are_chosen_once_and_in_the_order_asked():
    chosen = choose(["bf16", "fp_only", "bf16"], nn.Linear(2, 2)).modes
    assert [one.name for one in chosen] == ["bf16", "fp32", "fp16"]


def test_of_a_group_what_does_not_fit_is_left_out_with_its_reason():
    choice = choose(["quant_only"], nn.Linear(30, 2))
    assert [one.name for one in choice.modes] == ["int8-weight", "int8-dynamic", "fp8"]
    ((left, reason),) = choice.left_out
    assert left.name == "int4-weight"
    assert "widths: 30" in reason


def test_a_mode_called_by_name_that_does_not_fit_says_why():
    with pytest.raises(Unsupported, match="mode 'int8-weight' does not fit Conv2d: it has no Linear layer"):
        choose(["int8-weight"], nn.Conv2d(1, 1, 1))
    with pytest.raises(Unsupported, match="no mode of quant_only fits Conv2d: int8-weight: it has no Linear"):
        choose(["quant_only"], nn.Conv2d(1, 1, 1))


def test_an_unknown_mode_is_one_sentence_with_the_nearest_and_the_list():
    with pytest.raises(NoSuchMode) as error:
        choose(["fp32", "int8-wieght"], nn.Linear(2, 2))
    said = str(error.value)
    assert said.startswith("there is no mode 'int8-wieght' of Linear; did you mean int8-weight or ")
    assert "The modes are fp32, fp16, bf16, int8-weight" in said
    assert said.endswith("the groups all, fp_only, quant_only, essential.")
    assert "\n" not in said


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-x", "all", "essential"])
def test_what_cannot_name_a_folder_or_is_a_group_is_no_name(name):
    with pytest.raises(BadText, match="no name for a mode"):
        Mode(name, "nothing", same)


def test_a_group_that_is_not_there_is_refused():
    with pytest.raises(BadText, match="no group 'most'"):
        Mode("mine", "nothing", same, groups=frozenset({"most"}))


@pytest.mark.parametrize("alpha", [0, -1, 1.01, float("nan")])
def test_an_alpha_that_is_no_share_is_refused(alpha):
    with pytest.raises(BadText, match="percentile_alpha"):
        Setting(percentile_alpha=alpha)


def test_a_declared_mode_is_given_a_copy_to_change():
    model = nn.Linear(2, 2)
    before = model.weight.clone()

    @mode("zero", about="no weights at all", groups=["all", "quant_only"])
    def zero(own):
        own.weight.data.zero_()

    assert [one.name for one in modes_of(model)][-1] == "zero"
    assert "zero" in {one.name for one in choose(["quant_only"], model).modes}
    assert not variant(model, "zero").weight.any()
    assert torch.equal(model.weight, before)


def test_a_declared_mode_may_return_another_module():
    @mode("wrapped", about="in a Sequential")
    def wrapped(own):
        return nn.Sequential(own)

    assert isinstance(variant(nn.Linear(2, 2), "wrapped"), nn.Sequential)


def test_a_declared_mode_cannot_take_the_name_of_a_built_in_one():
    for name in ("fp32", "2-1"):
        with pytest.raises(BadText, match=f"mode '{name}' is built in"):
            mode(name, about="mine")(lambda own: None)


def test_a_declared_mode_that_fails_is_told_in_one_sentence():
    @mode("broken", about="fails")
    def broken(own):
        raise RuntimeError("no\nway")

    with pytest.raises(Unsupported, match="mode 'broken' cannot be made of Linear: RuntimeError: no way"):
        variant(nn.Linear(2, 2), "broken")


def test_a_library_that_is_missing_is_a_reason_in_a_list_and_an_error_by_name():
    def lacks(model: nn.Module) -> str | None:
        raise MissingExtra("it takes nothing: pip install nothing")

    lacking = Mode("lacking", "x", same, lacks)
    assert why_not(lacking, nn.Linear(2, 2)) == "it takes nothing: pip install nothing"
    with pytest.raises(MissingExtra):
        variant(nn.Linear(2, 2), lacking)


def test_a_mode_that_fails_to_say_whether_it_fits_does_not_fit():
    mode("odd", about="x", applies=lambda model: model.nothing)(lambda own: None)
    mode("refused", about="x", applies=refuse)(lambda own: None)
    model = nn.Linear(32, 2)
    reasons = {one.name: why_not(one, model) for one in modes_of(model)}
    said = "asked whether it fits, it failed with AttributeError: 'Linear' object has no attribute 'nothing'"
    assert (reasons["odd"], reasons["refused"], reasons["fp32"]) == (said, "not today", None)
    choice = choose(["all"], model)
    assert "fp8" in [one.name for one in choice.modes]
    assert [(one.name, reason) for one, reason in choice.left_out] == [("odd", said), ("refused", "not today")]
    for ask in (choose, lambda names, model: variant(model, names[0])):
        with pytest.raises(Unsupported, match="mode 'odd' does not fit Linear: asked whether it fits, it failed with"):
            ask(["odd"], model)


def refuse(model: nn.Module) -> str | None:
    raise BadText("not today")


def test_a_model_that_cannot_be_copied_is_told_in_one_sentence():
    model = nn.Linear(2, 2)
    model.cached = model(torch.ones(1, 2))  # not a leaf: torch refuses to copy it
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    with pytest.raises(Unsupported, match=r"works on a copy, and this Linear cannot be copied \(RuntimeError"):
        variant(model, "bf16")


def test_what_is_no_module_has_no_modes():
    with pytest.raises(Unsupported, match=r"modes are variants of a torch\.nn\.Module, and this is a dict"):
        modes_of({})


def test_a_group_is_not_a_mode():
    with pytest.raises(NoSuchMode, match="'all' is a group of modes; name one of them: fp32"):
        variant(nn.Linear(2, 2), "all")


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8-weight", "int8-dynamic", "int4-weight", "fp8"])
def test_making_a_variant_leaves_the_given_model_as_it_is(name):
    model = tiny_transformer(layers=1, hidden=32, heads=2)
    ids = torch.arange(7).view(1, 7)
    before, output = {k: v.clone() for k, v in model.state_dict().items()}, model(ids)
    own = variant(model, name)
    after = model.state_dict()
    assert {k: (v.dtype, type(v)) for k, v in after.items()} == {k: (v.dtype, type(v)) for k, v in before.items()}
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert torch.equal(model(ids), output)
    mine = {t.data_ptr() for t in model.parameters()}
    assert not any(type(p) is nn.Parameter and p.data_ptr() in mine for p in own.parameters())


def test_every_error_is_one_of_ours():
    assert issubclass(NoSuchMode, LayerscopeError)
    assert issubclass(NoSuchMode, LookupError)
