import pytest

from asserts import counted
from layerscope.errors import BadText, LayerscopeError, NoSuchPoint
from layerscope.patterns import Pattern, Place, op_name, select, select_op, split
from layerscope.points import SIDES, Point

MODULE = ("Module", "object")


def llama(layers=12):
    """The modules of a small decoder, in the order of named_modules."""
    places = [
        Place("", ("LlamaForCausalLM", "PreTrainedModel", *MODULE)),
        Place("model", ("LlamaModel", "PreTrainedModel", *MODULE)),
        Place("model.embed_tokens", ("Embedding", *MODULE)),
        Place("model.layers", ("ModuleList", *MODULE)),
    ]
    for i in range(layers):
        layer = f"model.layers.{i}"
        places += [
            Place(layer, ("LlamaDecoderLayer", *MODULE)),
            Place(f"{layer}.self_attn", ("LlamaAttention", *MODULE)),
            *(Place(f"{layer}.self_attn.{n}_proj", ("Linear", *MODULE)) for n in "qkvo"),
            Place(f"{layer}.mlp", ("LlamaMLP", *MODULE)),
            *(Place(f"{layer}.mlp.{n}_proj", ("Linear", *MODULE)) for n in ("gate", "up", "down")),
            Place(f"{layer}.input_layernorm", ("LlamaRMSNorm", *MODULE)),
        ]
    return [*places, Place("model.norm", ("LlamaRMSNorm", *MODULE)), Place("lm_head", ("Linear", *MODULE))]


def named(*names):
    return [Place(name, ("Thing", *MODULE)) for name in names]


def chosen(patterns, places=None):
    return [str(point).removesuffix(":output") for point in select(patterns, llama() if places is None else places)]


def layers(*numbers, then=""):
    return [f"model.layers.{n}{then}" for n in numbers]


# What a pattern names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("model.layers.*", layers(*range(12))),
        ("model.layers.1*", layers(1, 10, 11)),
        ("model.layers.3.self_attn.*_proj", [f"model.layers.3.self_attn.{n}_proj" for n in "qkvo"]),
        ("model.layers.3.*.{q,up}_proj", ["model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj"]),
        ("**.self_attn", layers(*range(12), then=".self_attn")),
        ("**.lm_head", ["lm_head"]),
        ("*", ["model", "lm_head"]),
        (".", ["."]),
        ("model.norm.**", ["model.norm"]),
        (
            "model.**.3.**_proj",
            [
                *(f"model.layers.3.self_attn.{n}_proj" for n in "qkvo"),
                *(f"model.layers.3.mlp.{n}_proj" for n in ("gate", "up", "down")),
            ],
        ),
        ("**norm", [*layers(*range(12), then=".input_layernorm"), "model.norm"]),
        ("model.layers.{0,-1}", layers(0, 11)),
        ("model.layers.-1", layers(11)),
        ("model.layers.-12.mlp", layers(0, then=".mlp")),
        ("**.-1", layers(11)),
        ("model.layers[0:4]", layers(0, 1, 2, 3)),
        ("model.layers[0:4].mlp", layers(0, 1, 2, 3, then=".mlp")),
        ("model.layers[-2:]", layers(10, 11)),
        ("model.layers[:-10].mlp", layers(0, 1, then=".mlp")),
        ("model.layers[::4]", layers(0, 4, 8)),
        ("model.layers[-5::2]", layers(7, 9, 11)),
        ("model.layers[10:99]", layers(10, 11)),
        ("model.layers[-99:1]", layers(0)),
        ("model.layers.[0:2]", layers(0, 1)),
        ("**[0:1].self_attn", layers(0, then=".self_attn")),
        ("{model.layers[0:2],lm_head,.}", [".", *layers(0, 1), "lm_head"]),
        ("{model.{norm,embed_tokens},lm_head}", ["model.embed_tokens", "model.norm", "lm_head"]),
        ("model{,.norm}", ["model", "model.norm"]),
        ("type:Embedding", ["model.embed_tokens"]),
        ("type:*RMSNorm", [*layers(*range(12), then=".input_layernorm"), "model.norm"]),
        ("type:PreTrainedModel", [".", "model"]),
        ("type:{Embedding,LlamaModel}", ["model", "model.embed_tokens"]),
    ],
)
def test_a_pattern_names_these_modules_in_the_models_order(pattern, names):
    assert chosen(pattern) == names


