"""Local Mamba checkpoints: the outputs of transformers' own class, and one sentence for what cannot be loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerscope.errors import BadModel
from layerscope.models.mamba import is_mamba, load_mamba

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 300, (2, 77), generator=torch.Generator().manual_seed(0))


def saved(folder, **sizes):
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, **sizes}
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms begin as zeros and ones, which would hide a mix-up
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def folder(tmp_path):
    saved(tmp_path)
    return tmp_path


def changed(folder, **told):
    config = json.loads((folder / "config.json").read_text()) | told
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tie_word_embeddings": False},
        {"use_bias": True, "use_conv_bias": False},
        {"state_size": 5, "expand": 3, "conv_kernel": 3, "time_step_rank": 7},
        {"layer_norm_epsilon": 0.5},
    ],
)
@torch.no_grad()
def test_its_outputs_are_those_of_transformers(tmp_path, sizes):
    theirs = saved(tmp_path, **sizes)
    mine = load_mamba(tmp_path)
    assert is_mamba(tmp_path)
    assert not mine.training
    torch.testing.assert_close(mine(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    hidden = theirs.backbone.layers[0](theirs.backbone.embeddings(IDS))
    torch.testing.assert_close(mine.backbone.layers[0](mine.backbone.embeddings(IDS)), hidden, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_modules_and_weights_have_the_names_of_transformers(tmp_path):
    theirs, mine = saved(tmp_path), load_mamba(tmp_path)
    assert dict(mine.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    extra = {name for name, _ in mine.named_modules()} - {name for name, _ in theirs.named_modules()}
    assert {name.rsplit(".", 1)[-1] for name in extra} == {"scan"}


def test_half_precision_is_widened_and_a_checkpoint_may_have_several_files(tmp_path):
    model = saved(tmp_path).to(torch.bfloat16)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = dict(load_mamba(tmp_path).named_parameters())
    assert {weight.dtype for weight in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in model.named_parameters())


def test_a_tied_head_that_is_stored_as_well_is_no_stranger(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["backbone.embeddings.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    model = load_mamba(folder)
    assert model.lm_head.weight is model.backbone.embeddings.weight


def test_loading_leaves_the_random_state_as_it_was(folder):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_mamba(folder)
    assert torch.equal(torch.rand(3), expected)


def test_a_missing_weight_is_named(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["backbone.layers.1.mixer.D"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadModel, match=r"lacks backbone\.layers\.1\.mixer\.D of a Mamba with 2 layers of width 32"):
        load_mamba(folder)


def test_many_missing_weights_are_counted(folder):
    with pytest.raises(BadModel, match=r"lacks backbone\.layers\.2\.norm\.weight, .* and 7 more of"):
        load_mamba(changed(folder, num_hidden_layers=3))


def test_a_weight_without_a_place_is_named(folder):
    weights = load_file(folder / "model.safetensors") | {"backbone.layers.0.mixer.b_layernorm.weight": torch.ones(16)}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadModel, match=r"has backbone\.layers\.0\.mixer\.b_layernorm\.weight, for which a Mamba with"):
        load_mamba(folder)


def test_a_weight_of_another_shape_is_named_with_both(folder):
    with pytest.raises(BadModel, match=r"has backbone\.embeddings\.weight of shape \(300, 32\).*takes \(301, 32\)"):
        load_mamba(changed(folder, vocab_size=301))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"model_type": "llama"}, "holds a model of type 'llama', not 'mamba'"),
        ({"model_type": None}, "holds a model of type None, not 'mamba'"),
        ({"hidden_act": "gelu"}, "has the activation 'gelu'"),
        ({"hidden_size": "wide"}, "has hidden_size = 'wide'; it is a number from 1 on"),
        ({"state_size": 0}, "has state_size = 0; it is a number from 1 on"),
        ({"time_step_rank": "some"}, "has time_step_rank = 'some'; it is a number from 1 on"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(folder, told, said):
    with pytest.raises(BadModel, match=said) as caught:
        load_mamba(changed(folder, **told))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "said"), [("not json", "cannot be read"), ("[]", "is not a JSON object")])
def test_a_broken_configuration_is_one_sentence(folder, text, said):
    (folder / "config.json").write_text(text)
    assert not is_mamba(folder)
    with pytest.raises(BadModel, match=said):
        load_mamba(folder)


def test_a_mamba_without_a_head_or_with_another_activation_is_left_to_transformers(folder):
    assert is_mamba(folder)
    assert not is_mamba(changed(folder, architectures=["MambaModel"]))
    assert not is_mamba(changed(folder, architectures=["MambaForCausalLM"], hidden_act="gelu"))


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    assert not is_mamba(tmp_path / "nowhere")
    with pytest.raises(BadModel, match=r"config\.json' cannot be read"):
        load_mamba(tmp_path / "nowhere")


def test_a_bin_is_read_as_tensors_and_what_is_none_is_refused(folder):
    theirs = load_file(folder / "model.safetensors")
    torch.save(theirs, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = dict(load_mamba(folder).named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in theirs.items() if name in found)
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(BadModel, match="is not a file of tensors and numbers alone"):
        load_mamba(folder)


def test_broken_weights_are_one_sentence(folder):
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    with pytest.raises(BadModel, match="is not a readable safetensors file"):
        load_mamba(folder)
