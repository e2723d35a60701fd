import pickle
import random

import pytest

from layerscope.errors import BadText, LayerscopeError
from layerscope.points import SIDES, Moment, Point, escape, leaf_text, parse_leaf, unescape, unwrapped

# Text form of a point ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "text"),
    [
        (Point("blocks.3.attn"), "blocks.3.attn:output"),
        (Point("blocks.3.attn", "input", (0, "mask")), "blocks.3.attn:input[0][mask]"),
        (Point("a", "grad_input"), "a:grad_input"),
        (Point("a", "grad_output", ("past.key-values",)), "a:grad_output[past.key-values]"),
        (Point(""), ".:output"),
        (Point("."), "\\.:output"),
        (Point(".."), "..:output"),
        (Point("aten.softmax", op=True), "op:aten.softmax:output"),
        (Point("a:b"), "a\\:b:output"),
        (Point("a[0]"), "a\\[0\\]:output"),
        (Point("op:x"), "op\\:x:output"),
        (Point("!a*{b}"), "\\!a\\*\\{b\\}:output"),
        (Point("back\\slash"), "back\\\\slash:output"),
        (Point("two\nlines"), "two\\u000alines:output"),
        (Point("\u2028\x9b\x00"), "\\u2028\\u009b\\u0000:output"),
        (Point("\ud800"), "\\ud800:output"),
        (Point("/etc/passwd"), "/etc/passwd:output"),
        (Point("</script>"), "</script>:output"),
        (Point("größe.层"), "größe.层:output"),
        (Point("layers.-1"), "layers.\\-1:output"),
        (Point("-1"), "\\-1:output"),
        (Point("a-1.b-2"), "a-1.b-2:output"),
        (Point("a", leaf=("0",)), 'a:output["0"]'),
        (Point("a", leaf=("x y",)), 'a:output["x y"]'),
        (Point("a", leaf=('"\\',)), 'a:output["\\"\\\\"]'),
        (Point("a", leaf=("line\nbreak",)), 'a:output["line\\nbreak"]'),
        (Point("a", leaf=("",)), 'a:output[""]'),
        (Point("a", leaf=(-1,)), "a:output[-1]"),
    ],
)
def test_a_point_prints_as_text_that_reads_back(point, text):
    assert str(point) == text
    assert Point.parse(text) == point


def test_the_side_may_be_left_out_and_is_then_the_output():
    assert Point.parse("model.norm") == Point("model.norm", "output")
    assert Point.parse("model.norm[1]") == Point("model.norm", "output", (1,))
    assert Point.parse(".") == Point("")
    assert Point.parse("op:aten.mm") == Point("aten.mm", op=True)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("leaf", [(), (0,), ("key",)])
def test_a_module_called_op_is_not_taken_for_an_operation(side, leaf):
    module = Point("op", side, leaf)
    assert Point.parse(str(module)) == module
    assert not Point.parse(str(module)).op


@pytest.mark.parametrize("name", SIDES)
def test_an_operation_called_like_a_side_reads_back_as_an_operation(name):
    operation = Point(name, op=True)
    assert Point.parse(str(operation)) == operation


@pytest.mark.parametrize("key", ["\ud83d\ude00", "\U0001f600", "\ud83d", "x\ud83d"])
def test_lone_surrogates_in_a_key_are_not_joined_into_one_character(key):
    point = Point("a", leaf=(key,))
    assert Point.parse(str(point)) == point


def test_a_text_form_is_one_line_and_can_be_encoded_whatever_the_name():
    hostile = "\x1b[31m\r\n\x85\u2028\u2029\x7f\ud800"
    for point in (Point(hostile), Point("a", leaf=(hostile,))):
        text = str(point)
        assert len(text.splitlines()) == 1
        assert text.isprintable()
        text.encode("utf-8")


@pytest.mark.parametrize(
    "text",
    ["", ":output", "a:sideways", "a:", "a[", "a]", "a[0", "a:output[0]x", "a\\", "a[0]:input", "op:", "a:b:output"],
)
def test_what_is_not_a_point_is_refused_with_what_is_allowed(text):
    with pytest.raises(BadText, match="not a point") as caught:
        Point.parse(text)
    assert all(side in str(caught.value) for side in SIDES)
    assert isinstance(caught.value, (LayerscopeError, ValueError))


