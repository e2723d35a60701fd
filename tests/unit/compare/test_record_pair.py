"""One pair of records: its shapes, its bytes, and what is measured of it."""

import torch

from layerscope.compare.align.alignment import Pair
from layerscope.compare.record_pair import RecordPair
from layerscope.points import Moment, Point
from layerscope.store import MemoryRun

X = torch.arange(24.0).reshape(2, 3, 4)


def job(reference, candidate, **cuts):
    entries = []
    for tensor in (reference, candidate):
        run = MemoryRun()
        run.add(Point("a"), Moment(step=3), tensor=tensor)
        entries += run.records()
    return RecordPair.of(Pair(Point("a"), Point("a"), "exact", "the same name", **cuts), *entries, "exact")


def test_a_job_is_named_by_the_reference_and_counts_what_is_read():
    one = job(X, X.double())
    assert one.key == (Point("a"), Moment(step=3))
    assert one.nbytes == 24 * (4 + 8)


def test_a_part_of_a_fused_projection_is_measured_alone():
    one = job(X[..., :2], X, candidate_cut=(0, 2))
    assert one.shapes == ((2, 3, 2), (2, 3, 2))
    assert one.measure().bitwise


def test_what_is_declared_flat_is_measured_in_the_reference_s_shape():
    assert job(X, X.reshape(6, 4), flat=True).measure().bitwise


def test_a_mask_s_lowest_number_is_left_out():
    lowest = torch.finfo(torch.float32).min
    masked, other = X.clone(), X + 1
    masked[0, 0, 0], other[0, 0, 0] = lowest, -1e9
    assert job(masked, other).measure().max_abs == 1
