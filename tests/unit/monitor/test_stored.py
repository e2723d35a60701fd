"""Captures read back from memory and from the run."""

import shutil

import pytest
import torch
from torch import nn

from layerscope.errors import NotARun
from layerscope.monitor.monitor import Monitor


@pytest.fixture
def monitor(tmp_path):
    net = nn.Sequential(nn.Identity())
    made = Monitor(net, {"0": {"record_type": "epoch_full"}}, [1], tmp_path, budget=200)
    made.set_epoch(1)
    for n in range(5):
        made.set_batch_idx(n)
        net(torch.full((10,), float(n)))
    yield made
    made.remove_hooks()


def test_what_is_in_memory_and_what_is_in_the_run_read_alike(monitor):
    stored, [layer] = monitor._stored, monitor.layers
    captures = stored.readable(layer, monitor._gathered.of(layer))
    assert [capture.in_memory for capture in captures] == [True, True, False, False, False]
    for capture in captures:
        tensor = stored.fetch(capture.tree)
        assert tensor.tolist() == [capture.batch] * 10
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_run_that_is_gone_costs_what_it_held(monitor, caplog):
    stored, [layer] = monitor._stored, monitor.layers
    shutil.rmtree(stored.path)
    captures = stored.readable(layer, monitor._gathered.of(layer))
    assert [capture.batch for capture in captures] == [0, 1]
    assert "3 outputs of 0 are lost" in caplog.text
    with pytest.raises(NotARun):
        _ = monitor.run


def test_the_run_is_opened_once_and_read_on(monitor):
    first = monitor.run
    assert len(first) == 5
    monitor.set_batch_idx(5)
    monitor.model(torch.zeros(10))
    assert monitor.run is first
    assert len(first) == 6
