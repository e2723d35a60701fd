"""`layerscope modes`: what there is, what fits, and which layers to keep."""

import json

import pytest

from layerscope.modes import registry

NETS = """
import torch, layerscope
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.norm = nn.LayerNorm(48)
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)
def net():
    torch.manual_seed(0)
    return Net(), torch.randn(2, 48)
def bare():
    return Net()
def nothing():
    return nn.ReLU()
"""
MODES = """
import layerscope, torch
@layerscope.mode("rough", about="the second block rounded to quarters", groups=["all", "quant_only"])
def rough(model):
    weight = model.blocks[1].weight
    weight.data = (weight.data * 4).round() / 4
@layerscope.mode("never", about="fits nothing", applies=lambda model: "it is not meant to")
def never(model):
    pass
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_DECLARED", {})
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "modes.py").write_text(MODES)


def test_the_modes_are_listed_with_what_they_change_and_why_one_does_not_apply(cli):
    answer = cli("modes", "nets.py:net")
    assert answer.code == 0
    lines = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    assert "6 of 7 modes apply to nets.py:net" in answer.out
    assert lines["fp_only"].split() == ["fp_only", "fp32", "fp16", "bf16"]
    assert lines["quant_only"].split() == ["quant_only", "int8-weight", "int8-dynamic", "fp8"]
    assert "every weight and activation in bfloat16" in lines["bf16"]
    assert "does not apply: no Linear layer is a multiple of 32 wide" in lines["int4-weight"]


def test_the_modes_of_a_mamba_come_with_those_of_its_users(cli):
    rows = json.loads(cli("modes", "quamba-small", "--json").out)["modes"]
    assert [row["mode"] for row in rows][:10] == ["fp32", "0", "2-0", "2-1", "2-2", "2-3", "2-4", "3", "1", "fp16"]
    assert all(row["applies"] for row in rows)
    assert rows[8]["groups"] == []


def test_json_says_what_applies_and_why_not(cli):
    rows = {row["mode"]: row for row in json.loads(cli("modes", "nets.py:net", "--json").out)["modes"]}
    assert rows["fp32"] | {"about": ""} == {
        "mode": "fp32",
        "applies": True,
        "about": "",
        "groups": ["all", "fp_only", "essential"],
        "because": None,
    }
    assert rows["int4-weight"]["applies"] is False
    assert rows["int4-weight"]["because"].startswith("no Linear layer is a multiple of 32")


def test_modes_are_listed_for_a_model_that_came_without_inputs(cli):
    assert cli("modes", "nets.py:bare").code == 0


def test_a_file_declares_modes(cli):
    answer = cli("modes", "nets.py:net", "--modes-file", "modes.py")
    assert answer.code == 0
    assert "7 of 9 modes apply" in answer.out
    assert "the second block rounded to quarters" in answer.out
    assert "does not apply: it is not meant to" in answer.out


def test_a_mode_that_fails_to_say_whether_it_fits_is_one_bad_line(cli, tmp_path):
    (tmp_path / "modes.py").write_text(
        "import layerscope\n@layerscope.mode('odd', about='x', applies=lambda m: m.nothing)\ndef odd(model): pass\n"
    )
    answer = cli("modes", "nets.py:net", "--modes-file", "modes.py")
    assert (answer.code, answer.err) == (0, "")
    assert "6 of 8 modes apply to nets.py:net" in answer.out
    (line,) = (line for line in answer.out.splitlines() if line.startswith("odd"))
    assert "does not apply: asked whether it fits, it failed with AttributeError: 'Net' object has no" in line


def test_how_to_record_is_said_where_there_is_something_to_record(cli):
    said = "--mode all --layers first,last -o RUNS` records them"
    assert said in cli("modes", "nets.py:net").out
    nothing = cli("modes", "nets.py:nothing")
    assert nothing.code == 0
    assert "0 of 7 modes apply to nets.py:nothing" in nothing.out
    assert said not in nothing.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file 'mine.py'"),
        ("1 / 0", "failed to import with ZeroDivisionError"),
        ("import layerscope\n@layerscope.mode('fp32', about='x')\ndef f(m): pass", "mode 'fp32' is built in already"),
        ("import layerscope\n@layerscope.mode('a/b', about='x')\ndef f(m): pass", "'a/b' is no name for a mode"),
    ],
)
def test_a_file_of_modes_that_does_not_read_is_one_sentence(cli, tmp_path, text, said):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    answer = cli("modes", "nets.py:net", "--modes-file", "mine.py")
    assert answer.code == 2
    assert said in answer.err
    assert answer.err.count("\n") == 1


def test_sensitivity_names_the_layer_to_keep(cli):
    answer = cli("modes", "nets.py:net", "--modes-file", "modes.py", "--sensitivity", "--mode", "rough")
    assert answer.code == 0
    assert "keep blocks.1 in float first: 100% of the error goes" in answer.out
    first = next(line for line in answer.out.splitlines() if line.split()[:2] == ["1", "blocks.1"])
    assert first.count("█") == 28


def test_sensitivity_in_json_has_every_layer_of_every_mode(cli):
    args = (
        "modes",
        "nets.py:net",
        "--modes-file",
        "modes.py",
        "--sensitivity",
        "--mode",
        "rough,int8-weight",
        "--json",
    )
    page = json.loads(cli(*args).out)
    rows = page["layers"]
    assert [(row["mode"], row["layer"]) for row in rows[:1]] == [("rough", "blocks.1")]
    assert len(rows) == 8
    assert {row["layer"] for row in rows if row["mode"] == "int8-weight"} == {
        *("blocks.0", "blocks.1", "blocks.2", "(outside the layers)")
    }
    assert rows[0]["returned"] == 1
    assert rows[0]["alone"] == rows[0]["error"] > 0
    assert rows[0]["without"] == 0


def test_an_error_outside_the_layers_is_said_to_be_there(cli, tmp_path):
    (tmp_path / "modes.py").write_text(
        "import layerscope\n@layerscope.mode('norm', about='x')\ndef norm(model): model.norm.weight.data *= 2\n"
    )
    answer = cli("modes", "nets.py:net", "--modes-file", "modes.py", "--sensitivity", "--mode", "norm")
    assert "what is outside the layers comes first: 100% of the error is its doing" in answer.out
    assert "no layer stands out" in answer.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sensitivity",), "--sensitivity and --mode go together"),
        (("--mode", "fp16"), "--sensitivity and --mode go together"),
        (("--sensitivity", "--mode", "fp16", "--plan", "--within", "1"), "--sensitivity is a page of its own"),
        (("--plan",), "--plan and --within go together"),
        (("--within", "0.1"), "--plan and --within go together"),
        (("--plan", "--within", "-1"), "-1"),
        (("--evaluate", "a text", "--prompt", "x"), "--evaluate is the text that is run"),
        (("--evaluate", "missing.txt"), "--evaluate 'missing.txt' is not a file"),
        (("--evaluate", "a text"), "'nets.py:net' does not run on token ids"),
        (("--sensitivity", "--mode", "fp32"), "there is no error to find a home for"),
        (("--sensitivity", "--mode", "fp61"), "there is no mode 'fp61' of Net; did you mean fp16"),
        (("--sensitivity", "--mode", "int4-weight"), "mode 'int4-weight' does not fit Net: no Linear layer"),
        (("--sensitivity", "--mode", "fp16", "--pretrained_dir", "x"), "which 'nets.py:net' is not"),
    ],
)
def test_what_cannot_be_ranked_is_exit_code_2(cli, args, said):
    answer = cli("modes", "nets.py:net", *args)
    assert answer.code == 2
    assert said in answer.err


def test_an_unknown_model_is_one_sentence(cli):
    answer = cli("modes", "quamba-smal")
    assert answer.code == 2
    assert "did you mean quamba-small" in answer.err
    assert answer.err.count("\n") == 1


# Quality ----------------------------------------------------------------------------------------

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


def test_modes_are_measured_on_a_text_beside_their_layer_errors(cli, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    args = ("modes", "quamba-small", "--mode", "bf16,0", "--evaluate", "text.txt", "--calib_seqlen", "100")
    page = json.loads(cli(*args, "--json").out)
    rows = {row["mode"]: row for row in page["modes"]}
    assert list(rows) == ["reference", "bf16", "0"]
    assert (page["tokens"], page["windows"]) == (len(TEXT) - 3, 3)
    for mode in ("bf16", "0"):
        layers = [row["relative_l2"] for row in page["layers"] if row["mode"] == mode]
        assert len(layers) == 24
        assert rows[mode]["last_layer"] == layers[-1]
        assert rows[mode]["worst"] == max(layers)
    assert 0 < rows["bf16"]["divergence"] < rows["0"]["divergence"]
    assert rows["bf16"]["agreement"] > rows["0"]["agreement"]
    assert rows["0"]["increase"] == pytest.approx(rows["0"]["perplexity"] / rows["reference"]["perplexity"] - 1)
    answer = cli(*args)
    assert (answer.code, answer.err) == (0, "")
    titles = next(line for line in answer.out.splitlines() if line.startswith("mode"))
    assert [word for word in ("last layer", "perplexity", "agrees", "KL") if word not in titles] == []


def test_quality_is_in_the_document_for_every_renderer(cli, tmp_path):
    from layerscope.cli.quality import evaluated, windows
    from layerscope.modes.preparing import prepare
    from layerscope.report import markdown

    ready = prepare("tiny-transformer")
    document, code = evaluated(ready, ["bf16"], windows(ready, TEXT, 64), lambda *_: None)
    (table,) = (part for part in document.parts if getattr(part, "key", "") == "modes")
    assert (code, table.audience) == (0, "all")
    columns = {column.key for column in table.columns if column.audience == "all"}
    assert columns >= {"mode", "last_layer", "perplexity", "agreement", "divergence"}
    page = markdown.render(document)
    assert [word for word in ("bf16", "last layer", "perplexity", "agrees", "KL") if word not in page] == []


def test_a_text_on_the_command_line_is_as_good_as_a_file(cli):
    page = json.loads(cli("modes", "tiny-transformer", "--mode", "fp32", "--evaluate", TEXT, "--json").out)
    assert page["modes"][1]["perplexity"] == page["modes"][0]["perplexity"]
    assert (page["tokens"], page["windows"]) == (len(TEXT) - 1, 1)


def test_a_mode_that_fails_on_the_text_is_said_and_the_others_are_measured(cli, tmp_path):
    (tmp_path / "modes.py").write_text(
        "import layerscope\n@layerscope.mode('broken', about='x')\ndef broken(model): model.lm_head = None\n"
    )
    args = ("modes", "tiny-transformer", "--modes-file", "modes.py", "--evaluate", TEXT)
    answer = cli(*args, "--mode", "bf16,broken", "--json")
    page = json.loads(answer.out)
    assert answer.code == 2
    assert [row["mode"] for row in page["modes"]] == ["reference", "bf16"]
    assert page["failed"][0]["text"].startswith("broken: ")
    assert cli(*args, "--mode", "broken").code != 0


def test_a_plan_is_printed_and_what_it_prints_makes_what_it_promises(cli, tmp_path):
    args = ("modes", "tiny-transformer", "--plan", "--within", "0.02")
    answer = cli(*args, "--mode", "int8-weight")
    assert answer.code == 0
    start = answer.out.index("import layerscope as ls")
    (tmp_path / "planned.py").write_text(answer.out[start:])
    page = json.loads(cli(*args, "--mode", "int8-weight", "--json").out)
    assert page["code"].strip() == answer.out[start:].strip()
    (promised,) = page["plans"]
    assert promised["within"]
    assert promised["error"] <= 0.02 < promised["bare"]
    again = cli(
        *("modes", "tiny-transformer", "--modes-file", "planned.py", "--mode", "int8-weight-planned"),
        *("--plan", "--within", "0.02", "--json"),
    )
    (measured,) = json.loads(again.out)["plans"]
    assert (measured["keep"], measured["error"]) == ([], promised["error"])


def test_a_plan_of_all_quantised_modes_has_the_fewest_bits_of_them(cli):
    page = json.loads(cli("modes", "tiny-transformer", "--plan", "--within", "0.02", "--json").out)
    within = [one for one in page["plans"] if one["within"]]
    assert page["plans"][0]["bits"] == min(one["bits"] for one in within)
    assert {one["mode"] for one in page["plans"]} <= {"int8-weight", "int8-dynamic", "int4-weight", "fp8"}


@pytest.mark.parametrize("budget", ["nan", "inf"])
def test_a_budget_that_is_no_number_is_refused(cli, budget):
    answer = cli("modes", "tiny-transformer", "--plan", "--within", budget, "--mode", "int8-weight")
    assert answer.code == 2
    assert f"--within {budget} is no budget" in answer.err


def test_a_plan_within_a_perplexity(cli):
    args = ("modes", "tiny-transformer", "--mode", "int4-weight", "--plan", "--evaluate", TEXT)
    answer = cli(*args, "--within", "0.5")
    assert answer.code == 0
    assert "int4-weight as it is" in answer.out
    assert "of perplexity more than the model's, within 50.0%" in answer.out


def test_a_budget_that_no_plan_meets_is_exit_code_1_with_the_best_that_was_reached(cli):
    answer = cli("modes", "tiny-transformer", "--plan", "--within", "1e-9", "--mode", "fp8,int8-dynamic")
    assert answer.code == 1
    assert "no plan is within 1e-09 relative L2 error" in answer.out
    assert "the best is " in answer.out
    assert "import layerscope" not in answer.out
