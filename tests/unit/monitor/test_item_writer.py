"""Items as they are written: their numbers, and what is said when the disk refuses."""

import torch

from layerscope.monitor.captures import CapturedOutput, Held
from layerscope.monitor.item_writer import ItemWriter
from layerscope.monitor.layers import Layer
from layerscope.points import Moment, Point
from layerscope.store.losses import Losses

SINGLE = Layer("a", "one", "single", "a")
EPOCH = Layer("b", "all", "epoch_full", "b")


class Memory:
    """What the writer needs of `Stored`."""

    def fetch(self, held):
        return held.copy().clone()

    def pieces(self, held):
        yield held.copy()


def capture(batch, *, epoch=1, samples=None) -> CapturedOutput:
    tensor = torch.full((2,), float(batch))
    moment = Moment(epoch, batch, batch)
    return CapturedOutput(
        epoch, batch, moment, Held(Point("a"), moment, tensor.dtype, (2,), 8, lambda: tensor), samples
    )


def writer(folder) -> ItemWriter:
    return ItemWriter(folder, Memory(), format="pt", losses=Losses("test"))


def test_items_of_an_epoch_are_numbered_over_all_layers(tmp_path):
    made = writer(tmp_path)
    other = Layer("c", "c", "single", "c")
    names = [made.put(layer, [capture(n)]).name for n in range(2) for layer in (SINGLE, other)]
    assert names == [f"single_epoch_1_{n:03d}.pt" for n in range(4)]
    assert made.put(SINGLE, [capture(0, epoch=12)]).name == "single_epoch_12_000.pt"


def test_an_epoch_keeps_its_item_until_it_is_forgotten(tmp_path):
    made = writer(tmp_path)
    assert made.put(EPOCH, [capture(0)]).name == "epoch_1_000.pt"
    assert made.put(EPOCH, [capture(0), capture(1)]).name == "epoch_1_000.pt"
    made.forget(EPOCH)
    assert made.put(EPOCH, [capture(7)]).name == "epoch_1_001.pt"
    assert torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)["batch_idx"] == [0, 1]


def test_samples_are_in_the_item_where_they_are_known(tmp_path):
    made = writer(tmp_path)
    made.put(EPOCH, [capture(0, samples=(4, 2)), capture(1)])
    made.put(SINGLE, [capture(0, samples=(4, 2))])
    assert torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)["sample_indices"] == [[4, 2], None]
    assert torch.load(tmp_path / "single_epoch_1_000.pt", weights_only=True)["sample_indices"] == [4, 2]


def test_what_the_disk_refuses_is_said_once_and_raises_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    made = writer(tmp_path / "file")
    assert [made.put(SINGLE, [capture(n)]) for n in range(3)] == [None] * 3
    assert caplog.text.count("could not be saved") == 1
