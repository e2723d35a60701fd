"""Layers as they are asked for, and the moments at which each is due."""

import logging

import pytest
from torch import nn

from layerscope.monitor.layers import choices_of, layers_of, whole_numbers
from layerscope.points import Moment
from layerscope.schedules import when


def net():
    return nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))


def test_a_list_and_a_dict_say_the_same():
    assert layers_of(net(), ["0", "1.0"]) == layers_of(
        net(), {"0": {}, "1.0": {"alias": None, "record_type": "single"}}
    )
    assert layers_of(net(), "0") == layers_of(net(), ("0",))


def test_wrappers_keep_the_callers_name_and_lose_it_where_it_is_recorded():
    [layer] = layers_of(nn.DataParallel(net()), ["module.1.0"])
    assert (layer.name, layer.alias, layer.place) == ("module.1.0", "module.1.0", "1.0")


def test_the_whole_model_can_be_asked_for_both_ways():
    assert [layer.place for layer in layers_of(net(), ["", "1"])] == ["", "1"]
    assert [layer.place for layer in layers_of(net(), {".": {"alias": "all"}})] == [""]


def test_a_layer_answers_to_its_name_and_its_alias():
    [layer] = layers_of(net(), {"0": {"alias": "first"}})
    assert layer.answers_to(["first"])
    assert layer.answers_to(["x", "0"])
    assert not layer.answers_to(["x"])


@pytest.mark.parametrize("numbers", [["a"], [1.5], [-1], [False], [None]])
def test_numbers_that_are_none_are_refused(numbers):
    with pytest.raises(ValueError, match="epochs="):
        whole_numbers("epochs", numbers)


def test_numbers_of_every_kind_are_taken():
    import numpy as np

    assert whole_numbers("epochs", np.array([1, 5, 5])) == (1, 5)
    assert whole_numbers("epochs", range(3)) == (range(3),)


def test_a_choice_is_a_schedule_that_says_why_not(caplog):
    caplog.set_level(logging.DEBUG, logger="layerscope")
    asked = []
    more = when(lambda moment: asked.append(moment) or moment.step != 9, name="mine")
    layers = layers_of(net(), {"0": {}, "1": {"record_type": "epoch_full"}})
    choices = choices_of(layers, (1, 5), (0,), more)
    assert str(choices["0"]) == "epochs(1, 5) & batches(0) & when(mine)"
    assert str(choices["1"]) == "epochs(1, 5) & when(mine)"
    assert choices["0"](Moment(1, 0, 0))
    assert not choices["0"](Moment(1, 1, 1))
    assert choices["1"](Moment(1, 1, 1))
    assert not choices["1"](Moment(2, 9, 0))
    assert not choices["1"](Moment(5, 9, 0))
    assert not choices["0"](Moment(None, 0, 0))
    reasons = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert reasons == [
        "batch 1 is not in batch_indices",
        "epoch 2 is not in epochs_to_record",
        "when(mine) says no",
        "epoch None is not in epochs_to_record",
    ]


def test_the_callers_function_is_asked_once_for_a_moment():
    asked = []
    more = when(lambda moment: asked.append(moment) or len(asked) % 2 == 1)
    [layer] = layers_of(net(), {"0": {"record_type": "epoch_full"}})
    choice = choices_of([layer], (1,), (), more)["0"]
    assert [choice(Moment(1, 0, 0, call)) for call in range(3)] == [True] * 3
    assert not choice(Moment(1, 1, 1))
    assert len(asked) == 2
