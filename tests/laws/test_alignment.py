"""Laws of aligning runs: nothing is lost, nothing is paired twice, rules read back."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from layerscope.compare.align.alignment import align
from layerscope.compare.align.moments import pair_moments
from layerscope.compare.align.pairing import PairingRule, parse_rules
from layerscope.compare.align.run_points import RunPoint
from layerscope.errors import BadText
from layerscope.points import SIDES, Moment, Point, escape

modest = settings(max_examples=100, deadline=None)

# Parts that mean something to alignment, so that names collide, nearly match and contradict each other.
parts = st.sampled_from(
    [
        *("model", "transformer", "module", "base_model", "encoder", "decoder", "visual", "bert", "_orig_mod", ""),
        *("layers", "layer", "h", "block", "layer_0", "layer_1", "0", "1", "2", "base_layer", "embed_tokens", "wte"),
        *("lm_head", "logits", "q_proj", "k_proj", "v_proj", "qkv_proj", "mlp", "norm", "a b", "x,y", "->", "*", "层"),
    ]
)
names = st.lists(parts, max_size=5).map(".".join)
leaves = st.sampled_from([(), (), (0,), (1,), ("logits",), ("last_hidden_state",), ("hidden_states",)])
points = st.builds(Point, names, st.sampled_from(SIDES), leaves) | st.builds(
    Point, names, st.sampled_from(["input", "output"]), leaves, st.just(True)
)
shapes = st.sampled_from([None, (), (2, 8), (2, 24), (4, 8)])
runs = st.lists(st.builds(RunPoint, points, shapes, st.just(1)), max_size=12, unique_by=lambda seen: seen.point)

globs = st.sampled_from(["**.q_proj", "**.k_proj", "**.qkv_proj", "**.mlp", "layers.*", "h.*", "model.**", "**", "wte"])
anything = st.one_of(globs, names.map(lambda name: escape(name) or "."))
suffixes = st.sampled_from(["", "", ":input", ":output", '["a, # -> b"]'])
patterns = st.builds("{}{}".format, anything, suffixes)


def made(verb, left, right):
    try:
        return PairingRule(verb, left, right)
    except BadText:
        return None


rules = st.one_of(
    st.builds(made, st.sampled_from(["pair", "rename"]), patterns, patterns),
    st.builds(made, st.just("fuse"), st.lists(patterns, min_size=2, max_size=3), patterns),
    st.builds(made, st.just("split"), patterns, st.lists(patterns, min_size=2, max_size=3)),
    st.builds(made, st.sampled_from(["flat", "ignore"]), patterns, st.just(())),
).filter(lambda rule: rule is not None)


def assert_nothing_lost(reference, candidate, found, *, fused):
    ignored = set(found.ignored)
    for run, only, side in (
        (reference, found.only_reference, [pair.reference for pair in found.pairs]),
        (candidate, found.only_candidate, [pair.candidate for pair in found.pairs]),
    ):
        there = {seen.point for seen in run}
        places = Counter(set(side) if fused else side) + Counter(point for point, _ in only)
        places += Counter(there & ignored)
        assert places == Counter(there)
        assert all(reason.endswith(".") and reason.strip(". ") for _, reason in only)
    assert ignored <= {seen.point for seen in (*reference, *candidate)}


@modest
@given(runs, runs)
def test_every_point_is_in_exactly_one_pair_or_left_over_with_a_sentence(reference, candidate):
    assert_nothing_lost(reference, candidate, align(reference, candidate), fused=False)


# Rules that never match nothing, because these points are always there.
always = {
    "pair wte -> logits": ("wte", "logits"),
    "rename h.* -> layers.*": ("h.0.mlp", "layers.0.mlp"),
    "rename model.** -> **": ("model.mlp", "mlp"),
    "fuse **.q_proj, **.k_proj -> **.qkv_proj": ("mlp.q_proj", "mlp.qkv_proj"),
    "split **.qkv_proj -> **.q_proj, **.k_proj, **.v_proj": ("qkv_proj", "q_proj"),
    "ignore **.norm": ("norm", "norm"),
    "flat layers.**": ("layers.0", "layers.1"),
}


def with_points(run, texts):
    return list({seen.point: seen for seen in (*run, *(RunPoint(Point(text), (2, 8), 1) for text in texts))}.values())


@modest
@given(runs, runs, st.permutations(list(always)).flatmap(lambda lines: st.integers(0, 4).map(lambda n: lines[:n])))
def test_rules_lose_nothing_either(reference, candidate, lines):
    reference = with_points(reference, [always[line][0] for line in lines])
    candidate = with_points(candidate, [always[line][1] for line in lines])
    declared = [PairingRule.parse(line) for line in lines if not line.startswith(("fuse", "split"))]
    assert_nothing_lost(reference, candidate, align(reference, candidate, rules=declared), fused=False)
    declared = [PairingRule.parse(line) for line in lines]
    found = align(reference, candidate, rules=declared)
    assert_nothing_lost(reference, candidate, found, fused=True)
    cut = Counter(pair.candidate for pair in found.pairs if pair.candidate_cut is not None)
    assert all(count == 2 for count in cut.values())


@modest
@given(runs)
def test_a_run_is_aligned_with_itself_by_the_same_names_and_nothing_else(run):
    found = align(run, run)
    assert [(pair.reference, pair.candidate, pair.method) for pair in found.pairs] == [
        (seen.point, seen.point, "exact") for seen in run
    ]
    assert found.only_reference == found.only_candidate == found.ignored == ()


@modest
@given(runs, runs)
def test_sides_never_mix_and_order_never_pairs_other_shapes(reference, candidate):
    ours, theirs = ({seen.point: seen.shape for seen in run} for run in (reference, candidate))
    for pair in align(reference, candidate).pairs:
        assert pair.reference.side == pair.candidate.side
        assert pair.reference.op == pair.candidate.op
        assert pair.method != "order" or ours[pair.reference] == theirs[pair.candidate] is not None


@modest
@given(runs, runs)
def test_which_run_is_called_the_reference_does_not_change_the_pairs(reference, candidate):
    forth, back = align(reference, candidate), align(candidate, reference)
    assert {(p.reference, p.candidate, p.method) for p in forth.pairs} == {
        (p.candidate, p.reference, p.method) for p in back.pairs
    }


@modest
@given(st.lists(rules, max_size=4))
def test_the_text_of_rules_reads_back(declared):
    assert [PairingRule.parse(str(rule)) for rule in declared] == declared
    assert parse_rules("\n".join(f"  {rule}   # {rule}" for rule in declared)) == tuple(declared)


@modest
@given(names)
def test_a_rule_with_an_escaped_name_is_about_that_name(name):
    rule = PairingRule("pair", Point(name).place, "there")
    assert PairingRule.parse(str(rule)).counterpart(Point(name)) == Point("there")
    assert rule.counterpart(Point(f"{name}x")) is None


moments = st.lists(
    st.builds(Moment, st.sampled_from([None, 0, 1]), *(st.integers(0, 3),) * 3, st.integers(0, 1)),
    max_size=8,
    unique=True,
)


@modest
@given(moments, moments)
def test_every_moment_is_paired_once_or_left_over(reference, candidate):
    pairs, ours, theirs = pair_moments(reference, candidate)
    assert Counter([*(a for a, _, _ in pairs), *ours]) == Counter(reference)
    assert Counter([*(b for _, b, _ in pairs), *theirs]) == Counter(candidate)
    assert all(a.rank == b.rank and (text == "") == (a == b) for a, b, text in pairs)
    assert pair_moments(reference, reference) == ([(m, m, "") for m in reference], [], [])
