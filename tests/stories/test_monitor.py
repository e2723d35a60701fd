"""The Monitor's documentation is true: each of its snippets runs as it is written there.

The oracle is PyTorch's own forward hook beside ours. `Monitor(...)` is written with an ellipsis in that document: here
the name stands for a function that takes one.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from layerscope import open_run, when
from layerscope.monitor import Monitor, MonitoredTrainer

PAGE = Path(__file__).with_name("monitor_snippets.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))

EPOCHS, BATCHES = 3, 4


class Attention(nn.Module):
    """One tensor out, [batch, heads, tokens, tokens]: what the processing examples assume."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return torch.softmax(heads @ heads.transpose(-1, -2), dim=-1)


class Block(nn.Module):
    def __init__(self, *, tuples: bool = False):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True) if tuples else Attention()
        self.attention, self.cross_attn = Attention(), Attention()
        self.ffn = nn.Linear(8, 8)
        self.tuples = tuples

    def forward(self, x):
        mixed = self.self_attn(x, x, x)[0] if self.tuples else self.self_attn(x).mean()
        return self.ffn(x + mixed + self.attention(x).mean() + self.cross_attn(x).mean())


def model_of_the_page(*, tuples: bool = False) -> nn.Module:
    """Layers under the names that the snippets use."""
    torch.manual_seed(0)
    model, model.transformer, model.transformer.encoder = nn.Module(), nn.Module(), nn.Module()
    blocks = [Block(tuples=tuples), Block()]
    model.transformer.layers = nn.ModuleList(blocks)
    model.transformer.encoder.layers = nn.ModuleList([blocks[0]])
    model.forward = lambda x: blocks[1](blocks[0](x))
    return model


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 3, 8) for _ in range(BATCHES)]


class Fed:
    """A loader that, when the loop comes back for the next batch, trains on the last: `# 训练逻辑...`."""

    def __init__(self, model):
        self.model = model

    def __iter__(self):
        for batch in batches():
            yield batch
            self.model(batch)


LAYERS = {
    "transformer.encoder.layers.0.self_attn": {"alias": "attention_weights", "record_type": "single"},
    "transformer.encoder.layers.0.ffn": {"alias": "ffn_epoch_stats", "record_type": "epoch_full"},
}


def world(tmp_path, monkeypatch, *, layers=None, epochs=(1, 3), tuples=False, **more):
    """Return what the snippets take for granted, with a Monitor and a hook of PyTorch's own beside it."""
    monkeypatch.chdir(tmp_path)
    model = model_of_the_page(tuples=tuples)
    seen: list[torch.Tensor] = []
    model.transformer.layers[0].ffn.register_forward_hook(lambda m, i, o: seen.append(o.detach().clone()))
    monitor = Monitor(model, layers or LAYERS, list(epochs), tmp_path / "out", [0, 2])
    return {
        "torch": torch,
        "Monitor": lambda anything: monitor,
        "MonitoredTrainer": MonitoredTrainer,
        "monitor": monitor,
        "model": model,
        "seen": seen,
        "dataloader": Fed(model),
        "num_epochs": EPOCHS,
        "num_batches": BATCHES,
        "device": "cpu",
        "config": SimpleNamespace(train=SimpleNamespace(num_epochs=EPOCHS), monitor=monitor),
        **more,
    }


def run(title: str, names: dict) -> None:
    exec(compile(SNIPPETS[title], title, "exec"), names)


def assert_epochs_saved(names) -> None:
    """Check the items of epochs 1 and 3 against what PyTorch's own hook saw."""
    out = names["monitor"].output_dir
    files = sorted(path.name for path in out.glob("*.pt"))
    assert files == [
        *("epoch_1_000.pt", "epoch_3_000.pt"),
        *("single_epoch_1_000.pt", "single_epoch_1_001.pt", "single_epoch_3_000.pt", "single_epoch_3_001.pt"),
    ]
    for epoch in (1, 3):
        item = torch.load(out / f"epoch_{epoch}_000.pt", weights_only=True)
        assert item["output"].equal(torch.cat(names["seen"][(epoch - 1) * BATCHES :][:BATCHES]))
        assert item["batch_idx"] == list(range(BATCHES))
    assert open_run(out).tensor("attention_weights", epoch=3, batch=2).shape == (2, 2, 3, 3)
    assert sum(len(module._forward_hooks) for module in names["model"].modules()) == 1  # PyTorch's own of this test


@pytest.mark.parametrize("as_text", [True, False])
def test_the_configuration_file(tmp_path, as_text):
    config = SNIPPETS["config"] if as_text else eval(SNIPPETS["config"])
    monitor = Monitor.from_config(model_of_the_page(), config, tmp_path, batch_indices=[0])
    assert [(layer.alias, layer.record_type) for layer in monitor.layers] == [
        ("attention_weights", "single"),
        ("cross_attention", "epoch_full"),
    ]
    assert monitor.epochs_to_record == (1, 5, 10, 20)
    monitor.remove_hooks()


def test_the_configuration_in_code(tmp_path):
    names: dict = {}
    run("hard_coded", names)
    model = model_of_the_page()
    with Monitor(model, names["monitor_layers"], names["monitor_epochs"], tmp_path, [0]) as monitor:
        monitor.set_epoch(5)
        monitor.set_batch_idx(0)
        model(batches()[0])
        assert monitor.get_single_data().keys() == {"attn_out"}
        assert monitor.get_epoch_data().keys() == {"ffn_stats"}


