import pytest

from layerscope.compare.align.pairing import FusedPart, PairingRule, parse_rules
from layerscope.errors import BadText
from layerscope.points import Point

EVERY_KIND = """
# how the port names things
pair   lm_head -> logits
rename transformer.h.* -> model.layers.*
fuse   **.q_proj, **.k_proj,**.v_proj -> **.qkv_proj   # cut along the last axis

split  **.gate_up_proj -> **.gate_proj, **.up_proj
flat   model.layers.*
ignore **.rotary_emb:input,output
"""


def test_a_file_of_rules_is_read_line_by_line_without_its_comments():
    assert parse_rules(EVERY_KIND) == (
        PairingRule("pair", "lm_head", "logits"),
        PairingRule("rename", "transformer.h.*", "model.layers.*"),
        PairingRule("fuse", ("**.q_proj", "**.k_proj", "**.v_proj"), "**.qkv_proj"),
        PairingRule("split", "**.gate_up_proj", ("**.gate_proj", "**.up_proj")),
        PairingRule("flat", "model.layers.*"),
        PairingRule("ignore", "**.rotary_emb:input,output"),
    )
    assert parse_rules("") == parse_rules("  # nothing\n") == ()


def test_rules_print_as_they_are_read():
    rules = parse_rules(EVERY_KIND)
    assert parse_rules("\n".join(map(str, rules))) == rules
    assert str(rules[2]) == "fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj"


def test_a_name_with_what_separates_names_is_written_with_backslashes():
    rule = PairingRule("pair", r"odd\, name", "a#b")
    assert rule.counterpart(Point("odd, name")) == Point("a#b")
    assert PairingRule.parse(str(rule)) == rule
    assert str(rule) == r"pair odd\,\u0020name -> a\#b"


def test_pair_is_about_that_module_and_rename_about_all_within_it_too():
    pair, rename = parse_rules("pair a.* -> b.*\nrename a.* -> b.*")
    assert pair.counterpart(Point("a.3")) == rename.counterpart(Point("a.3")) == Point("b.3")
    assert pair.counterpart(Point("a.3.mlp")) is None
    assert rename.counterpart(Point("a.3.mlp.fc")) == Point("b.3.mlp.fc")
    assert rename.counterpart(Point("a")) is None
    assert rename.counterpart(Point("aa.3")) is None


def test_a_prefix_is_added_or_taken_away_by_two_stars():
    add, take = parse_rules("rename ** -> model.**\nrename model.** -> **")
    assert add.counterpart(Point("layers.0")) == Point("model.layers.0")
    assert take.counterpart(Point("model.layers.0")) == Point("layers.0")
    assert take.counterpart(Point("layers.0")) is None


def test_every_side_is_meant_unless_one_is_named():
    everywhere, inputs = parse_rules("pair a -> b\npair a:input -> b")
    assert everywhere.counterpart(Point("a", "grad_output")) == Point("b", "grad_output")
    assert inputs.counterpart(Point("a", "input", (0,))) == Point("b", "input", (0,))
    assert inputs.counterpart(Point("a", "output")) is None


def test_a_leaf_is_replaced_and_what_lies_under_it_kept():
    rule = PairingRule.parse("pair attn[0] -> attn[context]")
    assert rule.counterpart(Point("attn", leaf=(0, 1))) == Point("attn", leaf=("context", 1))
    assert rule.counterpart(Point("attn", leaf=(1,))) is None


def test_a_part_knows_its_number_and_what_it_is_a_part_of():
    fuse, split = parse_rules("fuse **.q, **.k -> **.qk\nsplit *.gate_up -> *.gate, *.up")
    assert fuse.part(Point("m.0.k")) == FusedPart(1, Point("m.0.qk"))
    assert fuse.part(Point("q", "input")) == FusedPart(0, Point("qk", "input"))
    assert fuse.part(Point("m.0.qk")) is None
    assert split.part(Point("mlp.up")) == FusedPart(1, Point("mlp.gate_up"))


def test_flat_and_ignore_take_braces_and_slices():
    rule = PairingRule.parse("ignore model.layers[1:3].{norm,mlp}")
    covered = [n for n in range(4) if rule.covers(Point(f"model.layers.{n}.mlp", "input"))]
    assert covered == [1, 2]
    assert not rule.covers(Point("model.layers.1.attn"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pear a -> b", "one of pair, rename, fuse, split, flat, ignore"),
        ("pair a", "`pair REFERENCE -> CANDIDATE`"),
        ("pair a->b", "the arrow stands between spaces"),
        ("pair a -> b -> c", "`pair REFERENCE -> CANDIDATE`"),
        ("pair a, b -> c", "2 on the left and 1 on the right"),
        ("fuse a -> b", "`fuse PART, PART -> FUSED`"),
        ("split a, b -> c", "`split FUSED -> PART, PART`"),
        ("fuse a,, b -> c", "a comma with no name"),
        ("flat a -> b", "`flat NAME`"),
        ("ignore", "`ignore NAME`"),
        ("pair * -> logits", r"wildcards \* and 'logits' has \(none\)"),
        ("pair a.** -> b.*", "carried over in order"),
        ("pair a:input -> b:output", "an input is never paired with an output"),
        ("fuse a[0], b -> c", "only pair, flat and ignore can"),
        ("pair a:input,output -> b", "comma|on the left"),
        ("pair type:Linear -> b", "a run does not tell"),
        ("ignore !a", "a rule has no !"),
        ("pair layers[0:2] -> b", "stands for several names"),
        ("pair layers.-1 -> b", "counts from the end"),
        ("ignore layers.-1", "counts from the end"),
        ("rename . -> model", "renames the whole model"),
        ("pair op:aten.mm -> b", "operation on one side"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_line_and_what_to_write(line, said):
    with pytest.raises(BadText, match=said):
        PairingRule.parse(line)
    with pytest.raises(BadText, match=f"line 3 of the rules: .*({said})"):
        parse_rules(f"pair x -> y\n\n{line}\n")


def test_an_unknown_verb_and_a_name_that_is_no_text_are_refused_in_python_too():
    with pytest.raises(BadText, match="is no rule"):
        PairingRule("merge", "a", "b")
    with pytest.raises(BadText, match="not Point"):
        PairingRule("pair", [Point("a")], "b")