def test_two_stars_are_every_module_that_runs_the_whole_model_among_them():
    assert chosen("**") == [Point(p.name).place for p in llama() if p.name != "model.layers"]
    assert chosen("type:Module") == chosen("**")
    assert chosen("type:*") == chosen("**")


def test_several_patterns_give_each_point_once_in_the_models_order():
    assert chosen(["lm_head", "model.norm", "**.norm", "lm_head"]) == ["model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("pattern", "sides"),
    [
        ("lm_head", ["output"]),
        ("lm_head:output", ["output"]),
        ("lm_head:input", ["input"]),
        ("lm_head:grad_output", ["grad_output"]),
        ("lm_head:grad_input", ["grad_input"]),
        ("lm_head:output,input", ["input", "output"]),
        ("lm_head:*", list(SIDES)),
        ("type:Linear:input", ["input"]),
    ],
)
def test_a_side_follows_a_colon_and_several_follow_with_commas(pattern, sides):
    points = [point for point in select(pattern, llama()) if point.name == "lm_head"]
    assert [point.side for point in points] == sides


def test_a_leaf_follows_in_brackets():
    assert select("lm_head[0]", llama()) == [Point("lm_head", leaf=(0,))]
    assert select("model.layers.-1:input[hidden_states]", llama()) == [
        Point("model.layers.11", "input", ("hidden_states",))
    ]
    assert select('model.layers[0:1]:*[1]["a key"]', llama()) == [
        Point("model.layers.0", side, (1, "a key")) for side in SIDES
    ]
    assert select(".[logits]", llama()) == [Point("", leaf=("logits",))]


def test_every_leaf_includes_the_one_that_is_also_asked_for_alone():
    assert select(["lm_head[0]", "lm_head"], llama()) == [Point("lm_head")]
    assert select(["lm_head[0]", "lm_head[1]", "lm_head[1][k]"], llama()) == [
        Point("lm_head", leaf=(0,)),
        Point("lm_head", leaf=(1,)),
    ]


def test_numbers_are_counted_under_each_prefix_by_itself():
    places = named("encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1")
    assert chosen("*.-1", places) == ["encoder.2", "decoder.1"]
    assert chosen("{encoder,decoder}[-2:]", places) == ["encoder.1", "encoder.2", "decoder.0", "decoder.1"]


def test_numbered_modules_of_the_root_are_counted_too():
    places = named("", "0", "1", "2")
    for pattern in ("[0:2]", ".[0:2]", "{0,1}"):
        assert chosen(pattern, places) == ["0", "1"]
    assert chosen("-1", places) == ["2"]
    assert chosen("**.-1", places) == ["2"]


def test_a_part_of_a_model_keeps_the_numbers_of_the_whole():
    places = named(*(f"layers.{n}" for n in range(8, 16)))
    assert chosen("layers[8:10]", places) == ["layers.8", "layers.9"]
    assert chosen("layers[::4]", places) == ["layers.8", "layers.12"]
    assert chosen("layers.{8,-1}", places) == ["layers.8", "layers.15"]
    with pytest.raises(NoSuchPoint, match="layers has 8 numbered modules, 8 to 15"):
        select("layers[0:4]", places)


def test_numbers_are_sorted_as_numbers_and_other_names_are_not_counted():
    places = named("x.10", "x.9", "x.head", "x.01")
    assert chosen("x.-1", places) == ["x.10"]
    assert chosen("x.-2", places) == ["x.9"]
    assert chosen("x[:]", places) == ["x.10", "x.9"]