@pytest.mark.parametrize("text", ["a[]", "a[0 ]", "a[*]", "a[0:4]", 'a["\\x"]', "a[1.5]", f"a[{'9' * 5000}]"])
def test_what_is_not_a_leaf_is_refused_as_bad_text(text):
    with pytest.raises(BadText, match="not a leaf"):
        Point.parse(text)


def test_a_json_escape_may_be_typed_in_a_quoted_key():
    assert parse_leaf('["tab\\there"]["caf\\u00E9"]') == ("tab\there", "café")
    assert parse_leaf("") == ()
    assert leaf_text(()) == ""


def test_escape_and_unescape_undo_each_other_and_any_escaped_character_means_itself():
    for name in ["", "a.b", "\\u0041", "\\\\", "a\nb", "*?[]{}!:-1", "-1.-1", "x" * 300]:
        assert unescape(escape(name)) == name
    assert unescape("\\a\\,\\.") == "a,."
    assert escape("\\u0041") == "\\\\u0041"


# Order and identity -----------------------------------------------------------------------------


def shuffled(values):
    return random.Random(0).sample(values, len(values))


def test_points_sort_by_number_and_not_by_digit():
    ordered = [Point(f"layers.{i}.mlp") for i in range(12)]
    assert sorted(shuffled(ordered)) == ordered


def test_leaves_sort_by_number_and_numbers_before_keys():
    ordered = [Point("a", leaf=leaf) for leaf in [(), (0,), (2,), (10,), ("b",), ("b", 0)]]
    assert sorted(shuffled(ordered)) == ordered


def test_sides_sort_in_the_order_they_run_and_operations_after_modules():
    ordered = [Point("z", side) for side in SIDES] + [Point("a", op=True)]
    assert sorted(shuffled(ordered)) == ordered


def test_numbers_too_long_for_an_integer_still_sort():
    assert len(sorted([Point("9" * 5000), Point("1"), Point("a")])) == 3


def test_points_and_moments_are_values():
    assert Point("a", leaf=(0,)) == Point("a", leaf=(0,))
    assert len({Point("a"), Point("a"), Point("a", op=True)}) == 2
    for value, field in ((Point("a", "input", (0, "k")), "name"), (Moment(1, 2, 3, 4, 5), "step")):
        assert pickle.loads(pickle.dumps(value)) == value
        with pytest.raises(AttributeError):
            setattr(value, field, None)


# Moments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (Moment(), "step=0"),
        (Moment(step=12, batch=12), "step=12"),
        (Moment(step=12), "step=12 batch=0"),
        (Moment(epoch=0, step=3, batch=3), "epoch=0 step=3"),
        (Moment(2, 40, 7, 1, 3), "epoch=2 step=40 batch=7 call=1 rank=3"),
    ],
)
def test_a_moment_says_what_is_not_obvious(moment, text):
    assert str(moment) == text


def test_moments_sort_by_epoch_then_step_then_call_then_rank_and_no_epoch_comes_first():
    ordered = [
        Moment(step=9),
        Moment(0, 0),
        Moment(0, 2),
        Moment(0, 10, call=0),
        Moment(0, 10, call=0, rank=1),
        Moment(0, 10, call=1),
        Moment(1, 0),
    ]
    assert sorted(shuffled(ordered)) == ordered


# Wrappers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("", ""),
        ("layers.0", "layers.0"),
        ("module", ""),
        ("module.layers.0", "layers.0"),
        ("module.module.layers", "layers"),
        ("_orig_mod", ""),
        ("_orig_mod.module.layers.0._orig_mod.mlp", "layers.0.mlp"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.mlp", "layers.0.mlp"),
        ("layers.0._checkpoint_wrapped_module", "layers.0"),
        ("encoder.module.fc", "encoder.module.fc"),  # the user's own word
        ("modules.module_list", "modules.module_list"),
        ("my_orig_mod.x", "my_orig_mod.x"),
    ],
)
def test_names_lose_what_wrappers_added_and_nothing_else(wrapped, plain):
    assert unwrapped(wrapped) == plain
    assert unwrapped(unwrapped(wrapped)) == plain
