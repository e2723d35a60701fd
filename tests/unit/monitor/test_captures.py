"""Outputs in the structure their layer gave them."""

import torch

from layerscope.monitor.captures import CapturedOutput, Held, held_in, shape_of
from layerscope.points import Moment, Point
from layerscope.runtimes.values import rebuilt
from zoo import Pair, Parts


def capture_of(value, *, kept=lambda leaf: True) -> CapturedOutput:
    def held(leaf, tensor):
        copy = (lambda: tensor) if kept(leaf) else None
        return Held(Point("a", leaf=leaf), Moment(), tensor.dtype, tuple(tensor.shape), tensor.nbytes, copy)

    return CapturedOutput(1, 2, Moment(1, 2, 2), rebuilt(value, held))


def test_structures_are_plain_and_none_stays():
    x, y = torch.ones(2), torch.zeros(1, 3)
    value = (x, None, [y, 3, "text"], {"k": x, 4: None}, Pair(x, y), Parts(x, y), object(), x.dtype)
    built = capture_of(value).output(lambda held: held.copy())
    assert built[:3] == (x, None, [y, 3, "text"])
    assert built[3] == {"k": built[3]["k"], 4: None}
    assert type(built[4]) is tuple
    assert built[4][1] is y
    assert built[5]["label"] == "not a tensor"
    assert built[6:] == (None, None)


def test_the_leaves_are_those_that_the_recorder_names():
    from layerscope.runtimes.values import leaves

    value = (
        torch.ones(1),
        {"k": [torch.ones(2)]},
        Pair(torch.ones(3), torch.ones(4)),
        Parts(torch.ones(5), torch.ones(6)),
    )
    found = [(held.point.leaf, held.shape) for held in held_in(capture_of(value).tree)]
    assert found == [(leaf, tuple(tensor.shape)) for leaf, tensor in leaves(value)]


def test_a_container_inside_itself_ends():
    inside: list = [torch.ones(1)]
    inside.append(inside)
    assert shape_of(capture_of(inside).tree) == [[1], None]


def test_shapes_are_lists():
    assert shape_of(torch.zeros(2, 3)) == [2, 3]
    assert shape_of(torch.tensor(1.0)) == []
    assert shape_of((torch.zeros(1), None, [torch.zeros(2)])) == [[1], None, [[2]]]
    assert shape_of({"a": torch.zeros(1), "b": "text"}) == {"a": [1], "b": None}


def test_bytes_are_counted_and_what_is_in_memory_is_known():
    capture = capture_of((torch.ones(2), torch.ones(3)), kept=lambda leaf: leaf == (0,))
    assert (capture.key, capture.nbytes, capture.held, capture.in_memory) == ((1, 2), 20, 8, False)
    assert capture_of(None).in_memory
    assert capture.output(lambda held: held.nbytes) == (8, 12)