def test_two_stars_may_divide_a_name_in_every_way_around_a_number_from_the_end():
    places = named("a.0", "a.5", "a.5.b.0", "a.5.b.1", "a.0.b.0", "a.0.b.1")
    # a.5.b.0 is not the last of a.5.b, but lies under the last of a.
    assert chosen("**.-1.**", places) == ["a.5", "a.5.b.0", "a.5.b.1", "a.0.b.1"]
    assert chosen("**.-1.**.-1", places) == ["a.5.b.1"]
    assert chosen("a[:][:]", named("a.0.0", "a.0.1", "a.1.x")) == ["a.0.0", "a.0.1"]


def test_containers_are_passed_over_but_classes_made_from_them_are_not():
    places = [
        Place("list", ("ModuleList", *MODULE)),
        Place("dict", ("ModuleDict", "Module")),
        Place("mine", ("Stack", "ModuleList", *MODULE)),
        Place("namesake", ("ModuleList", "ModuleList", *MODULE)),
        Place("unknown", ()),
    ]
    assert chosen("*", places) == ["mine", "namesake", "unknown"]


def test_names_are_matched_whole_and_with_their_case():
    places = named("norm", "norm1", "Norm", "a.norm", "norm\n")
    assert chosen("norm", places) == ["norm"]
    assert chosen("norm*", places) == ["norm", "norm1", str(Point("norm\n")).removesuffix(":output")]


def test_characters_of_regular_expressions_mean_themselves():
    places = named("a+b", "aab", "a?b", "(a|b)", "a^b$")
    for name in ("a+b", "a?b", "(a|b)", "a^b$"):
        assert chosen(name, places) == [name]
        assert chosen(name[:2] + "*", places)[0].startswith(name[:2])
    assert chosen("a+b.*", named("a+b.x", "aab.x")) == ["a+b.x"]


# Exclusion --------------------------------------------------------------------------------------


def test_an_exclamation_mark_takes_away():
    assert chosen(["model.layers.*", "!model.layers[2:]"]) == layers(0, 1)
    assert chosen(["!model.layers[2:]", "model.layers.*"]) == layers(0, 1)
    assert chosen(["type:Linear", "!**.mlp.*", "!**.self_attn.**"]) == ["lm_head"]
    assert chosen(["model.*", "!type:Embedding"]) == ["model.norm"]


def test_exclusions_alone_mean_everything_but_those():
    assert chosen("!model.**") == [".", "lm_head"]
    assert chosen(["!type:Linear", "!**.mlp"]) == [
        name for name in chosen("**") if not name.endswith(("_proj", "mlp", "lm_head"))
    ]


def test_an_exclusion_without_a_side_takes_every_side():
    assert select(["*:input,output", "!lm_head"], llama()) == [Point("model", "input"), Point("model", "output")]
    assert select(["*:input,output", "!lm_head:input"], llama()) == [
        Point("model", "input"),
        Point("model", "output"),
        Point("lm_head", "output"),
    ]


def test_an_exclusion_of_a_leaf_takes_that_leaf():
    assert select(["model[0]", "model[1]", "!model[1]"], llama()) == [Point("model", leaf=(0,))]
    assert select(["model[0]", "model[1][k]", "!model[1]"], llama()) == [Point("model", leaf=(0,))]


def test_an_exclusion_cannot_take_one_leaf_out_of_a_whole():
    with pytest.raises(BadText, match=r"'!model\[1\]' would take one leaf out of 'model:output'.*leaves to keep"):
        select(["model", "!model[1]"], llama())


def test_an_exclusion_that_matches_nothing_raises_because_it_would_record_too_much():
    with pytest.raises(NoSuchPoint, match=r"the exclusion '!model.nrom' matches no module among .*nearest: model.norm"):
        select(["model.*", "!model.nrom"], llama())


