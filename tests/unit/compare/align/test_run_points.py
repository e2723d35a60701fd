"""A run as alignment sees it."""

from layerscope.compare.align.run_points import RunPoint, RunPoints, grouped, primary, same_leaf
from layerscope.points import Point


def run(*texts):
    made = RunPoints("reference", [RunPoint(Point.parse(text), (2, 8), 1) for text in texts])
    made.meaning = {name: name.removeprefix("model.") for name in made.names.parts}
    return made


def test_what_has_found_a_partner_and_what_is_settled_is_open_no_longer():
    seen = run("a", "b", "c")
    seen.take(Point("a"))
    seen.settle(Point("b"), "a rule says what it is")
    assert seen.open == [Point("c")]
    assert list(seen.free) == [Point("b"), Point("c")]
    assert seen.said == {Point("b"): "a rule says what it is"}


def test_a_point_may_be_meant_by_its_module_s_one_value():
    seen = run("attn[0]", "attn[1]")
    assert seen.like(Point("attn")) == Point("attn", leaf=(0,))
    assert seen.like(Point("attn", leaf=(1,))) == Point("attn", leaf=(1,))
    assert seen.like(Point("mlp")) is None


def test_points_are_grouped_by_what_they_mean_and_by_the_place_they_are_at():
    seen = run("model.attn[0]", "model.attn[1]", "mlp")
    assert [len(points) for points in grouped(seen.all, seen.means).values()] == [1, 1, 1]
    assert grouped(seen.all, seen.means_place) == {
        ("attn", "output", False, None): [Point("model.attn", leaf=(0,)), Point("model.attn", leaf=(1,))],
        ("mlp", "output", False, None): [Point("mlp")],
    }
    assert len(grouped(seen.all, seen.means_whole)) == 2


def test_the_first_value_of_a_module_has_several_names():
    assert all(primary(Point.parse(text)) for text in ("a", "a[0]", "a[logits]", "a:input[hidden_states]"))
    assert not any(primary(Point.parse(text)) for text in ("a[1]", "a:input[logits]"))
    assert same_leaf(Point("a"), Point("a", leaf=("logits",)))
    assert not same_leaf(Point("a", leaf=(0,)), Point("a", leaf=("logits",)))
