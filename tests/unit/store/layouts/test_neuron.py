"""The Neuron layout: files that torch saved by hand."""

import pytest
import torch

from layerscope.errors import Damaged, Unsupported
from layerscope.store import open_run


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    names = ["embedding_output", *(f"layer_{n}_output" for n in range(1, 13)), "logits_output"]
    return {name: torch.randn(1, 4, 6).to(torch.bfloat16) for name in names}


@pytest.fixture
def dump(tmp_path, tensors):
    statistics = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        torch.save(tensor, tmp_path / f"{name}.pt")
        if name != "logits_output":
            statistics[f"layer_{number}"] = {"mean": tensor.float().mean().item(), "shape": tensor.shape}
    torch.save(statistics, tmp_path / "statistics.pt")
    torch.save({"model": "MiniMax-M2", "dtype": torch.bfloat16, "seq_len": 32}, tmp_path / "metadata.pt")
    return tmp_path


def test_files_count_from_1_and_layers_from_0(dump, tensors):
    run = open_run(dump)
    names = [point.name for point in run.points]
    assert names == ["embedding", *(f"layers.{n}" for n in range(12)), "logits"]
    assert torch.equal(run.tensor("layers.0"), tensors["layer_1_output"])
    assert torch.equal(run.tensor("layers.11"), tensors["layer_12_output"])
    for name, tensor in tensors.items():
        assert torch.equal(run.tensor(name), tensor)
    assert torch.equal(run.tensor("layer_0"), tensors["embedding_output"])
    assert run.tensor("layers.3").dtype == torch.bfloat16


def test_what_the_files_beside_say_is_kept(dump):
    run = open_run(dump)
    assert (run.layout, run.state, run.notes) == ("neuron", "unknown", [])
    assert run.manifest.model == {"name": "MiniMax-M2"}
    assert run.manifest.settings == {"dtype": "torch.bfloat16", "seq_len": 32}


def test_holes_and_absences_are_noted(dump):
    for name in ("layer_3_output", "layer_5_output", "metadata", "statistics"):
        (dump / f"{name}.pt").unlink()
    assert open_run(dump).notes == [
        "metadata.pt is not there",
        "statistics.pt is not there",
        "the numbering has holes: of 12 layers there is no 3, 5",
    ]


def test_a_layer_0_file_is_the_embedding_unless_there_is_one(dump, tensors):
    (dump / "embedding_output.pt").rename(dump / "layer_0_output.pt")
    assert torch.equal(open_run(dump).tensor("embedding"), tensors["embedding_output"])
    torch.save(torch.zeros(1), dump / "embedding_output.pt")
    run = open_run(dump)
    assert run.tensor("embedding").tolist() == [0]
    assert "layer_0_output.pt is passed over" in run.notes[0]


def test_what_needs_unpickling_is_refused_in_a_tensor_and_passed_over_beside(dump):
    torch.save({"config": torch.nn.Linear(1, 1), "seq_len": 3}, dump / "metadata.pt")
    run = open_run(dump)
    assert run.manifest.settings == {"seq_len": 3}
    assert "needs unpickling of torch.nn.modules.linear.Linear, which is never done" in run.notes[0]
    torch.save(torch.nn.Linear(1, 1), dump / "layer_2_output.pt")
    with pytest.raises(Unsupported, match=r"layer_2_output\.pt needs unpickling of torch\.nn\.modules\.linear\.Linear"):
        open_run(dump)


def test_other_things_in_the_files_are_refused_by_name(dump):
    torch.save([1], dump / "statistics.pt")
    with pytest.raises(Damaged, match=r"statistics\.pt holds a list, and a dict is expected"):
        open_run(dump)


def test_pieces_of_a_saved_tensor_are_read_from_the_file(dump, tensors):
    (entry,) = open_run(dump).records("layers.4")
    assert torch.equal(torch.cat(list(entry.pieces(5))), tensors["layer_5_output"].reshape(-1))


def test_token_ids_in_the_metadata_are_settings_and_floats_are_not_read(dump):
    said = {"prompt": "hello", "input_ids": torch.tensor([[3, 1, 2]]), "logits": torch.zeros(1, 3)}
    torch.save(said, dump / "metadata.pt")
    assert open_run(dump).manifest.settings == {
        "prompt": "hello",
        "input_ids": [[3, 1, 2]],
        "logits": "float32 of shape [1, 3]",
    }