def test_an_exclusion_of_a_side_that_nobody_asked_for_raises():
    with pytest.raises(NoSuchPoint, match="'!model:input' takes nothing away: of the sides, only output is asked for"):
        select(["model", "!model:input"], llama())


def test_an_exclusion_that_lies_elsewhere_is_no_error():
    assert chosen(["lm_head", "!type:*Norm"]) == ["lm_head"]


def test_nothing_left_raises():
    with pytest.raises(NoSuchPoint, match=r"nothing is left to record: !lm_\* takes away all.*\(1 of 138 modules\)"):
        select(["lm_head", "!lm_*"], llama())
    with pytest.raises(NoSuchPoint, match="nothing is left"):
        select("!**", llama())


# Operations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qualified", "name"),
    [
        ("aten::_softmax.default", "aten.softmax"),
        ("aten._softmax.default", "aten.softmax"),
        ("aten::_softmax", "aten.softmax"),
        ("aten.softmax", "aten.softmax"),
        ("aten.add.Tensor", "aten.add"),
        ("aten.add_.Tensor", "aten.add_"),
        ("aten.__and__.Tensor", "aten.__and__"),
        ("mylib::rope", "mylib.rope"),
        ("com.microsoft::Gelu", "com.microsoft.Gelu"),
        ("relu", "relu"),
        ("aten._", "aten._"),
    ],
)
def test_an_operation_goes_by_one_name(qualified, name):
    assert op_name(qualified) == name
    assert "::" in qualified or op_name(op_name(qualified)) == name


@pytest.mark.parametrize(
    ("pattern", "qualified", "answer"),
    [
        ("op:aten.softmax", "aten::_softmax.default", True),
        ("op:aten.softmax", "aten._softmax.default", True),
        ("op:aten.softmax", "aten::softmax.int", True),
        ("op:aten.softmax", "aten.softmax", True),
        ("op:aten.softmax", "aten::_log_softmax.default", False),
        ("op:aten.softmax", "mylib::softmax", False),
        ("op:aten._softmax", "aten::_softmax.default", True),
        ("op:aten._softmax", "aten.softmax", True),
        ("op:aten::_softmax", "aten.softmax", True),
        ("op:aten::_softmax.default", "aten._softmax.default", True),
        ("op:softmax", "aten::_softmax.default", True),
        ("op:*softmax", "aten::_log_softmax.default", True),
        ("op:aten.*softmax", "aten::_log_softmax.default", True),
        ("op:aten.*", "aten::mm", True),
        ("op:aten.*", "mylib::mm", False),
        ("op:*", "aten::mm", True),
        ("op:**", "aten::mm.out", True),
        ("op:aten._*", "aten::_softmax.default", True),
        ("op:aten._*", "aten::mm", False),
        ("op:aten.add", "aten::add.Tensor", True),
        ("op:aten.add", "aten::add_.Tensor", False),
        ("op:aten.add_", "aten::add_.Tensor", True),
        ("op:aten.add.Tensor", "aten::add.Tensor", True),
        ("op:aten.add.Tensor", "aten::add.Scalar", False),
        ("op:aten.add.Tensor", "aten.add", False),
        ("op:aten.add.*", "aten::add.Scalar", True),
        ("op:aten.relu.default", "aten::relu", True),
        ("op:aten.{mm,bmm}", "aten::bmm", True),
        ("op:aten.{mm,bmm}", "aten::addmm", False),
        ("aten.mm", "aten::mm", False),
    ],
)
def test_an_operation_is_named_without_underscore_or_overload_unless_they_are_asked_for(pattern, qualified, answer):
    assert Pattern.parse(pattern).matches_op(qualified) is answer


