"""The page of a diagnosis: the sentence on top, the blame with its proof, the tree, and everything in JSON."""

import json
import math
import re

import pytest
from rich.cells import cell_len

from layerscope.compare.result import Verdict
from layerscope.diagnose.causes import Cause
from layerscope.diagnose.finding import KINDS, Blame, Final, Finding, Judged
from layerscope.diagnose.page.document import TONES, document
from layerscope.report import json as as_json
from layerscope.report import markdown, terminal

CULPRIT = "model.layers.2.mlp.up_proj"
SAID = f"{CULPRIT} makes the difference: error 6.6x the bf16 floor on the same input"
INSIDE = ("norm", "attn", "attn.q_proj", "attn.o_proj", "mlp", "mlp.up_proj", "mlp.down_proj")


def judged(name, kind="noise", **more):
    usual = {"error": 2e-3, "floor": 2e-3, "ratio": 1.0, "because": f"because of {kind}"}
    return Judged(name, 0, name, kind, **{**usual, **more})


def model(layers=4, **kinds):
    """The rows of a small decoder; `kinds` by name, with underscores for dots."""
    names = ["", "model", "model.embed"]
    for i in range(layers):
        names += [f"model.layers.{i}", *(f"model.layers.{i}.{part}" for part in INSIDE)]
    names += ["model.norm", "lm_head"]
    return tuple(judged(name, kinds.get(name.replace(".", "_"), "noise")) for name in names)


def faulty(layers=4, **more):
    rows = [row if row.name != CULPRIT else judged(CULPRIT, "root", error=0.013, ratio=6.6) for row in model(layers)]
    cause = Cause("weights", "its weight is the reference's times 1.050", {"parameter": "weight", "factor": 1.05})
    blame = Blame(CULPRIT, cause, next(row for row in rows if row.name == CULPRIT), removed=0.98, made=0.0071)
    return Finding((blame,), tuple(rows), Verdict("differs", SAID), Final(0.0073, 0.004), **more)


def healthy(word="noise", **more):
    kind = "same" if word == "same" else "noise"
    rows = tuple(judged(row.name, kind) for row in model())
    return Finding((), rows, Verdict(word, "every module agrees"), Final(0.004, 0.004), **more)


def page(finding, width=None, **how):
    return terminal.render(document(finding), width=width, **how)


def data(finding):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(as_json.render(document(finding)), parse_constant=refuse)


# The sentence and the blame ---------------------------------------------------------------------


def test_the_first_line_under_the_title_is_the_sentence():
    assert terminal.render(document(faulty(), title="a against b")).splitlines()[:2] == ["a against b", f"✗ {SAID}"]
    assert page(healthy()).splitlines()[1] == "✓ every module agrees"


def test_the_modules_are_counted_by_kind():
    assert "37 modules run on the reference's inputs: 36 noise, 1 root" in page(faulty())
    twice = Finding((), (judged("a"), judged("a"), judged("b")), Verdict("noise", "fine"), Final(0.0, 0.0))
    assert "3 calls of 2 modules run on the reference's inputs: 3 noise" in page(twice)


def test_a_blame_has_its_cause_its_place_and_both_proofs():
    text = page(faulty())
    assert "weights: its weight is the reference's times 1.050" in text
    assert "removes 98% of the final error" in text
    assert "it alone makes a final error of 0.0071 in the reference" in text


def test_what_was_not_tried_is_not_claimed():
    finding = faulty()
    blame = finding.roots[0]
    bare = Blame(blame.name, Cause("unknown", "no cause is known"), blame.row)
    text = page(Finding((bare,), finding.rows, finding.verdict, finding.final))
    assert "final error" not in text
    assert "unknown: no cause is known" in text


@pytest.mark.parametrize(
    ("removed", "said"), [(1.0, "100%"), (0.9999, "100%"), (0.994, "99%"), (0.5, "50%"), (-0.2, "-20%")]
)
def test_nearly_all_is_not_all(removed, said):
    finding = faulty()
    blame = Blame(CULPRIT, finding.roots[0].cause, finding.roots[0].row, removed=removed)
    assert f"removes {said} of" in page(Finding((blame,), finding.rows, finding.verdict, finding.final))


def test_several_blames_are_numbered_and_the_models_own_code_has_a_name():
    finding = faulty()
    own = Blame("", Cause("operation", "it adds nothing"), judged("", "root", where="input of model.norm"))
    both = Finding((*finding.roots, own), finding.rows, finding.verdict, finding.final)
    lines = page(both).splitlines()
    assert f"1. {CULPRIT}" in lines
    assert "2. the model itself" in lines
    assert data(both)["roots"][1]["name"] == ""


def test_another_name_and_a_later_call_are_said():
    row = Judged("fc2", 2, "mid", "root", "off", where="output[0]", error=1.0)
    text = page(Finding((Blame("fc2", Cause("unknown", "?"), row),), (row,), Verdict("differs", "x"), Final(1.0, 0.0)))
    assert "output[0], call 2" in text
    assert "in the candidate" in text
    assert "mid" in text


