"""Samples that went through a few at a time, read as if all had gone at once."""

import pytest
import torch

from layerscope.errors import Unsupported
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Manifest
from layerscope.store.joining import are_samples, joined
from layerscope.store.memory import MemoryRun

WHOLE = torch.arange(42.0).reshape(7, 2, 3)


def run_of(parts, *, keep="tensor"):
    run = MemoryRun()
    for step, part in enumerate(parts):
        kept = {"tensor": part} if keep == "tensor" else {"summary": summarize(part)}
        run.add(Point("layers.0"), Moment(step=step, batch=step), **kept)
        run.add(Point("layers.1"), Moment(step=step, batch=step), **kept)
    run.close()
    return run


def test_the_records_of_a_point_are_one_tensor_in_order():
    whole = joined(run_of(WHOLE.split(3)))
    assert torch.equal(whole.tensor("layers.0"), WHOLE)
    assert torch.equal(whole.tensor("layers.1", rows=slice(2, 5)), WHOLE[2:5])
    assert [str(point) for point in whole.points] == ["layers.0:output", "layers.1:output"]
    assert whole.moments == [Moment()]
    (entry,) = whole.records("layers.0")
    assert (entry.shape, entry.dtype, entry.nbytes) == ((7, 2, 3), "float32", 4 * 42)


def test_the_statistics_are_those_of_the_whole():
    summary = joined(run_of(WHOLE.split(2))).summary("layers.0")
    assert (summary.count, summary.mean, summary.min, summary.max) == (42, 20.5, 0, 41)
    assert summary.shape == (7, 2, 3)
    assert list(summary.first) == list(range(10))
    alone = joined(run_of(WHOLE.split(2), keep="summary")).summary("layers.0")
    assert (alone.count, alone.mean, alone.max) == (42, 20.5, 41)


def test_pieces_are_never_larger_than_asked_and_come_in_order():
    (entry,) = joined(run_of(WHOLE.split(4))).records("layers.0")
    pieces = list(entry.pieces(10))
    assert max(map(len, pieces)) <= 10
    assert torch.equal(torch.cat(pieces), WHOLE.flatten())


def test_a_run_of_one_moment_is_returned_as_it_is():
    run = run_of([WHOLE])
    assert joined(run) is run


@pytest.mark.parametrize("other", [torch.ones(3, 2, 4), torch.ones(3, 2, 3, dtype=torch.float16), torch.tensor(1.0)])
def test_what_does_not_fit_together_is_one_sentence(other):
    with pytest.raises(Unsupported, match=r"layers\.0.*choose a moment"):
        joined(run_of([WHOLE, other])).tensor("layers.0")


def test_records_are_joined_of_those_alone_that_are_named():
    run = run_of(WHOLE.split(3))
    run.add(Point("loss"), Moment(step=0), tensor=torch.tensor(1.0))
    run.add(Point("loss"), Moment(step=1, batch=1), tensor=torch.tensor(2.0))
    (entry,) = joined(run, run.records("layers.1")).records()
    assert str(entry.point) == "layers.1:output"
    assert torch.equal(entry.tensor(), WHOLE)


@pytest.mark.parametrize(
    ("samples", "whole"), [(7, True), (6, False), (14, False), (None, False), ("7", False), (True, False)]
)
def test_records_are_samples_where_the_run_was_recorded_on_as_many(samples, whole):
    settings = {} if samples is None else {"calib_data_num": samples}
    entries = list(run_of(WHOLE.split(3)).records("layers.0"))
    assert are_samples(entries, Manifest(settings=settings)) is whole


@pytest.mark.parametrize("moment", [Moment(call=1), Moment(rank=1), Moment(epoch=1, step=1)])
def test_records_of_several_calls_ranks_or_epochs_are_no_samples(moment):
    run = MemoryRun(Manifest(settings={"calib_data_num": 7}))
    run.add(Point("layers.0"), Moment(), tensor=WHOLE[:3])
    run.add(Point("layers.0"), moment, tensor=WHOLE[3:])
    assert not are_samples(list(run.records()), run.manifest)


def test_scalars_and_summaries_are_no_samples():
    about = Manifest(settings={"calib_data_num": 7})
    assert not are_samples(list(run_of([torch.tensor(7.0)] * 2).records("layers.0")), about)
    assert not are_samples(list(run_of(WHOLE.split(3), keep="summary").records("layers.0")), about)
