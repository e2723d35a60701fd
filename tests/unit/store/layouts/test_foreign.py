"""A dump under the reading verbs."""

import pytest
import torch

from layerscope.errors import Ambiguous
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.source import Item


def of(tensor, moment=None, **kwargs):
    name = str(tensor.dtype).removeprefix("torch.")
    return Item(Point("p"), moment or Moment(), name, tuple(tensor.shape), tensor.nbytes, lambda: tensor, **kwargs)


def run(*items):
    return foreign_run("somewhere", "quamba", items)


def test_nothing_is_loaded_before_it_is_asked_for():
    loaded = []
    item = Item(Point("p"), Moment(), "float32", (2,), 8, lambda: loaded.append(1) or torch.ones(2))
    dump = run(item)
    assert (dump.points, len(dump), [e.shape for e in dump.records()]) == ([Point("p")], 1, [(2,)])
    assert loaded == []
    assert dump.tensor("p").tolist() == [1, 1]
    assert loaded == [1]


def test_rows_pieces_and_statistics_come_from_the_tensor():
    values = torch.arange(12.0).reshape(4, 3).T
    dump = run(of(values))
    assert dump.tensor("p", rows=slice(1, 3)).tolist() == values[1:3].tolist()
    (entry,) = dump.records()
    assert torch.cat(list(entry.pieces(5))).tolist() == values.reshape(-1).tolist()
    assert dump.summary("p") == summarize(values)
    assert entry.nbytes == 48


def test_an_item_with_pieces_of_its_own_is_gone_through_and_never_loaded():
    values = torch.arange(7.0)
    item = Item(Point("p"), Moment(), "float32", (7,), 28, load=None, pieces=values.split)
    (entry,) = run(item).records()
    assert [piece.tolist() for piece in entry.pieces(3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_of_two_at_the_same_moment_the_later_counts_and_the_other_is_counted():
    dump = run(of(torch.zeros(1)), of(torch.ones(1)), of(torch.ones(1), Moment(step=1)))
    assert (len(dump), dump.replaced) == (2, 1)
    assert dump.tensor("p", step=0).tolist() == [1]
    with pytest.raises(Ambiguous, match="recorded at 2 moments"):
        dump.tensor("p")
    assert "quamba, 2 records" in repr(dump)
