"""A folder whose names a layout knows and of which nothing is understood is refused: an empty run looks like one."""

import json

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged, NotARun
from layerscope.store import open_run
from layerscope.store.layouts import LAYOUTS


def quamba(folder):
    (folder / "mode_0_stats.json").write_text(json.dumps({"mode": "0", "layer_0": {"mean": 1.0}}))


def neuron(folder):
    torch.save({"layer_0": {"mean": 1.0}}, folder / "statistics.pt")
    torch.save({"model": "m"}, folder / "metadata.pt")


def monitor(folder):
    item = {"epoch": 1, "batch_idx": 0, "layer": "blocks.0", "alias": None, "output_shape": None, "output": None}
    torch.save(item, folder / "epoch_1_0.pt")


def msprobe(folder):
    (folder / "dump.json").write_text(
        json.dumps({"task": "statistics", "level": "L0", "dump_data_dir": "", "data": {}})
    )


def huggingface(folder):
    tree = {"module_path": "Net", "inputs": None, "outputs": None, "children": []}
    (folder / "Net_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))


def first_layer(folder):
    np.savez(folder / "first_layer_io_all_modes.npz", weights=np.zeros(3))


def sglang(folder):
    torch.save({"value": torch.nn.Linear(1, 1)}, folder / "step=0___rank=0___dump_index=1___name=attn.pt")


SAID = {
    quamba: "layer_0 has some statistics and no array",
    neuron: "layer_0 has some statistics and no tensor",
    monitor: "blocks.0:output: None at epoch=1",
    msprobe: "dump.json lists nothing",
    huggingface: "nothing of it can be read",
    first_layer: "holds 'weights'",
    sglang: "attn:output: .* needs unpickling of torch.nn.modules.linear.Linear",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dump_of_which_nothing_is_understood_raises_and_says_why(tmp_path, layout):
    made, said = next((made, said) for made, said in SAID.items() if made.__name__ == layout)
    made(tmp_path)
    with pytest.raises((NotARun, Damaged), match=said):
        open_run(tmp_path)
