"""A training process to be killed: it monitors a layer whose outputs can be told from their batch.

    python monitoring.py WAY FOLDER      # prints how many batches are safe, after each

WAY is how the Monitor is used: `trainer`, `block`, `finally`, or `bare` for a loop that takes care of nothing.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from layerscope.monitor import Monitor, MonitoredTrainer

ROWS, BATCH, WIDTH = 4000, 2, 300


def rows() -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, WIDTH)


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(way: str, folder: str) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Identity())
    # A budget of three batches: what is saved at the end has to be read back from the run.
    monitor = Monitor(model, {"0": {"record_type": "epoch_full"}}, [1], folder, budget=3 * BATCH * WIDTH * 4)

    def train(*, speak: bool = False) -> None:
        if speak:
            monitor.set_epoch(1)
        for n, (batch,) in enumerate(DataLoader(TensorDataset(rows()), batch_size=BATCH)):
            if speak:
                monitor.set_batch_idx(n)
            model(batch)
            if n % 3 == 0:
                say(len(monitor.run))
            time.sleep(0.002)

    if way == "trainer":
        MonitoredTrainer(monitor).wrap_training_function(train)()
    elif way == "block":
        with monitor:
            train(speak=True)
    elif way == "finally":
        try:
            train(speak=True)
        finally:
            monitor.remove_hooks()
    else:
        train(speak=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
