"""Models that several processes run together: names stay, each rank has its own, and shards say how they fit together.

Two ranks on gloo, forked from this process; the oracle is the model in one process.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerscope as ls

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or not dist.is_gloo_available(), reason="two ranks are forked, on gloo"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
RANKS = 2


def on_two_ranks(folder, work):
    """Run `work(rank)` in two processes that know of each other; return how they ended."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            os.environ["RANK"] = str(rank)
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
            work(rank)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(rank):
    return torch.linspace(-1, 1, 12).view(3, 4) + rank


def alone(rank):
    """What one process computes of a rank's batch: outputs, and the gradients of outputs, by point."""
    watched = model()
    with ls.record(watched, "**:output,grad_output") as rec:
        watched(batch(rank)).square().sum().backward()
    return {str(entry.point): entry.tensor() for entry in rec.run.records()}


def fully_sharded(net):
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
    return net


def wrapped_in_ddp(net):
    return nn.parallel.DistributedDataParallel(net)


@pytest.mark.parametrize("wrapped", [wrapped_in_ddp, fully_sharded])
def test_each_rank_has_the_values_of_its_batch_under_the_plain_names(tmp_path, wrapped):
    def work(rank):
        net = wrapped(model())
        with ls.record(net, "**:output,grad_output", to=tmp_path / "run", on_error="raise"):
            net(batch(rank)).square().sum().backward()

    assert on_two_ranks(tmp_path, work) == [0, 0]
    run = ls.open_run(tmp_path / "run")
    assert run.complete
    for rank in range(RANKS):
        found = {str(entry.point): entry.tensor() for entry in run.records(rank=rank)}
        expected = alone(rank)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_the_shards_of_tensor_parallel_layers_say_how_they_are_put_together(tmp_path):
    def work(rank):
        split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        joined = RowwiseParallel(input_layouts=Shard(-1))
        net = parallelize_module(model(), dist.device_mesh.init_device_mesh("cpu", (RANKS,)), {"0": split, "2": joined})
        with ls.record(net, "**", to=tmp_path / "run", on_error="raise"):
            net(batch(0))

    assert on_two_ranks(tmp_path, work) == [0, 0]
    run, expected = ls.open_run(tmp_path / "run"), alone(0)
    for name in ("0:output", "1:output"):
        shards = [next(iter(run.records(name, rank=rank))) for rank in range(RANKS)]
        for shard in shards:
            assert shard.note["whole_shape"] == "[3, 8]"
            assert "dim=" in shard.note["placements"]
        assert torch.equal(torch.cat([shard.tensor() for shard in shards], 1), expected[name])
    for rank in range(RANKS):
        torch.testing.assert_close(run.tensor("2", rank=rank), expected["2:output"])


def test_a_rank_that_is_killed_costs_its_own_and_is_named(tmp_path):
    def work(rank):
        net = wrapped_in_ddp(model())
        with ls.record(net, "**", to=tmp_path / "run") as rec:
            net(batch(rank))
            rec.flush()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    assert on_two_ranks(tmp_path, work) == [0, -signal.SIGKILL]
    for _ in range(2):
        run = ls.open_run(tmp_path / "run")
        assert not run.complete
        for rank in range(RANKS):
            expected = alone(rank)
            assert torch.equal(run.tensor("2", rank=rank), expected["2:output"])
        assert ls.recover(tmp_path / "run").lost == []
    assert run.state == "recovered"
