"""A model, its weights and its inputs, as the documents' commands ask for them."""

import pytest
import torch
from safetensors.torch import save_file

from layerscope.errors import BadModel, BadText
from layerscope.models import BUILT_IN
from layerscope.models.inputs import bytes_as_ids
from layerscope.models.mamba import sample_batches
from layerscope.modes import choose
from layerscope.modes.preparing import DEFAULT_DIR, alpha_in, prepare


@pytest.fixture
def checkpoint(tmp_path):
    """A Mamba of transformers in a folder whose name states an alpha."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=2, state_size=4)
    folder = tmp_path / "mine-pa-0.999"
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    return folder


def ids_of(ready):
    (batch,) = ready.batches()
    return batch.args[0]


def test_a_mamba_is_run_on_ten_samples_of_512_bytes_unless_told():
    ready = prepare("quamba-small")
    assert ids_of(ready).shape == (10, 512)
    assert ids_of(prepare("quamba-small", calib_data_num=3, calib_seqlen=7)).shape == (3, 7)
    assert ids_of(prepare("quamba-small", calib_seqlen=7, usual=(2, 256))).shape == (2, 7)
    assert ready.settings == {
        "weights": "built-in",
        "ran": "quamba-small runs with the weights that come with layerscope",
        "percentile_alpha": 0.9999,
        "calib_data_num": 10,
        "calib_seqlen": 512,
    }
    assert ready.notes == ()


@pytest.mark.parametrize(
    ("num", "seqlen", "sizes"), [(100, 1024, [5] * 20), (11, 512, [10, 1]), (2, 9000, [1, 1]), (10, 512, [10])]
)
def test_samples_go_through_a_bounded_number_of_tokens_at_a_time(num, seqlen, sizes):
    batches = [batch.args[0] for batch in prepare("quamba-small", calib_data_num=num, calib_seqlen=seqlen).batches()]
    assert [tuple(ids.shape) for ids in batches] == [(size, seqlen) for size in sizes]
    assert torch.equal(torch.cat(batches), torch.cat(sample_batches(num, seqlen, split="recorded")))


def test_other_models_are_run_on_samples_only_when_asked():
    assert ids_of(prepare("tiny-transformer", prompt="abc")).tolist() == [[97, 98, 99]]
    ready = prepare("tiny-transformer", calib_data_num=2, calib_seqlen=16)
    assert ids_of(ready).shape == (2, 16)
    assert torch.equal(ids_of(ready), ids_of(prepare("quamba-small", calib_data_num=2, calib_seqlen=16)))


def test_a_prompt_takes_the_place_of_the_samples():
    ready = prepare("quamba-small", prompt="abc")
    assert torch.equal(ids_of(ready), bytes_as_ids("abc"))
    assert "calib_data_num" not in ready.settings
    with pytest.raises(BadText, match="--calib_data_num and --calib_seqlen"):
        prepare("quamba-small", prompt="abc", calib_seqlen=3)


def test_the_documents_own_folder_means_the_built_in_weights_where_it_is_absent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ready = prepare("quamba-small", pretrained_dir=DEFAULT_DIR)
    assert ready.settings["weights"] == "built-in"
    assert ready.settings["pretrained_dir"] == DEFAULT_DIR
    (note,) = ready.notes
    assert note == f"{DEFAULT_DIR} is not there: quamba-small runs with the weights that come with layerscope"


def test_any_other_folder_that_is_absent_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(BadModel, match="is not there; leave it out, and quamba-small runs with the weights that come"):
        prepare("quamba-small", pretrained_dir=str(tmp_path / "none"))


def test_a_folder_gives_its_weights_and_the_alpha_in_its_name(checkpoint):
    ready = prepare("quamba-small", pretrained_dir=str(checkpoint))
    assert ready.model.config.hidden_size == 16
    assert ready.settings["weights"] == str(checkpoint)
    assert ready.setting.percentile_alpha == ready.settings["percentile_alpha"] == 0.999
    assert prepare("quamba-small", pretrained_dir=str(checkpoint), percentile_alpha=0.5).setting.percentile_alpha == 0.5


def test_the_weights_that_a_folder_replaces_are_never_made(checkpoint, monkeypatch):
    def refuse(seed):
        raise AssertionError("91 million weights were drawn for nothing")

    monkeypatch.setitem(BUILT_IN, "quamba-130m-w8a8", BUILT_IN["quamba-130m-w8a8"]._replace(build=refuse))
    ready = prepare("quamba-130m-w8a8", pretrained_dir=str(checkpoint))
    assert ready.loaded.name == "quamba-130m-w8a8"
    with pytest.raises(BadModel, match="is not there; leave it out"):
        prepare("quamba-130m-w8a8", pretrained_dir="nowhere")


def test_a_mamba_folder_as_the_model_has_the_modes_of_a_mamba(checkpoint):
    ready = prepare(str(checkpoint))
    assert [mode.name for mode in choose(["essential"], ready.model).modes] == ["fp32", "0", "2-1", "2-2", "2-4"]
    assert ready.settings["weights"] == str(checkpoint)
    assert ready.setting.percentile_alpha == 0.999
    assert ids_of(ready).shape == (10, 512)
    (prompted,) = prepare(str(checkpoint), prompt="abc").batches()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MambaForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(ready.model(**prompted.kwargs), theirs(**prompted.kwargs).logits)


def test_a_mamba_folder_that_no_mode_is_asked_of_is_transformers_own(checkpoint):
    transformers = pytest.importorskip("transformers")
    assert type(prepare(str(checkpoint), modes=False).model) is transformers.MambaForCausalLM


def test_a_folder_is_no_place_for_the_weights_of_another(checkpoint):
    with pytest.raises(BadModel, match="a checkpoint folder is given as MODEL"):
        prepare(str(checkpoint), pretrained_dir=str(checkpoint))
    with pytest.raises(BadModel, match="did you mean quamba-130m-w8a8"):
        prepare("quamba-130m", pretrained_dir=str(checkpoint))


def test_a_folder_without_a_model_says_what_is_missing(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"config\.json"):
        prepare("quamba-small", pretrained_dir=str(tmp_path))


@pytest.mark.parametrize("asked", [{"pretrained_dir": "x"}, {"percentile_alpha": 0.5}])
def test_what_only_a_mamba_has_is_refused_for_others_by_its_name_alone(asked):
    said = f"^--{next(iter(asked))} is for models with modes of their own, which 'tiny-transformer' is not"
    with pytest.raises(BadModel, match=said):
        prepare("tiny-transformer", **asked)


def test_samples_of_bytes_are_for_built_in_models(tmp_path):
    (tmp_path / "make.py").write_text("import torch\ndef net(): return torch.nn.Linear(2, 2), torch.ones(1, 2)\n")
    ready = prepare(f"{tmp_path / 'make.py'}:net", calib_seqlen=4)
    with pytest.raises(BadModel, match=r"cut for built-in models, which .* is not; leave out their number and length"):
        ready.batches()


@pytest.mark.parametrize(
    ("folder", "alpha"),
    [
        (DEFAULT_DIR, 0.9999),
        ("pa-0.9995/", 0.9995),
        ("models_pa-.99/checkpoint", 0.99),
        ("pa-1.0", 1.0),
        ("Quamba1-pa9999", None),
        ("spa-0.5", None),
        ("pa-7", None),
        (".", None),
    ],
)
def test_alpha_is_read_from_a_folders_name(folder, alpha):
    assert alpha_in(folder) == alpha
