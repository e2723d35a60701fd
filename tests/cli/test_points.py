"""`layerscope points`: the modules of a model, the points of a run."""

import json

import pytest
import torch

from layerscope.models.tiny import tiny_transformer
from layerscope.patterns import select
from layerscope.runtimes.eager import points as places

MODEL = """
import torch
def make():
    shared = torch.nn.Linear(3, 3)
    return torch.nn.ModuleDict({"a": shared, "b": torch.nn.ReLU(), "c": shared})
"""


def test_the_tree_of_a_model_folds_what_is_alike(cli):
    answer = cli("points", "tiny-transformer")
    assert answer.code == 0
    assert "361,536 parameters" in answer.out
    assert "8 \u00d7 DecoderLayer" in answer.out
    assert answer.out.count("q_proj") == 1


def test_every_name_of_the_tree_is_a_pattern_for_what_stands_there(cli):
    model = tiny_transformer()
    page = json.loads(cli("points", "tiny-transformer", "--json").out)
    assert [row["name"] for row in page["modules"]] == ["." if n == "" else n for n, _ in model.named_modules()]
    for row in page["modules"]:
        if row["type"] != "ModuleList":
            assert len(select(row["name"], places(model))) == 1
    assert len(select("model.layers[0:8].self_attn.q_proj", places(model))) == 8


def test_parameters_are_counted_as_torch_counts_them(cli):
    model = tiny_transformer()
    for row in json.loads(cli("points", "tiny-transformer", "--json").out)["modules"]:
        module = model.get_submodule("" if row["name"] == "." else row["name"])
        assert row["parameters"] == sum(p.numel() for p in module.parameters())
        assert row["type"] == type(module).__name__


def test_patterns_list_the_points_they_select(cli):
    page = json.loads(cli("points", "tiny-transformer", "model.layers.{0,-1}.mlp:input,output", "--json").out)
    names = [row["point"] for row in page["points"]]
    assert names == [f"model.layers.{i}.mlp:{side}" for i in (0, 7) for side in ("input", "output")]


def test_a_pattern_for_operations_is_said_to_be_known_later(cli):
    answer = cli("points", "tiny-transformer", "op:aten.softmax", "lm_head")
    assert answer.code == 0
    assert "op:aten.softmax: operations are known once they run" in answer.out
    assert "lm_head:output" in answer.out


def test_a_pattern_that_matches_nothing_is_exit_code_2(cli):
    answer = cli("points", "tiny-transformer", "model.layer.*")
    assert answer.code == 2
    assert "nearest" in answer.err


def test_a_shared_module_is_shown_under_both_its_names(cli, tmp_path):
    (tmp_path / "sharing_model.py").write_text(MODEL)
    answer = cli("points", "sharing_model.py:make")
    assert "= a" in answer.out
    rows = {r["name"]: r for r in json.loads(cli("points", "sharing_model.py:make", "--json").out)["modules"]}
    assert rows["c"]["same_as"] == "a"
    assert rows["a"]["same_as"] is None
    assert rows["."]["parameters"] == 12


def test_a_run_lists_its_points_with_type_shape_and_count(cli, trained):
    page = json.loads(cli("points", trained, "--json").out)
    rows = {row["point"]: row for row in page["points"]}
    assert len(rows) == 15
    row = rows["model.layers.1:grad_output"]
    assert (row["shape"], row["dtype"], row["records"]) == ([1, 10, 16], "float32", 3)
    assert row["kept"] == "tensor + summary"
    assert row["nbytes"] == 3 * 160 * 4


def test_a_run_lists_only_what_patterns_name(cli, trained):
    page = json.loads(cli("points", trained, "model.layers.*:input", "--json").out)
    assert len(page["points"]) == 3


def test_a_run_says_what_is_missing(cli, tmp_path):
    (tmp_path / "m.py").write_text(
        "import torch\ndef make():\n    return torch.nn.MultiheadAttention(4, 2), (torch.ones(1, 2, 4),) * 3\n"
    )
    assert cli("record", "m.py:make", "**", "-o", "run").code == 0
    page = json.loads(cli("points", "run", "--json").out)
    assert "out_proj:output" in [row["point"] for row in page["missing"]]


@pytest.mark.parametrize("text", ["nowhere", "memory://nowhere", "./x.npz"])
def test_what_is_neither_is_exit_code_2(cli, text):
    answer = cli("points", text)
    assert answer.code == 2
    assert answer.err.count("\n") == 1


def test_shapes_that_differ_are_counted(cli, tmp_path):
    (tmp_path / "m.py").write_text(
        "import torch\ndef make():\n    return torch.nn.ReLU(), [torch.ones(1), torch.ones(2)]\n"
    )
    assert cli("record", "m.py:make", ".", "-o", "run").code == 0
    assert "2 shapes" in cli("points", "run").out
    assert torch.equal(
        torch.tensor(json.loads(cli("points", "run", "--json").out)["points"][0]["shape"]), torch.tensor([[1], [2]])
    )
