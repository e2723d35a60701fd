"""Layerscope's own layout as the target of a conversion."""

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged, RunExists
from layerscope.points import Moment
from layerscope.stats import summarize
from layerscope.store import Manifest, convert, open_run


@pytest.fixture
def source(tmp_path, write):
    records = [(f"p{n}", Moment(step=step, batch=step), np.full(3, n + step / 10)) for step in (0, 1) for n in (0, 1)]
    write(tmp_path / "source", records, manifest=Manifest(mode="fp32", seed=3)).close(forwards=2, points=2)
    return tmp_path / "source"


def test_every_moment_is_taken_over_with_statistics(source, tmp_path):
    done = convert(source, tmp_path / "to", layout="layerscope", mode="other")
    run = open_run(tmp_path / "to")
    assert (run.manifest.mode, run.manifest.seed, run.state) == ("other", 3, "complete")
    assert run.moments == open_run(source).moments
    assert run.tensor("p1", step=1).tolist() == [1.1, 1.1, 1.1]
    (entry,) = run.records("p1", step=1)
    assert entry.summary == summarize(np.full(3, 1.1))
    assert (len(done.written), done.left_out) == (4, ())


def test_one_moment_and_some_points_can_be_taken(source, tmp_path):
    convert(source, tmp_path / "to", layout="layerscope", points=["p1"], step=0)
    run = open_run(tmp_path / "to")
    assert [(str(e.point), e.moment.step) for e in run.records()] == [("p1:output", 0)]


def test_ranks_stay_apart(tmp_path, write):
    for rank in (0, 1):
        write(tmp_path / "s", [("p", Moment(rank=rank), np.full(2, float(rank)))], rank=rank).close(
            forwards=1, points=1
        )
    convert(tmp_path / "s", tmp_path / "to", layout="layerscope")
    run = open_run(tmp_path / "to")
    assert [run.tensor("p", rank=rank).tolist() for rank in (0, 1)] == [[0, 0], [1, 1]]
    assert run.complete


def test_a_run_is_replaced_when_told_and_anything_else_never(source, tmp_path):
    to = tmp_path / "to"
    convert(source, to, layout="layerscope", step=0)
    with pytest.raises(RunExists, match="is already there; overwrite=True"):
        convert(source, to, layout="layerscope")
    convert(source, to, layout="layerscope", overwrite=True)
    assert len(open_run(to)) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "to"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(RunExists, match="no run of layerscope's: found 'chapter'; it is not replaced"):
        convert(source, tmp_path / "thesis", layout="layerscope", overwrite=True)


def test_what_a_replacement_left_beside_is_put_back_or_removed(source, tmp_path):
    to, before = tmp_path / "to", tmp_path / "to.replaced"
    convert(source, to, layout="layerscope", step=0)
    to.rename(before)  # as a kill between the two renames leaves it
    with pytest.raises(RunExists):
        convert(source, to, layout="layerscope")
    assert len(open_run(to)) == 2
    (before / "rank-00000").mkdir(parents=True)
    (before / "rank-00000" / "lock").touch()  # as a disk that would not remove all of it
    convert(source, to, layout="layerscope", overwrite=True)
    assert len(open_run(to)) == 4
    assert not before.exists()


def test_a_run_can_be_replaced_by_part_of_itself(source):
    convert(source, source, layout="layerscope", step=1, overwrite=True)
    assert [m.step for m in open_run(source).moments] == [1]


def test_what_cannot_be_read_stops_it_and_leaves_the_old_run(source, tmp_path, wrong):
    convert(source, tmp_path / "to", layout="layerscope")
    (segment,) = source.rglob("*.safetensors")
    wrong(segment, segment.read_bytes().index(np.full(3, 1.1).tobytes()))
    with pytest.raises(Damaged, match=r"p1:output at step=1 could not be taken over: .*checksum"):
        convert(source, tmp_path / "to", layout="layerscope", overwrite=True)
    assert torch.equal(open_run(tmp_path / "to").tensor("p1", step=1), torch.full((3,), 1.1, dtype=torch.float64))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "to"]


def test_elsewhere_is_as_good_as_here(source):
    convert(source, "memory://converted/run", layout="layerscope")
    assert len(open_run("memory://converted/run")) == 4
