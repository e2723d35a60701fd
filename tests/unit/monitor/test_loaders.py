"""Passes over loaders, followed: the same batches in the same order, and their samples."""

import threading

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from layerscope.monitor.loaders import Followed, following

ROWS = TensorDataset(torch.arange(10))
CLEAN = DataLoader.__iter__


class Notes:
    def __init__(self):
        self.batches = []
        self.ended = 0

    def yielded(self, under_way):
        self.batches.append((under_way.index, under_way.samples))

    def over(self, ended):
        self.ended += 1


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_a_pass_is_followed_batch_by_batch():
    notes = Notes()
    loader = DataLoader(ROWS, batch_size=4, shuffle=True)
    with following(notes):
        got = [batch.tolist() for (batch,) in loader]
    assert [list(samples) for _, samples in notes.batches] == got
    assert [index for index, _ in notes.batches] == [0, 1, 2]
    assert notes.ended == 1
    assert DataLoader.__iter__ is CLEAN


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_yielded_and_the_state_of_chance_are_unchanged(workers):
    def passes():
        torch.manual_seed(5)
        loader = DataLoader(ROWS, batch_size=3, shuffle=True, num_workers=workers)
        found = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
        return found, torch.get_rng_state().tolist()

    plain = passes()
    notes = Notes()
    with following(notes):
        assert passes() == plain
    assert [list(samples) for _, samples in notes.batches] == [batch for one in plain[0] for batch in one]


def test_workers_that_persist_tell_their_samples_in_every_pass():
    loader = DataLoader(ROWS, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    for _ in range(2):  # the second time they were begun under another follower
        notes = Notes()
        with following(notes):
            got = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
        assert [list(samples) for _, samples in notes.batches] == got[0] + got[1]


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (lambda: DataLoader(ROWS, batch_size=None), [(n,) for n in range(10)]),
        (
            lambda: DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 5, False)),
            [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)],
        ),
        (lambda: DataLoader(Counting(), batch_size=2), [None, None, None]),
    ],
)
def test_samplers_of_every_kind(loader, samples):
    notes = Notes()
    with following(notes):
        list(loader())
    assert [found for _, found in notes.batches] == samples


def test_another_threads_loaders_are_its_own_affair():
    notes = Notes()
    with following(notes):
        thread = threading.Thread(target=lambda: list(DataLoader(ROWS)))
        thread.start()
        thread.join()
    assert notes.batches == []


def test_the_innermost_follower_is_told_and_the_loader_is_whole_after_an_exception():
    outer, inner = Notes(), Notes()
    loader = DataLoader(ROWS, batch_size=5)
    with following(outer):
        with pytest.raises(ZeroDivisionError), following(inner):
            _ = [len(batch) // 0 for batch in loader]
        next(iter(loader))
    assert (len(inner.batches), len(outer.batches)) == (1, 1)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert DataLoader.__iter__ is CLEAN


def test_somebody_elses_patch_survives_ours(monkeypatch):
    calls = []
    with following(Notes()):
        ours = DataLoader.__iter__
        monkeypatch.setattr(DataLoader, "__iter__", lambda self: calls.append(1) or ours(self))
    notes = Notes()
    with following(notes):
        assert len(list(DataLoader(ROWS, batch_size=5))) == 2
    assert (len(calls), len(notes.batches)) == (1, 2)
    assert len(list(DataLoader(ROWS, batch_size=5))) == 2
    monkeypatch.undo()
    with following(notes):
        pass
    assert DataLoader.__iter__ is CLEAN


def test_a_followed_loader_is_the_loader_in_everything_else():
    notes = Notes()
    followed = Followed(DataLoader(ROWS, batch_size=4), notes)
    assert (len(followed), followed.batch_size) == (3, 4)
    iterator = iter(followed)
    assert len(iterator) == 3
    assert next(iterator)[0].tolist() == [0, 1, 2, 3]
    assert notes.batches == [(0, (0, 1, 2, 3))]
    outer = Notes()
    with following(outer):
        list(followed)
    assert (len(outer.batches), len(notes.batches)) == (3, 1)  # once, and not twice


def test_anything_that_can_be_iterated_can_be_followed():
    notes = Notes()
    assert list(Followed([5, 6], notes)) == [5, 6]
    assert notes.batches == [(0, None), (1, None)]
