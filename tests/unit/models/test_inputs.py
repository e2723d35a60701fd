"""Inputs from files, functions and prompts; files are written by the stock libraries."""

import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layerscope.errors import BadModel
from layerscope.models.inputs import Inputs, batches_of, bytes_as_ids, read_inputs

IDS = torch.arange(6).view(1, 6)


def test_a_mapping_is_keywords_a_tuple_is_positions_and_a_tensor_is_the_only_argument():
    assert Inputs.of({"ids": 1, "mask": 2}) == Inputs((), {"ids": 1, "mask": 2})
    assert Inputs.of((1, 2)) == Inputs((1, 2))
    assert Inputs.of(IDS).args[0] is IDS
    assert Inputs.of({}) == Inputs()


def test_keys_that_count_from_zero_are_positions():
    assert Inputs.of({"1": "b", "0": "a"}) == Inputs(("a", "b"))
    assert Inputs.of({"1": "b", "2": "a"}) == Inputs((), {"1": "b", "2": "a"})


def test_a_list_or_a_generator_is_one_forward_for_each_item():
    assert list(batches_of([(1,), {"x": 2}])) == [Inputs((1,)), Inputs((), {"x": 2})]
    assert list(batches_of(n for n in (1, 2))) == [Inputs((1,)), Inputs((2,))]
    assert list(batches_of((1, 2))) == [Inputs((1, 2))]


def test_every_file_format_gives_the_same_tensors(tmp_path):
    save_file({"input_ids": IDS}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", input_ids=IDS.numpy())
    torch.save({"input_ids": IDS}, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.npz", "a.pt"):
        found = Inputs.of(read_inputs(str(tmp_path / name)))
        assert list(found.kwargs) == ["input_ids"]
        assert torch.equal(found.kwargs["input_ids"], IDS)


def test_a_function_makes_inputs(tmp_path):
    (tmp_path / "make_inputs_for_test.py").write_text("def batch():\n    return {'x': 3}\n")
    assert read_inputs(f"{tmp_path}/make_inputs_for_test.py:batch") == {"x": 3}


def test_what_would_need_pickle_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (ran.write_text, ("",))

    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    np.savez(tmp_path / "evil.npz", x=np.array([Evil()], dtype=object), allow_pickle=True)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "evil.npz", "raw.pt"):
        with pytest.raises(BadModel, match="refused"):
            read_inputs(str(tmp_path / name))
    assert not ran.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"PK\x03\x04" + b"x" * 50, b"\xff" * 100])
def test_a_damaged_file_is_one_sentence(tmp_path, suffix, content):
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(BadModel, match=r"broken\.") as caught:
        read_inputs(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["nowhere.npz", "image.png", "x", ""])
def test_what_is_no_input_is_answered_with_the_forms_that_are(text):
    with pytest.raises(BadModel, match=r"FILE\.safetensors, FILE\.npz, FILE\.pt, file\.py:function"):
        read_inputs(text)


def test_a_prompt_without_a_tokenizer_is_its_bytes():
    assert bytes_as_ids("hé").tolist() == [[104, 195, 169]]
    assert bytes_as_ids("hé", vocabulary=100).tolist() == [[4, 95, 69]]
    with pytest.raises(BadModel, match="empty"):
        bytes_as_ids("")
