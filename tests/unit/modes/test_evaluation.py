"""Quality of a mode: against transformers' own loss, and against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from layerscope.errors import BadText, Unsupported
from layerscope.models import Loaded, load_model
from layerscope.models.tiny import tiny_transformer
from layerscope.modes import variant
from layerscope.modes.evaluation import evaluate, ids_of, perplexity, text_of, window_of, windows_of

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."


def tokenizer(transformers, texts, vocabulary):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["[UNK]"]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint with a tokenizer of its own, as transformers saves them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 4  # drawn, predictions are all alike; sharper ones tell models apart
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    model.save_pretrained(folder)
    tokenizer(transformers, [TEXT], 60).save_pretrained(folder)
    return folder, model


def losses_of(model, windows):
    with torch.no_grad():
        return [float(model(input_ids=window, labels=window).loss) for window in windows]


def test_perplexity_is_exp_of_transformers_own_loss_on_the_folders_own_tokens(llama):
    transformers = pytest.importorskip("transformers")
    folder, model = llama
    loaded = load_model(str(folder))
    ids = ids_of(loaded, TEXT)
    assert torch.equal(ids, transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"])
    assert ids.shape[1] < len(TEXT)
    (loss,) = losses_of(model, [ids])
    assert perplexity(loaded.model, [ids]) == pytest.approx(math.exp(loss), rel=1e-6)


def test_windows_weigh_what_they_predict(llama):
    folder, model = llama
    ids = ids_of(load_model(str(folder)), TEXT)
    windows = windows_of(ids, 16)
    losses = losses_of(model, windows)
    counts = [window.shape[1] - 1 for window in windows]
    assert len(set(counts)) == 2
    wanted = math.exp(np.average(losses, weights=counts))
    assert perplexity(model, windows) == pytest.approx(wanted, rel=1e-6)
    assert evaluate(model, "fp32", windows).perplexity == pytest.approx(wanted, rel=1e-6)


def test_half_precision_has_the_loss_that_transformers_gives_it(llama):
    _, model = llama
    ids = torch.arange(40).view(1, 40)
    (loss,) = losses_of(variant(model, "bf16"), [ids])
    assert evaluate(model, "bf16", [ids]).perplexity == pytest.approx(math.exp(loss), rel=1e-6)


def test_a_token_that_is_left_over_is_left_out():
    assert [window.shape[1] for window in windows_of(torch.arange(9).view(1, 9), 4)] == [4, 4]
    assert [window.shape[1] for window in windows_of(torch.arange(10).view(1, 10), 4)] == [4, 4, 2]
    with pytest.raises(BadText, match="a window of 1 token predicts nothing"):
        windows_of(torch.arange(9).view(1, 9), 1)


def test_agreement_divergence_and_layer_errors_are_numpys():
    model = tiny_transformer(layers=3, hidden=32, heads=2)
    windows = windows_of(torch.tensor([list(TEXT.encode())]), 70)
    found = evaluate(model, "int4-weight", windows)
    other = variant(model, "int4-weight")
    agreed, divergences, off, size = [], [], np.zeros(3), np.zeros(3)
    for window in windows:
        logits, layers = [], []
        for one in (model, other):
            seen = []
            hooks = [
                layer.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out)) for layer in one.model.layers
            ]
            with torch.no_grad():
                logits.append(one(window)[0, :-1].double().numpy())
            layers.append([out.double().numpy() for out in seen])
            for hook in hooks:
                hook.remove()
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
        agreed += list(p.argmax(-1) == q.argmax(-1))
        divergences += list((p * np.log(p / q)).sum(-1))
        off += [np.square(a - b).sum() for a, b in zip(*layers, strict=True)]
        size += [np.square(a).sum() for a in layers[0]]
    assert found.tokens == len(agreed) == len(TEXT) - len(windows)
    assert found.agreement == pytest.approx(np.mean(agreed))
    assert found.divergence == pytest.approx(np.mean(divergences), rel=1e-9)
    assert list(found.layers.values()) == pytest.approx(np.sqrt(off / size), rel=1e-9)
    assert (found.last, list(found.layers)[-1]) == (found.layers["model.layers.2"], "model.layers.2")
    assert 0 < found.agreement < 1


def test_the_model_itself_agrees_with_itself_in_all():
    model = tiny_transformer(layers=2, hidden=32, heads=2)
    found = evaluate(model, "fp32", [torch.arange(30).view(1, 30)])
    assert (found.agreement, found.divergence, set(found.layers.values())) == (1, 0, {0.0})
    assert not any(module._forward_hooks for module in model.modules())


def test_a_mode_that_overflows_has_no_finite_perplexity():
    from layerscope.modes.registry import Mode, copied

    def make(model, setting):
        own = copied(model)
        own.lm_head.weight.data *= 1e6
        return own

    found = evaluate(
        tiny_transformer(layers=2, hidden=32, heads=2), Mode("loud", "x", make), [torch.arange(30).view(1, 30)]
    )
    assert found.perplexity == math.inf


# The text ---------------------------------------------------------------------------------------


def test_a_text_is_a_file_or_itself(tmp_path):
    (tmp_path / "a.txt").write_text("of a file", "utf-8")
    assert text_of(str(tmp_path / "a.txt")) == "of a file"
    assert text_of("of my own " * 1000) == "of my own " * 1000
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadText, match=r"is not text in UTF-8 \(byte 0\)"):
        text_of(str(tmp_path / "b.txt"))
    for word in ("missing.txt", "", "  "):
        with pytest.raises(BadText, match="is not a file, and no text to predict the words of"):
            text_of(word)


def test_a_checkpoint_without_a_tokenizer_is_refused_rather_than_given_bytes(llama, tmp_path):
    _, model = llama
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(Unsupported, match="knows 300 tokens and came without a tokenizer"):
        ids_of(load_model(str(tmp_path / "bare")), TEXT)


def test_a_model_over_bytes_reads_bytes():
    loaded = load_model("tiny-transformer")
    assert ids_of(loaded, TEXT).tolist() == [list(TEXT.encode())]
    with pytest.raises(BadText, match="--evaluate is 1 token long"):
        ids_of(loaded, "a")
    with pytest.raises(BadText, match="--evaluate has no text in it"):
        ids_of(loaded, "")


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.BertForMaskedLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 4
    words = tokenizer(transformers, [TEXT], 60)
    loaded = Loaded("bert", model, 0, encode=lambda text: dict(words(text, return_tensors="pt")))
    with pytest.raises(Unsupported, match="'bert' sees the tokens after the one it is to predict"):
        ids_of(loaded, TEXT)


def test_a_model_without_logits_is_refused(llama):
    _, model = llama
    with pytest.raises(Unsupported, match=r"LlamaModel gives no logits .* it returns one of \[1, 40, 32\]"):
        perplexity(model.model, [torch.arange(40).view(1, 40)])


def test_a_window_is_no_longer_than_the_model_has_room_for(llama):
    _, model = llama
    assert window_of(model) == 512
    model.config.max_position_embeddings, before = 48, model.config.max_position_embeddings
    try:
        assert window_of(model) == 48
    finally:
        model.config.max_position_embeddings = before
