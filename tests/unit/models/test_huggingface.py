"""Local checkpoints: from safetensors alone, without network, with every weight."""

import json
import logging
import socket
import sys

import pytest
import torch

from layerscope.errors import BadModel, MissingExtra
from layerscope.models import DEFAULT_PROMPT, huggingface, load_model

transformers = pytest.importorskip("transformers")


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a local checkpoint needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def checkpoint(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    folder = tmp_path / "llama"
    model.save_pretrained(folder)
    return folder, model.eval()


def test_the_model_is_the_one_that_was_saved(checkpoint, no_network):
    folder, saved = checkpoint
    loaded = load_model(str(folder))
    (inputs,) = loaded.batches()
    assert inputs.kwargs["input_ids"].tolist() == [list(DEFAULT_PROMPT.encode())]
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert not loaded.model.training
    with torch.no_grad():
        assert torch.equal(loaded.model(**inputs.kwargs).logits, saved(**inputs.kwargs).logits)


def test_the_folders_own_tokenizer_reads_the_prompt(checkpoint, no_network):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder, _ = checkpoint
    words = Tokenizer(models.WordLevel({"hello": 5, "world": 6, "[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    (inputs,) = load_model(str(folder)).batches(prompt="hello world")
    assert inputs.kwargs["input_ids"].tolist() == [[5, 6]]
    assert set(inputs.kwargs) == {"input_ids", "attention_mask"}


def test_half_precision_stays_half(checkpoint, no_network):
    folder, model = checkpoint
    model.to(torch.bfloat16).save_pretrained(folder)
    assert next(load_model(str(folder)).model.parameters()).dtype == torch.bfloat16


def test_a_folder_without_weights_is_refused(checkpoint):
    folder, _ = checkpoint
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match=r"has a config\.json and no weights; put model\.safetensors beside it"):
        load_model(str(folder))


class Evil:
    def __reduce__(self):
        return (print, ("code of the file has run",))


def test_a_bin_of_tensors_is_read_and_one_that_would_run_code_is_refused(checkpoint, capsys):
    folder, model = checkpoint
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    loaded = load_model(str(folder)).model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    capsys.readouterr()
    with pytest.raises(BadModel, match="is not a file of tensors and numbers alone"):
        load_model(str(folder))
    assert "has run" not in capsys.readouterr().out


def test_missing_weights_are_named_and_never_drawn_at_random(checkpoint):
    from safetensors.torch import load_file, save_file

    folder, _ = checkpoint
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "needs the Python code in its own folder"),
        ({"architectures": ["NoSuchForCausalLM"]}, "has the architecture 'NoSuchForCausalLM'"),
        ({"architectures": ["pipeline"]}, "has the architecture 'pipeline'"),
        ({"architectures": [3]}, "has the architecture 3"),
        ({"hidden_size": 8}, "cannot load it"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(checkpoint, change, said):
    folder, _ = checkpoint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadModel, match=said) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["not json", "[]", "\xff"])
def test_a_broken_configuration_is_one_sentence(checkpoint, text):
    folder, _ = checkpoint
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(BadModel, match=r"config\.json' is not"):
        load_model(str(folder))


def test_broken_weights_are_one_sentence(checkpoint):
    folder, _ = checkpoint
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    with pytest.raises(BadModel, match="cannot load it"):
        load_model(str(folder))


def test_without_transformers_the_install_line_is_given(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install layerscope\[hf\]"):
        load_model(str(checkpoint[0]))


def test_what_torchao_says_when_transformers_imports_it_is_kept_quiet(checkpoint, monkeypatch, caplog):
    found = huggingface._class_of

    def talkative(*args):
        logging.getLogger("torchao").warning("Failed to load kernels")
        return found(*args)

    monkeypatch.setattr(huggingface, "_class_of", talkative)
    load_model(str(checkpoint[0]))
    assert not caplog.records
