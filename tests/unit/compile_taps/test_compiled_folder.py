"""Compiled models on disk: whole or not there, read without pickle, refused in a sentence."""

import json

import pytest
import torch

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.compile_taps.compiled_folder import read_table
from layerscope.errors import BadModel, RunExists, Unsupported
from layerscope.models.tiny import tiny_transformer

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def model():
    return tiny_transformer(layers=2, hidden=16, heads=2)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    compiled = ls.compile(model, (IDS,), backend="torchscript")
    compiled(IDS)
    return compiled.save(tmp_path_factory.mktemp("saved") / "deep" / "tiny")


def test_a_folder_holds_the_graph_and_the_table(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["model.pt", "taps.json"]
    table = json.loads((saved / "taps.json").read_text())
    assert [tap["point"] for tap in table["taps"]][1] == "model.layers.0:output"


def test_what_is_loaded_gives_what_was_saved(model, saved):
    loaded = ls.load_compiled(saved)
    with torch.no_grad():
        assert_same_bits(loaded(input_ids=IDS + 9), model(IDS + 9))
    assert list(loaded.taps()) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", "logits"]
    assert len(ls.get_layer_hidden_states()) == 3
    assert "the taps change nothing" in str(loaded.observer_effect)


def test_what_is_loaded_is_saved_again_as_it_was(saved, tmp_path):
    again = ls.load_compiled(saved).save(tmp_path / "again")
    assert (again / "taps.json").read_bytes() == (saved / "taps.json").read_bytes()


def test_an_effect_that_was_not_measured_is_not_measured_after_loading(model, tmp_path):
    compiled = ls.compile(model, (IDS,), backend="torchscript")
    assert "was loaded" in str(ls.load_compiled(compiled.save(tmp_path / "never called")).observer_effect)
    skipped = ls.compile(model, (IDS,), backend="torchscript", observer="skip")
    loaded = ls.load_compiled(skipped.save(tmp_path / "skipped"))
    assert str(loaded.observer_effect) == "not measured: observer='skip'"


def test_a_folder_that_is_there_is_not_written_over(saved, model):
    before = (saved / "model.pt").read_bytes()
    with pytest.raises(RunExists, match="is there already"):
        ls.load_compiled(saved).save(saved)
    assert (saved / "model.pt").read_bytes() == before


def test_a_save_that_fails_leaves_nothing(model, tmp_path):
    for backend in ("inductor", lambda m, e: m):
        compiled = ls.compile(model, (IDS,), backend=backend)
        with pytest.raises(Unsupported, match=r"cannot be saved|cannot save"):
            compiled.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def test_what_a_compiler_made_and_cannot_save_is_told_and_leaves_nothing(tmp_path):
    model = zoo.Holder(lambda m, x: Doubled.apply(m.inner(x)), inner=torch.nn.Linear(4, 4))
    compiled = ls.compile(model, (torch.ones(2, 4),), backend="torchscript", record_layer_outputs="inner")
    with pytest.raises(
        Unsupported, match=r"torchscript compiled this model and cannot save it: Could not export Python"
    ):
        compiled.save(tmp_path / "deep" / "down" / "out")
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_is_told(saved, tmp_path, monkeypatch):
    loaded = ls.load_compiled(saved)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunExists, match=r"file/x' cannot be made \(File exists: .*file'\); save to another folder"):
        loaded.save(tmp_path / "file" / "x")
    with pytest.raises(RunExists, match="is there already"):
        loaded.save(tmp_path / "file")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(RunExists, match=r"'\.' is the folder you are in.*name one inside it"):
        loaded.save(".")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "here"]
    assert loaded.save("inside").is_dir()


def test_a_graph_and_a_table_that_were_not_saved_together_are_told(saved, tmp_path):
    other = ls.compile(tiny_transformer(layers=3, hidden=16, heads=2), (IDS,), backend="torchscript", observer="skip")
    mixed = other.save(tmp_path / "mixed")
    (mixed / "taps.json").write_text((saved / "taps.json").read_text())
    with pytest.raises(BadModel, match=r"gives 6 tensors, and its taps\.json tells of 5: they were not saved together"):
        ls.load_compiled(mixed)(IDS)


def test_a_compilers_own_torchscript_is_saved(model, tmp_path):
    compiled = ls.compile(model, (IDS,), backend=lambda m, e: torch.jit.trace(m, e, check_trace=False))
    loaded = ls.load_compiled(compiled.save(tmp_path / "own"))
    with torch.no_grad():
        assert_same_bits(loaded(IDS + 2), model(IDS + 2))


def test_the_table_is_read_without_the_graph(saved, tmp_path):
    (tmp_path / "taps.json").write_text((saved / "taps.json").read_text())
    backend, table = read_table(tmp_path)
    assert backend == "torchscript"
    assert [tap.key for tap in table.taps] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert table.takes == ("input_ids",)
    (tmp_path / "taps.json").write_text("{}")
    with pytest.raises(BadModel, match=r"holds no compiled model: taps\.json is not a table of taps"):
        read_table(tmp_path)


def test_what_is_no_compiled_model_is_refused(tmp_path, saved):
    with pytest.raises(BadModel, match="holds no compiled model"):
        ls.load_compiled(tmp_path)
    with pytest.raises(BadModel, match="holds no compiled model"):
        ls.load_compiled(saved / "model.pt")
    other = tmp_path / "other"
    other.mkdir()
    (other / "taps.json").write_text((saved / "taps.json").read_text().replace('"torchscript"', '"../evil"'))
    with pytest.raises(BadModel, match="names the backend"):
        ls.load_compiled(other)
    (other / "taps.json").write_text((saved / "taps.json").read_text())
    with pytest.raises(BadModel, match="is not a file that is there"):
        ls.load_compiled(other)
