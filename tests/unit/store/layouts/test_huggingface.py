"""Traces that transformers' debugger made, read against what plain torch hooks saw of the same model."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerscope.errors import Ambiguous, Damaged, NoSuchPoint
from layerscope.points import Moment
from layerscope.store import open_run
from layerscope.store.address import folder
from layerscope.store.layouts import huggingface
from layerscope.store.layouts.place import DumpPlace

GOLDEN = Path(__file__).parents[3] / "golden" / "peers" / "huggingface"
EXPECTED = load_file(GOLDEN / "expected.safetensors")
FULL, SHORT = "Tiny_debug_tree_FULL_TENSORS.json", "Tiny_debug_tree_SUMMARY.json"

# The order in which the model of `make_huggingface.py` computes, by hand; the debugger keeps no outputs of blocks.
BEFORE = [(".:input[0]", 0), ("embed:input[0]", 0), ("embed:output", 0), ("norm:input[0]", 0), ("norm:output", 0)]
LAYERS = [
    [(f"layers.{n}{rest}", 0) for rest in (":input[0]", ":input[scale]", ".up:input[0]", ".up:output")]
    for n in range(3)
]
AFTER = [("norm:input[0]", 1), ("norm:output", 1)]
LOST = [("norm:input[0]", 0), ("norm:output", 0)]  # the second call has overwritten the files
OUTPUTS = [(".:output[both][0]", 0), (".:output[both][1]", 0), (".:output[states]", 0)]


def read(path, file=None):
    return huggingface.recognise(DumpPlace(folder(path), file))


def records(run):
    return [(str(entry.point), entry.moment.call) for entry in run.records()]


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(GOLDEN / "files", tmp_path / "trace")
    return tmp_path / "trace"


def test_every_tensor_in_a_file_is_what_a_plain_hook_saw():
    run = read(GOLDEN / "files")
    kept = [r for r in [*BEFORE, *LAYERS[0], *LAYERS[1], *LAYERS[2], *AFTER, *OUTPUTS] if r not in LOST]
    assert len(kept) == len(run) - len(LOST)
    for name, call in kept:
        expected, entry = EXPECTED[f"{name} call={call}"], next(run.records(name, call=call))
        assert torch.equal(run.tensor(name, call=call), expected)
        assert (entry.dtype, entry.shape) == (str(expected.dtype)[6:], tuple(expected.shape))
        assert torch.equal(torch.cat(list(entry.pieces(5))), expected.reshape(-1))


def test_the_layers_that_were_pruned_from_the_tree_are_read_where_they_ran():
    run = read(GOLDEN / "files")
    assert run.layout == "huggingface"
    assert run.manifest.model == {"class": "Tiny"}
    assert records(run) == [*BEFORE, *LAYERS[0], *LAYERS[1], *LAYERS[2], *AFTER, *OUTPUTS]
    assert any("7 tensors are not in the call tree" in note for note in run.notes)
    assert not any("pruned" in note for note in run.notes)


def test_a_tensor_that_a_later_call_overwrote_is_not_given_for_the_earlier_one():
    run = read(GOLDEN / "files")
    assert torch.equal(run.tensor("norm", call=1), EXPECTED["norm:output call=1"])
    with pytest.raises(NoSuchPoint, match="no tensor"):
        run.tensor("norm", call=0)
    assert any("2 tensors were overwritten" in note for note in run.notes)


def test_printed_tensors_have_notes_and_no_values():
    run = read(GOLDEN / "printed")
    assert records(run) == [*BEFORE, *LAYERS[0], *LAYERS[2], *AFTER]
    for name, call in records(run):
        entry, expected = next(run.records(name, call=call)), EXPECTED[f"{name} call={call}"]
        assert (entry.dtype, entry.shape, entry.summary) == (None, None, None)
        assert (entry.note["dtype"], entry.note["shape"]) == (str(expected.dtype)[6:], list(expected.shape))
        if expected.is_floating_point():
            assert math.isclose(entry.note["max"], expected.max().item(), rel_tol=1e-4)
            assert math.isclose(entry.note["mean"], expected.mean().item(), rel_tol=1e-4, abs_tol=1e-9)
    assert any("15 tensors were printed" in note for note in run.notes)
    assert any(note.startswith("1 of layers.0 to layers.2 were pruned") for note in run.notes)


def test_the_summary_alone_is_read_as_printed(tmp_path):
    shutil.copy(GOLDEN / "files" / SHORT, tmp_path)
    run = read(tmp_path)
    assert records(run) == [*BEFORE, *LAYERS[0], *LAYERS[2], *AFTER]
    assert all(entry.dtype is None for entry in run.records())


def test_the_tree_itself_opens_too():
    assert len(read(GOLDEN / "files", FULL)) == len(read(GOLDEN / "files"))
    assert all(entry.dtype is None for entry in read(GOLDEN / "files", SHORT).records())
    assert read(GOLDEN / "files", "Tiny.embed_outputs.safetensors") is None


def test_files_of_an_earlier_trace_are_not_taken_for_this_one(copied):
    shutil.copytree(GOLDEN / "printed", copied, dirs_exist_ok=True)
    run = read(copied)
    assert all(entry.dtype is None for entry in run.records())
    assert any("20 files that the call tree does not name are not read" in note for note in run.notes)


@pytest.mark.parametrize("printed", ["tensor(1.5000e+00, device='cuda:0', dtype=torch.bfloat16)", "tensor(1.5000)"])
def test_a_printed_number_is_read_with_what_torch_prints_beside_it(tmp_path, printed):
    tree = json.loads((GOLDEN / "printed" / FULL).read_text())
    tree["children"][0]["outputs"].update(mean=printed, max="tensor(nan)", min="tensor(-inf)", std="?")
    (tmp_path / FULL).write_text(json.dumps(tree))
    note = next(read(tmp_path).records("embed")).note
    assert (note["mean"], note["min"], note["std"]) == (1.5, -math.inf, "?")
    assert math.isnan(note["max"])


def test_a_file_that_is_gone_is_missing_and_costs_no_other(copied):
    (copied / "Tiny.embed_outputs.safetensors").unlink()
    run = read(copied)
    assert [m.point for m in run.missing] == ["embed:output"]
    assert torch.equal(run.tensor("layers.1.up"), EXPECTED["layers.1.up:output call=0"])


@pytest.mark.parametrize("name", ["../Tiny.x.safetensors", "/tmp/x.safetensors", "a/b.safetensors"])
def test_a_name_that_leads_elsewhere_is_no_file_of_the_trace(copied, name):
    save_file({"data": torch.ones(1, 3, 4)}, copied.parent / "Tiny.x.safetensors")
    tree = json.loads((copied / FULL).read_text())
    tree["children"][0]["outputs"]["value"] = name
    (copied / FULL).write_text(json.dumps(tree))
    assert [m.point for m in read(copied).missing] == ["embed:output"]


def test_a_truncated_tensor_of_a_pruned_layer_is_missing(copied):
    (copied / "Tiny.layers.1.up_outputs.safetensors").write_bytes(b"\xff" * 20)
    assert [m.point for m in read(copied).missing] == ["layers.1.up:output"]


def test_a_tensor_that_is_not_what_the_tree_says_is_damaged(copied):
    save_file({"data": torch.ones(2)}, copied / "Tiny.embed_outputs.safetensors")
    with pytest.raises(Damaged, match=r"holds float32 of shape \[2\], and the call tree speaks of"):
        read(copied).tensor("embed")


def test_two_models_in_one_folder_are_told_apart_by_the_file(copied):
    text = (copied / SHORT).read_text().replace("Tiny", "Other")
    (copied / "Other_debug_tree_SUMMARY.json").write_text(text)
    with pytest.raises(Ambiguous, match="Other, Tiny"):
        read(copied)
    assert read(copied, FULL).manifest.model == {"class": "Tiny"}
    assert read(copied, "Other_debug_tree_SUMMARY.json").manifest.model == {"class": "Other"}


@pytest.mark.parametrize("text", ["{}", "[]", '{"module_path": "Else"}', "3"])
def test_a_tree_of_somebody_else_is_not_claimed(tmp_path, text):
    (tmp_path / FULL).write_text(text)
    assert read(tmp_path) is None


def test_other_folders_are_not_claimed(tmp_path):
    assert read(tmp_path) is None
    save_file({"data": torch.ones(2)}, tmp_path / "Tiny.embed_outputs.safetensors")
    (tmp_path / "tree.json").write_text("{}")
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    "odd", [None, "text", 3, {"inputs": 3, "outputs": [3, None], "children": 4, "module_path": "Tiny.x"}]
)
def test_a_node_that_makes_no_sense_is_passed_over(copied, odd):
    tree = json.loads((copied / FULL).read_text())
    tree["children"].append(odd)
    (copied / FULL).write_text(json.dumps(tree))
    assert len(read(copied)) == len(read(GOLDEN / "files"))


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=4, intermediate_size=6, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def trace(llama, path, **options):
    from transformers import model_addition_debugger_context

    printing = torch._tensor_str.PRINT_OPTS
    kept = dict(vars(printing))
    try:
        with warnings.catch_warnings(), model_addition_debugger_context(llama, debug_path=str(path), **options):
            warnings.simplefilter("ignore")
            llama.forward(input_ids=torch.tensor([[1, 2, 3]]))
    finally:
        vars(printing).update(kept)  # the debugger leaves torch printing in another way
    return read(path)


@pytest.mark.parametrize("pruned", [True, False])
def test_a_trace_of_llama_made_just_now_has_every_leaf_module(llama, tmp_path, pruned):
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
        for name, module in llama.named_modules()
        if not list(module.children()) and name != "model.rotary_emb"
    ]
    with torch.no_grad():
        logits = llama(input_ids=torch.tensor([[1, 2, 3]])).logits
    for hook in hooks:
        hook.remove()
    run = trace(llama, tmp_path / "trace", use_repr=False, do_prune_layers=pruned)
    outputs = [p.name for p in run.points if p.side == "output" and p.name not in ("", "model.rotary_emb")]
    assert outputs == list(seen)
    assert all(torch.equal(run.tensor(name), seen[name]) for name in seen)
    assert torch.equal(run.tensor(".:output[logits]"), logits)
    assert run.moments == [Moment()]
    assert run.missing == []


def test_a_printed_trace_of_llama_made_just_now_says_what_it_lacks(llama, tmp_path):
    run = trace(llama, tmp_path / "trace")
    assert all(entry.dtype is None for entry in run.records())
    assert any(note.startswith("2 of model.layers.0 to model.layers.3 were pruned") for note in run.notes)


def test_open_run_finds_it_by_itself():
    assert open_run(GOLDEN / "files").layout == "huggingface"
    assert open_run(GOLDEN / "printed" / SHORT).layout == "huggingface"