def test_the_first_way_callbacks(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    run("callbacks_function", names)
    run("callbacks_use", names)
    assert_epochs_saved(names)


def test_the_second_way_the_wrapper(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    run("callbacks_function", names)
    run("wrapper", names)
    assert_epochs_saved(names)


def test_the_second_way_with_a_function_that_takes_no_callbacks(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    model, data = names["model"], TensorDataset(torch.cat(batches()))

    def encapsulated_train(config, device):
        loader = DataLoader(data, batch_size=2)
        for _ in range(config.train.num_epochs):
            for (batch,) in loader:
                model(batch)

    run("wrapper", {**names, "encapsulated_train": encapsulated_train})
    assert_epochs_saved(names)


def test_the_third_way_where_the_batches_are_called(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    names["encapsulated_train_one_batch"] = lambda batch_idx: names["model"](batches()[batch_idx])
    run("direct", names)
    assert_epochs_saved(names)


def test_a_training_loop_in_the_open(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    model = names["model"]
    more = {
        "dataloader": batches(),
        "criterion": nn.MSELoss(),
        "targets": torch.zeros(2, 3, 8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "compute_statistics": lambda values: {"mean": values.mean(), "std": values.std()},
    }
    run("open_loop", names | more)
    assert_epochs_saved(names)
    mean = torch.load("epoch_stats_ffn_epoch_stats_epoch_3.pt", weights_only=True)["mean"]
    assert mean.equal(torch.cat(names["seen"][-BATCHES:]).mean())
    assert Path("custom_avg_attention_weights_epoch_1.pt").exists()
    assert not Path("custom_avg_attention_weights_epoch_2.pt").exists()


def trained(names, epoch=1) -> None:
    monitor = names["monitor"]
    monitor.set_epoch(epoch)
    for index, batch in enumerate(batches()):
        monitor.set_batch_idx(index)
        names["model"](batch)
    names["epoch"] = epoch


def test_mixed_record_types(tmp_path, monkeypatch):
    named: dict = {}
    run("mixed", named)
    names = world(tmp_path, monkeypatch, layers=named["layers_to_monitor"])
    trained(names)
    assert list(names["monitor"].get_single_data()["attention_weights"]["data"]) == [(1, 0), (1, 2)]
    assert list(names["monitor"].get_epoch_data()["ffn_epoch_stats"]["data"]) == [(1, n) for n in range(BATCHES)]


def test_tuple_outputs(tmp_path, monkeypatch, capsys):
    names = world(tmp_path, monkeypatch, tuples=True)
    trained(names)
    run("tuples", names)
    said = capsys.readouterr().out
    assert said.count("Attention output shape: torch.Size([2, 3, 8])") == 2
    assert said.count("Attention weights shape: torch.Size([2, 3, 3])") == 2
    assert names["single_data"]["attention_weights"]["output_shape"] == [[2, 3, 8], [2, 3, 3]]


def test_the_first_processing_example(tmp_path, monkeypatch):
    drawn = []
    names = world(tmp_path, monkeypatch, plot_attention_patterns=drawn.append)
    trained(names)
    run("attention_analysis", names)
    assert drawn[0].shape == (2, 2, 3, 3)
    assert torch.load("attention_analysis_epoch_1.pt", weights_only=True).sum(-1).allclose(torch.ones(2, 2, 3))


def test_the_second_processing_example(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    trained(names)
    run("ffn_statistics", names)
    every = torch.cat(names["seen"])
    saved = torch.load("ffn_stats_epoch_1.pt", weights_only=True)
    assert saved["max"].equal(every.max(dim=0)[0])
    assert saved["mean"].equal(every.mean(dim=0))


def test_the_third_processing_example(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch)
    trained(names)
    run("custom_function", names)
    saved = torch.load("attention_analysis_attention_weights_epoch_1.pt", weights_only=True)
    assert saved["layer_patterns"].shape == (2, 2, 3, 3)


def test_memory_management(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch, save_interval=1)
    trained(names)
    # A `try` with nothing in it but a remark is no Python: something has to stand there.
    exec(SNIPPETS["memory"].replace("# 训练代码...", "model(torch.zeros(2, 3, 8))"), names)
    assert names["monitor"].get_single_data() == {}
    assert [len(each) for each in names["monitor"].get_epoch_buffers().values()] == [1]  # after the data was cleared


def test_a_filter_of_ones_own_is_a_schedule(tmp_path):
    assert "_custom_condition" in SNIPPETS["custom_filter"]  # which the page has its readers edit into a private method
    model = model_of_the_page()
    odd = when(lambda moment: moment.batch % 2 == 1)
    with Monitor(
        model, {"transformer.layers.0.ffn": {"record_type": "epoch_full"}}, [1], tmp_path, when=odd
    ) as monitor:
        trained({"monitor": monitor, "model": model})
        assert list(monitor.get_epoch_data()["transformer.layers.0.ffn"]["data"]) == [(1, 1), (1, 3)]


def test_processing_of_ones_own(tmp_path, monkeypatch):
    names = world(tmp_path, monkeypatch, my_custom_function=lambda outputs: {"last": outputs[-1], "n": len(outputs)})
    trained(names)
    run("custom_processing", names)
    saved = torch.load(tmp_path / "out" / "custom_ffn_epoch_stats.pt", weights_only=True)
    assert saved["last"].equal(names["seen"][-1])
    assert saved["n"] == BATCHES
    assert names["monitor"].get_epoch_data() == {}
    assert names["monitor"].get_single_data() != {}


def test_every_snippet_of_the_page_has_its_test():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [title for title in SNIPPETS if f'"{title}"' not in text] == []
    assert len(SNIPPETS) == 15