# The tree ---------------------------------------------------------------------------------------


def test_the_tree_opens_the_way_to_the_culprit_and_folds_what_agrees():
    lines = page(faulty()).splitlines()
    tree = [re.sub(r"  +(noise|root) .*", "", line) for line in lines[lines.index("modules") + 2 : -2]]
    assert tree == [
        "the model itself",
        "├ model",
        "│ ├ embed … layers.1",
        "│ ├ layers.2",
        "│ │ ├ norm",
        "│ │ ├ attn",
        "│ │ └ mlp",
        "│ │   ├ up_proj",
        "│ │   └ down_proj",
        "│ ├ layers.3",
        "│ └ norm",
        "└ lm_head",
    ]


def test_a_healthy_model_is_folded_to_its_first_level():
    lines = page(healthy()).splitlines()
    tree = lines[lines.index("modules") + 2 : -2]
    assert len(tree) == 3
    assert "where" not in lines[lines.index("modules") + 1]
    assert tree[1].split()[:3] == ["├", "model", "noise"]
    assert tree[1].split()[4] == "35"


def test_the_tree_of_a_deep_model_stays_short():
    assert len(page(faulty(layers=96)).splitlines()) == len(page(faulty(layers=5)).splitlines())


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("finding", [faulty(), healthy()], ids=["faulty", "healthy"])
def test_no_line_is_wider_than_the_terminal(finding, width):
    assert max(map(cell_len, page(finding, width).splitlines())) <= width


def test_colour_says_what_the_words_say():
    text = page(faulty(), color=True)
    line = next(line for line in text.splitlines() if "up_proj" in line and "root" in line)
    assert line.count("\x1b[1;31m") >= 2  # the name and the verdict
    assert all("\x1b[1;31m" not in line for line in page(healthy(), color=True).splitlines())


def test_every_kind_has_a_tone():
    assert set(TONES) == set(KINDS)


# The rest ---------------------------------------------------------------------------------------


def test_the_ranking_comes_worst_first_with_bars():
    finding = healthy(ranking=(("a.q_proj", 0.02), ("b.up_proj", 0.01)))
    lines = page(finding).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("damage"))
    assert lines[at + 2].split()[:2] == ["a.q_proj", "0.02000"]
    assert lines[at + 2].count("█") == 2 * lines[at + 3].count("█")
    assert data(finding)["ranking"] == [{"name": "a.q_proj", "damage": 0.02}, {"name": "b.up_proj", "damage": 0.01}]


def test_what_was_not_judged_is_named_with_its_reason_once():
    rows = tuple(judged(f"m{i}", "unplayed", because="it keeps a cache", error=None, ratio=None) for i in range(6))
    lone = judged("extra", "unpaired", because="the candidate has none")
    text = page(Finding((), (*rows, lone), Verdict("noise", "fine"), Final(0.0, 0.0)))
    assert "! m0, m1, m2 and 3 more: it keeps a cache" in text
    assert "! extra: the candidate has none" in text


def test_notes_stand_near_the_top():
    assert page(healthy(notes=("2 modules were not replayed",))).splitlines()[3] == "! 2 modules were not replayed"


def test_markdown_has_the_same_things():
    text = markdown.render(document(faulty(), title="a against b"))
    assert text.startswith(f"# a against b\n\n✗ {SAID}")
    assert f"## {CULPRIT}" in text
    assert "**`up_proj`** | **root**" in text
    assert "&emsp;&emsp;&emsp;&emsp;**`up_proj`**" in text


def test_json_has_every_row_and_plain_numbers():
    finding = faulty(notes=("a note",))
    found = data(finding)
    assert (found["verdict"], found["because"], found["root"]) == ("differs", SAID, CULPRIT)
    assert found["cause"]["evidence"] == {"parameter": "weight", "factor": 1.05}
    assert found["final"] == {"error": 0.0073, "floor": 0.004, "removed": None}
    assert found["notes"] == ["a note"]
    assert [row["name"] for row in found["rows"]] == [row.name for row in finding.rows]
    assert (found["roots"][0]["removed"], found["roots"][0]["ratio"]) == (0.98, 6.6)
    assert data(healthy())["root"] is None
    assert data(healthy())["cause"] is None


def test_what_is_not_finite_is_written_all_the_same():
    row = judged("a", "nonfinite", error=math.inf, floor=0.0, ratio=math.nan)
    blame = Blame("a", Cause("nonfinite", "NaN"), row, removed=math.nan, made=math.inf)
    finding = Finding((blame,), (row,), Verdict("differs", "NaN"), Final(math.nan, 0.0))
    assert "removes an unknown part of the final error" in page(finding)
    assert data(finding)["rows"][0]["error"] == "Infinity"


def test_a_hostile_name_steers_no_terminal():
    row = judged("a\x1b[2J\n|b", "root")
    finding = Finding((Blame(row.name, Cause("unknown", "?"), row),), (row,), Verdict("differs", "x"), Final(1.0, 0.0))
    assert "\x1b" not in page(finding)
    assert data(finding)["root"] == row.name
