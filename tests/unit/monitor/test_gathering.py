"""What a recording sees, gathered by layer, epoch and batch, within a room of bytes."""

import threading

import torch
from torch import nn

from layerscope import record
from layerscope.monitor.gathering import Gathered
from layerscope.monitor.layers import choices_of, layers_of
from layerscope.recorder import RecordOptions, Tap
from layerscope.store.losses import Losses


def gathered(net, *, room=1 << 20, begins=lambda: None, layers=None, **more):
    found = layers_of(net, layers or {"0": {"record_type": "epoch_full"}})
    choices = choices_of(found, (1,), (0,), None)
    taps = [Tap(layer.place, when=choices[layer.alias], alias=layer.alias) for layer in found]
    made = Gathered(found, choices, room=room, begins=begins, losses=Losses("test"), **more)
    return found, made, record(net, taps, options=RecordOptions(listener=made))


def run(net, recording, batches, size=10):
    with recording as rec:
        for n in range(batches):
            rec.moment(epoch=1, batch=n)
            net(torch.full((size,), float(n)))


def test_captures_come_in_order_and_are_unsaved_until_they_are_saved():
    net = nn.Sequential(nn.Identity())
    [layer], made, recording = gathered(net)
    run(net, recording, 3)
    captures = made.of(layer)
    assert [capture.key for capture in captures] == [(1, 0), (1, 1), (1, 2)]
    assert made.unsaved(layer) == {(1, 0), (1, 1), (1, 2)}
    made.saved(layer, captures[:2])
    assert made.unsaved(layer) == {(1, 2)}
    made.forget([layer])
    assert (made.of(layer), made.unsaved(layer)) == ([], set())


def test_memory_is_given_up_to_the_room_and_comes_back():
    net = nn.Sequential(nn.Identity())
    [layer], made, recording = gathered(net, room=100)
    with recording as rec:
        for _ in range(2):
            for n in range(4):
                rec.moment(epoch=1, batch=n)
                net(torch.ones(10))
            assert [capture.in_memory for capture in made.of(layer)] == [True, True, False, False]
            made.forget([layer])


def test_a_call_that_gives_way_gives_its_memory_back():
    net = nn.Sequential(nn.Identity())
    [layer], made, recording = gathered(net, room=100)
    with recording as rec:
        rec.moment(epoch=1, batch=0)
        for n in range(9):
            net(torch.full((10,), float(n)))
    [capture] = made.of(layer)
    assert capture.moment.call == 8
    assert capture.in_memory
    assert capture.output(lambda held: held.copy()).tolist() == [8] * 10


def test_an_output_that_is_not_kept_gives_its_memory_back():
    net = nn.Sequential(nn.Identity())

    def keeps(output):
        if output[0] == 1:
            raise KeyError("it fails")
        return output[0] == 5

    [layer], made, recording = gathered(net, room=100, keeps=keeps)
    run(net, recording, 6)
    assert [(capture.batch, capture.in_memory) for capture in made.of(layer)] == [(5, True)]


def test_forwards_that_do_not_count_leave_nothing():
    net = nn.Sequential(nn.Identity())
    [layer], made, recording = gathered(net, begins=lambda: "no")
    run(net, recording, 2)
    assert made.of(layer) == []


def test_what_cannot_be_copied_costs_its_capture_and_nothing_else(caplog):
    net = nn.Sequential(nn.Identity())
    [layer], made, recording = gathered(net)
    with recording as rec:
        for n, given in enumerate((torch.ones(2), torch.eye(2).to_sparse(), torch.ones(2))):
            rec.moment(epoch=1, batch=n)
            net(given)
    assert [capture.batch for capture in made.of(layer)] == [0, 2]
    assert "a sparse_coo tensor is not stored" in caplog.text


def test_threads_that_forward_at_once_do_not_mix_their_leaves():
    net = nn.Sequential(nn.Identity())
    [layer], made, recording = gathered(net)

    def forward():
        for _ in range(50):
            net((torch.ones(3), torch.ones(4)))

    with recording as rec:
        rec.moment(epoch=1, batch=0)
        threads = [threading.Thread(target=forward) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    [capture] = made.of(layer)
    assert [held.shape for held in capture.tree] == [(3,), (4,)]