def test_the_names_that_torch_itself_gives_are_understood():
    torch = pytest.importorskip("torch")
    softmax = Pattern.parse("op:aten.softmax")
    for operation in (torch.ops.aten._softmax.default, torch.ops.aten.softmax.int):
        assert softmax.matches_op(str(operation))
        assert softmax.matches_op(operation.name())
    assert Pattern.parse("op:aten.relu.default").matches_op(torch.ops.aten.relu.default.name())
    assert not Pattern.parse("op:aten.relu.default").matches_op(torch.ops.aten.relu.out.name())


def test_operations_are_selected_as_they_run():
    patterns = ["op:aten.*softmax:input,output", "op:aten.topk[1]", "!op:aten.log_softmax", "model.layers.*"]
    assert select_op(patterns, "aten::_softmax.default") == [
        Point("aten.softmax", "input", op=True),
        Point("aten.softmax", "output", op=True),
    ]
    assert select_op(patterns, "aten::topk") == [Point("aten.topk", leaf=(1,), op=True)]
    assert select_op(patterns, "aten::_log_softmax.default") == []
    assert select_op(patterns, "aten::mm") == []
    assert select_op(["op:aten.mm:*", "!op:aten.mm:input"], "aten::mm") == [Point("aten.mm", op=True)]


def test_modules_and_operations_are_told_apart():
    modules, ops = split(["model.*", "op:aten.mm", "!type:Linear", "!op:aten.add"])
    assert [str(p) for p in modules] == ["model.*", "!type:Linear"]
    assert [str(p) for p in ops] == ["op:aten.mm", "!op:aten.add"]
    assert split("op:aten.mm").modules == ()


def test_select_passes_operations_over():
    assert select("op:aten.mm", llama()) == []
    assert chosen(["op:aten.mm", "lm_head"]) == ["lm_head"]
    # An operation is asked for, so the exclusion does not stand for everything else.
    assert select(["op:aten.mm", "!lm_head"], llama()) == []


def test_operations_have_no_gradient_sides():
    with pytest.raises(BadText, match=r"operations have no gradient side, but 'aten.mm' asks for grad_output"):
        Pattern.parse("op:aten.mm:grad_output")
    assert Pattern.parse("op:aten.mm:*").sides == ("input", "output")


# Matching one point -----------------------------------------------------------------------------


def test_a_pattern_is_asked_about_one_point():
    assert Pattern.parse("model.layers.*").matches(Point("model.layers.3"))
    assert Pattern.parse("model.layers.*").matches(Point("model.layers.3", leaf=(0,)))
    assert not Pattern.parse("model.layers.*").matches(Point("model.layers.3", "input"))
    assert not Pattern.parse("model.layers.*").matches(Point("model.layers.3", op=True))
    assert Pattern.parse("a[0]").matches(Point("a", leaf=(0, "k")))
    assert not Pattern.parse("a[0]").matches(Point("a"))
    assert not Pattern.parse("a[0]").matches(Point("a", leaf=(1,)))
    assert Pattern.parse("type:*Norm").matches(Point("x"), ("RMSNorm", "Module"))
    assert not Pattern.parse("type:*Norm").matches(Point("x"))
    assert Pattern.parse("op:aten.softmax").matches(Point("aten.softmax", op=True))
    assert not Pattern.parse("op:aten.softmax").matches(Point("aten.softmax"))
    assert Pattern.parse("!a").matches(Point("a", "grad_input"))


def test_a_slice_by_number_needs_no_model_and_counting_from_the_end_says_that_it_does():
    assert Pattern.parse("layers[2:6:2].mlp").matches(Point("layers.4.mlp"))
    assert not Pattern.parse("layers[2:6:2].mlp").matches(Point("layers.3.mlp"))
    assert not Pattern.parse("layers[2:6:2].mlp").matches(Point("layers.6.mlp"))
    for pattern in ("layers.-1", "layers[-2:]", "layers.{0,-1}"):
        with pytest.raises(BadText, match="counts from the end"):
            Pattern.parse(pattern).matches(Point("layers.4"))


