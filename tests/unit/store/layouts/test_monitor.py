"""The Monitor's items, written by hand as its documentation has them."""

import pytest
import torch

from layerscope.errors import Damaged, Unsupported
from layerscope.points import Moment, Point
from layerscope.store import Missing, open_run


def item(path, output, *, epoch=1, batch=0, layer="encoder.attn", alias="attention"):
    shape = [list(each.shape) for each in output] if isinstance(output, tuple) else None
    said = {"epoch": epoch, "batch_idx": batch, "layer": layer, "alias": alias, "output_shape": shape}
    path.parent.mkdir(exist_ok=True)
    torch.save({**said, "output": output}, path)


def test_an_item_is_a_layer_at_an_epoch_and_a_batch(tmp_path):
    for epoch in (5, 1):
        for batch in (0, 3):
            item(tmp_path / f"{epoch}-{batch}.pt", torch.full((2,), epoch + batch / 10), epoch=epoch, batch=batch)
    run = open_run(tmp_path)
    assert run.points == [Point("encoder.attn")]
    assert run.moments == [Moment(e, b, b) for e in (1, 5) for b in (0, 3)]
    assert run.tensor("attention", epoch=5, batch=3).tolist() == pytest.approx([5.3, 5.3])
    assert run.tensor("encoder.attn", epoch=1, batch=0).tolist() == [1, 1]
    assert (run.layout, run.state) == ("monitor", "unknown")


def test_a_tuple_has_its_leaves_and_what_is_none_is_missing(tmp_path):
    said = {"epoch": 1, "batch_idx": 0, "layer": "attn", "alias": None, "output_shape": [[2], None, [1]]}
    torch.save({**said, "output": (torch.ones(2), None, torch.zeros(1))}, tmp_path / "a.pt")
    run = open_run(tmp_path)
    assert run.points == [Point("attn", leaf=(0,)), Point("attn", leaf=(2,))]
    assert run.missing == [Missing("attn:output[1]", "None at epoch=1 step=0")]


def test_folders_of_epochs_and_lists_of_items_are_read(tmp_path):
    item(tmp_path / "epoch_1" / "a.pt", torch.ones(1))
    several = [
        {"epoch": 2, "batch_idx": n, "layer": "ffn", "alias": "ffn", "output_shape": [1], "output": torch.ones(1) * n}
        for n in range(3)
    ]
    (tmp_path / "epoch_2").mkdir()
    torch.save(several, tmp_path / "epoch_2" / "b.pt")
    run = open_run(tmp_path)
    assert len(run) == 4
    assert run.tensor("ffn", batch=2).tolist() == [2]


def test_an_epoch_as_a_whole_stands_at_its_first_batch(tmp_path):
    item(tmp_path / "a.pt", torch.ones(6), batch=[2, 3, 4])
    (entry,) = open_run(tmp_path).records()
    assert entry.moment == Moment(1, 2, 2)
    assert entry.note == {"batches": [2, 3, 4]}


def test_other_files_are_passed_over_and_noted(tmp_path):
    item(tmp_path / "a.pt", torch.ones(2))
    torch.save(torch.ones(3), tmp_path / "b.pt")
    torch.save({"mean": 1}, tmp_path / "c.pt")
    item(tmp_path / "d.pt", [torch.ones(1), "text"], layer="other")
    run = open_run(tmp_path)
    assert run.notes == [
        "b.pt is none of the Monitor's items: it is passed over",
        "c.pt is none of the Monitor's items: it is passed over",
        "d.pt: other:output[1] is a str, no tensor: it is passed over",
    ]
    assert len(run) == 2


def test_a_folder_of_other_saved_things_is_nobodys(tmp_path):
    torch.save(torch.ones(3), tmp_path / "weights.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is not a run: found 'broken\.pt', 'weights\.pt'"):
        open_run(tmp_path)


def test_what_is_not_an_item_of_numbers_is_refused_by_file(tmp_path):
    item(tmp_path / "a.pt", torch.ones(2))
    item(tmp_path / "c.pt", torch.ones(2), batch="three")
    with pytest.raises(Damaged, match=r"c\.pt: its layer, epoch or batch_idx is not one"):
        open_run(tmp_path)
    (tmp_path / "c.pt").unlink()
    said = {"epoch": 1, "batch_idx": 0, "layer": "l", "alias": "l", "output_shape": None, "output": torch.nn.ReLU()}
    torch.save(said, tmp_path / "c.pt")
    with pytest.raises(Unsupported, match=r"c\.pt needs unpickling of torch\.nn\.modules\.activation\.ReLU"):
        open_run(tmp_path)