# Text form --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("model.layers.*", "model.layers.*"),
        ("model.layers.*:output", "model.layers.*"),
        ("a:output,input", "a:input,output"),
        ("a:input,output,grad_input,grad_output", "a:*"),
        ("!a", "!a"),
        ("!a:*", "!a"),
        ("!a:output", "!a:output"),
        ("type:*Norm:input[0]", "type:*Norm:input[0]"),
        ("op:aten::mm", "op:aten.mm"),
        ("op:aten.mm:input,output", "op:aten.mm:*"),
        ("!op:aten.mm", "!op:aten.mm"),
        (".", "."),
        (".:input", ".:input"),
        ("a\\:b\\.c", "a\\:b\\.c"),
        ("layers[0:4].mlp[key]", "layers[0:4].mlp[key]"),
        ('a["0:4"]', 'a["0:4"]'),
        ("a[k]", "a[k]"),
    ],
)
def test_a_pattern_prints_in_its_shortest_form_and_reads_back(text, printed):
    pattern = Pattern.parse(text)
    assert str(pattern) == printed
    assert Pattern.parse(printed) == pattern
    assert hash(Pattern.parse(printed)) == hash(pattern)


@pytest.mark.parametrize("name", ["op", "type"])
@pytest.mark.parametrize("sides", ["", ":input", ":output", ":input,output", ":grad_input[0]", "[0]"])
def test_a_module_called_op_or_type_can_be_named(name, sides):
    pattern = Pattern.parse(name + sides)
    assert pattern.kind == "name"
    assert pattern.glob == name
    assert Pattern.parse(str(pattern)) == pattern
    assert {point.name for point in select(pattern, named("", "op", "type", "output", "input"))} == {name}


def test_what_looks_like_another_pattern_still_reads_back():
    for pattern in (
        Pattern("op", sides=SIDES),
        Pattern("type", sides=SIDES, exclude=True),
        Pattern("output", "op"),
        Pattern("input,output", "op", ("input", "output")),
        Pattern("output", "type", SIDES, exclude=True),
        Pattern("input", "type", leaf=(0,)),
        Pattern("a", exclude=True),
    ):
        assert Pattern.parse(str(pattern)) == pattern


def test_patterns_are_frozen_values_parsed_once():
    pattern = Pattern.parse("model.layers.*")
    assert Pattern.parse("model.layers.*") is pattern
    with pytest.raises(AttributeError):
        pattern.glob = "x"
    assert Pattern("a", sides=("output", "input")) == Pattern("a", sides=("input", "output"))


HOSTILE = [
    ".",
    "..",
    "...",
    "a..b",
    ".a",
    "a.",
    "op",
    "type",
    "op:x",
    "type:Linear",
    "!a",
    "*",
    "**",
    "a.*",
    "{a,b}",
    "a[0]",
    "[0:4]",
    "a:input",
    "layers.-1",
    "-1",
    "a\\",
    "\\.",
    "two\nlines",
    "/etc/passwd",
    "../../x",
    "</script>",
    "a b",
    " a ",
    ",",
    "größe",
    "\ud800",
    "\x00",
    "x" * 300,
    "9" * 30,
    "\\u0041",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("side", ["output", "grad_input"])
def test_the_text_of_a_point_is_a_pattern_for_just_that_point(name, side):
    places = named("", "a", "b", "a.b", "layers.0", "layers.1", "0", "A", "x", *HOSTILE)
    point = Point(name, side, (0, "a key", "]"))
    assert select(str(point), places) == [point]
    remaining = select([f"**:{side}", "!" + str(Point(name, side))], places)
    assert len(remaining) == len(places) - 1
    assert name not in {each.name for each in remaining}


# Errors: what was asked, what there is, what to do ----------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("model.layers.3.sef_attn", ["among 138", "nearest: model.layers.3.self_attn"]),
        ("model.layers[0]", ["model.layers is a ModuleList", "never called", "did you mean 'model.layers.0'"]),
        ("model.layers:input[0][k]", ["did you mean 'model.layers.0:input[k]'"]),
        ("model.layers", ["model.layers is a ModuleList", "did you mean 'model.layers.*'"]),
        ("model.layers[99]", ["did you mean 'model.layers.*'"]),
        ("type:ModuleList", ["model.layers is a ModuleList", "never called"]),
        ("layers.*", ["did you mean '**.layers.*'", "nearest: model.layers.0"]),
        ("self_attn:input[0]", ["did you mean '**.self_attn:input[0]'"]),
        ("module.model.norm", ["names leave out what wrappers add", "did you mean 'model.norm'"]),
        ("_orig_mod.model.layers.*", ["did you mean 'model.layers.*'"]),
        ("model.layers.12", ["model.layers has 12 numbered modules, 0 to 11"]),
        ("model.layers.-13.mlp", ["model.layers has 12 numbered modules, 0 to 11"]),
        ("model.layers[12:]", ["model.layers has 12 numbered modules, 0 to 11"]),
        ("model.layers.{12,13}", ["model.layers has 12 numbered modules, 0 to 11"]),
        ("**.layers.99.mlp", ["model.layers has 12 numbered modules, 0 to 11"]),
        ("type:Liner", ["did you mean 'type:Linear'", "Linear (85)", "LlamaRMSNorm (13)"]),
        ("type:torch.nn.Linear", ["did you mean 'type:Linear'"]),
        ("type:Conv2d", ["there are Linear (85), LlamaRMSNorm (13)"]),
        ("**.attn", ["nearest: model.layers.0.self_attn"]),
        ("zzz", ["there are: ., model, model.embed_tokens, and 134 more"]),
        ("!zzz", ["the exclusion '!zzz' matches no module"]),
    ],
)
def test_a_pattern_that_matches_nothing_says_what_there_is(pattern, said):
    with pytest.raises(NoSuchPoint) as caught:
        select(pattern, llama())
    message = str(caught.value)
    assert repr(pattern) in message
    assert "among 138" in message
    assert message.endswith("`layerscope points MODEL` lists them all.")
    for part in said:
        assert part in message
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, LayerscopeError)


def test_what_an_error_suggests_works():
    for asked, meant in [("layers.*", "**.layers.*"), ("model.layers[0]", "model.layers.0"), ("model.layers", None)]:
        with pytest.raises(NoSuchPoint) as caught:
            select(asked, llama())
        suggested = str(caught.value).split("did you mean '")[1].split("'")[0]
        assert meant is None or suggested == meant
        assert select(suggested, llama())


def test_an_error_suggests_hostile_names_too():
    places = [Place("d", ("ModuleDict", "Module")), Place("d.a:b", ("Odd[int]", "Module"))]
    with pytest.raises(NoSuchPoint) as caught:
        select('d["a:b"]', places)
    assert repr("d.a\\:b") in str(caught.value)
    with pytest.raises(NoSuchPoint) as caught:
        select("type:Oddint", places)
    assert repr("type:Odd\\[int\\]") in str(caught.value)
    assert select(["d.a\\:b", "type:Odd\\[int\\]"], places) == [Point("d.a:b")]


def test_one_pattern_of_several_that_matches_nothing_is_enough_to_raise():
    with pytest.raises(NoSuchPoint, match="the pattern 'nope' matches no module"):
        select(["**", "nope"], llama())


def test_a_model_without_modules_is_said_to_have_none():
    with pytest.raises(NoSuchPoint, match="'a' matches no module: the model has none"):
        select("a", [])


def test_hostile_names_are_escaped_in_the_message():
    with pytest.raises(NoSuchPoint) as caught:
        select("evilx", named("evil\x1b[2J\n"))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`.` for the whole model"),
        ("!", "`.` for the whole model"),
        (":input", "empty pattern"),
        ("type:", "empty pattern"),
        ("op:", "empty pattern"),
        ("[0]", "`.` for the whole model"),
        ("a:inptu", "no side called 'inptu'; the sides are input, output, grad_input, grad_output"),
        ("a:", "no side called ''"),
        ("a:input,", "no side called 'input,'"),
        ("a:b:input", "A colon in a name is written \\:"),
        ("a[", "never closed"),
        ("a[0", "never closed"),
        ("a[0][k", "never closed"),
        ("a]", "a ] without its ["),
        ("a:input]", "no side called 'input]'"),
        ("a[]", "is not a leaf"),
        ("a[*]", "is not a leaf"),
        ("a[0].b", "did you mean 'a.0.b'"),
        ("a[0]:input", "not 'a[0]:input' but 'a:input[0]'"),
        ("a{b", "a { without its }"),
        ("a}b", "a } without its {"),
        ("{a,{b}", "a { without its }"),
        ("{a,}", "hold an empty name"),
        ("{a:input,b}", "no side called 'input,b}'"),
        ("{a[0],b}", "after the leaf [0]"),
        ("a\\", "lone backslash"),
        ("a[::0]", "not positive"),
        ("a[4:0:-1]", "not positive"),
        ("a[0:4]b", "goes on with 'b' after a slice"),
        ("type:Linear[0:4]", "types and operations have none"),
        ("!!a", "comes first of all"),
        ("op:!aten.mm", "comes first of all"),
        ("!op:aten.topk[1]", "an operation is excluded whole"),
        ("{a,b}" * 20, "stand for over 10000 names"),
    ],
)
def test_malformed_text_is_refused_with_what_is_allowed(text, said):
    with pytest.raises(BadText) as caught:
        Pattern.parse(text)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [([], "no pattern given"), ({"alias": "a"}, "pass its values"), ([3], "not int 3"), ([None], "not NoneType None")],
)
def test_what_is_not_a_pattern_at_all_is_refused(patterns, said):
    with pytest.raises(BadText, match=said):
        select(patterns, llama())


@pytest.mark.parametrize(
    "fields",
    [
        {"glob": ""},
        {"glob": "a:b"},
        {"glob": "a["},
        {"glob": "!a"},
        {"glob": "a{"},
        {"glob": "a", "sides": ()},
        {"glob": "a", "sides": ("up",)},
        {"glob": "a", "kind": "op", "sides": ("grad_input",)},
    ],
)
def test_a_pattern_that_could_not_be_written_cannot_be_made(fields):
    with pytest.raises(BadText):
        Pattern(**fields)


# Against a real model, and at size --------------------------------------------------------------


def test_the_modules_of_a_real_model_are_found():
    torch = pytest.importorskip("torch")
    model = torch.nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    places = [Place(name, tuple(c.__name__ for c in type(m).__mro__)) for name, m in model.named_modules()]
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert [point.name for point in select("type:Linear", places)] == linear
    assert chosen("*.layers.-1", places) == ["encoder.layers.1", "decoder.layers.2"]
    assert "encoder.layers" not in chosen("**", places)
    with pytest.raises(NoSuchPoint, match=r"encoder\.layers is a ModuleList"):
        select("encoder.layers", places)


def test_the_work_for_ten_thousand_modules_grows_with_their_number():
    places = llama(910)
    assert len(places) > 10_000
    patterns = ["model.layers.*:*", "**.q_proj", "type:*Norm", "model.layers[100:-100:3].mlp", "!**.{0,-1}.**"]
    points, calls = counted(lambda: select(patterns, places))
    again, more = counted(lambda: select(list(map(str, points)), places))
    assert again == points
    assert len(points) == 4 * 908 + 908 + 909 + 237
    assert calls + more < 300 * len(places)


def test_an_error_over_ten_thousand_modules_comes_at_once():
    places = llama(910)

    def refused():
        with pytest.raises(NoSuchPoint, match=r"nearest: model\.layers\.3\.self_attn"):
            select("model.layers.3.sef_attn", places)

    assert counted(refused)[1] < 300 * len(places)
