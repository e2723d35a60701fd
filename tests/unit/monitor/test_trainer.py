"""Training functions of every kind, monitored without being changed."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from asserts import assert_no_hooks_left
from layerscope.monitor.monitor import Monitor
from layerscope.monitor.trainer import MonitoredTrainer

ROWS = torch.arange(20.0).reshape(10, 2)
CLEAN = DataLoader.__iter__


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2))


@pytest.fixture
def monitor(net, tmp_path):
    made = Monitor(net, {"0": {"record_type": "epoch_full"}, ".": {"alias": "root"}}, range(10), tmp_path, range(100))
    yield made
    made.remove_hooks()


def loader(rows=ROWS, **more) -> DataLoader:
    return DataLoader(TensorDataset(rows), batch_size=4, **more)


def moments(monitor) -> list[tuple[int, int, int]]:
    """Return epoch, batch and call of everything that was recorded."""
    return [(e.moment.epoch, e.moment.batch, e.moment.call) for e in monitor.run.records("0")]


def epochs(numbers, batches=3) -> list[tuple[int, int, int]]:
    return [(epoch, batch, 0) for epoch in numbers for batch in range(batches)]


# Callbacks ----------------------------------------------------------------------------------------


def test_callbacks_are_given_by_name_and_what_the_function_returns_comes_back(net, monitor):
    def train(model, *, epoch_callback, batch_callback=None):
        """Train."""
        for epoch in (3, 5):
            epoch_callback(epoch)
            for n in (7, 8):
                batch_callback(n)
                model(ROWS)
        return "done"

    trained = MonitoredTrainer(monitor).wrap_training_function(train)
    assert (trained.__name__, trained.__doc__) == ("train", "Train.")
    assert trained(net) == "done"
    assert moments(monitor) == [(3, 7, 0), (3, 8, 0), (5, 7, 0), (5, 8, 0)]
    assert_no_hooks_left(net)


def test_callbacks_are_given_among_other_keywords(net, monitor):
    def train(model, **kwargs):
        kwargs["epoch_callback"](1)
        kwargs["batch_callback"](0)
        model(ROWS)
        return kwargs["lr"]

    assert MonitoredTrainer(monitor).wrap_training_function(train)(net, lr=0.1) == 0.1
    assert moments(monitor) == [(1, 0, 0)]


def test_a_callback_of_the_callers_own_is_left_to_him(net, monitor):
    heard = []

    def train(model, epoch_callback):
        epoch_callback(4)
        model(ROWS)

    MonitoredTrainer(monitor).wrap_training_function(train)(net, heard.append)
    assert heard == [4]


def test_epochs_from_a_callback_and_batches_from_the_loader(net, monitor):
    def train(model, epoch_callback):
        for epoch in (2, 4):
            epoch_callback(epoch)
            for (rows,) in loader():
                model(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)(net)
    assert moments(monitor) == epochs([2, 4])


def test_a_function_that_takes_keywords_and_calls_nothing_is_counted(net, monitor):
    def train(model, **kwargs):
        for _ in range(2):
            for (rows,) in loader():
                model(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)(net)
    assert moments(monitor) == epochs([1, 2])


# Counting -----------------------------------------------------------------------------------------


def test_passes_and_batches_are_counted_and_each_epoch_is_saved_at_its_end(net, monitor, tmp_path):
    def train():
        data = loader(shuffle=True)
        for epoch in range(1, 4):
            for (rows,) in data:
                net(rows)
            assert (tmp_path / f"epoch_{epoch}_000.pt").exists()

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == epochs([1, 2, 3])
    item = torch.load(tmp_path / "epoch_2_000.pt", weights_only=True)
    order = [index for batch in item["sample_indices"] for index in batch]
    assert sorted(order) == list(range(10))
    assert order != list(range(10))
    with torch.no_grad():
        assert item["output"].allclose(net(ROWS[order]))


def test_counting_may_begin_elsewhere(net, monitor):
    def train():
        for (rows,) in loader():
            net(rows)

    MonitoredTrainer(monitor, first_epoch=0).wrap_training_function(train)()
    assert moments(monitor) == epochs([0])


def test_evaluation_advances_nothing_and_is_not_recorded(net, monitor, caplog):
    caplog.set_level(logging.DEBUG, logger="layerscope")
    held_out = loader(torch.zeros(6, 2))

    def evaluate():
        net.eval()
        with torch.no_grad():
            for (rows,) in held_out:
                net(rows)
        net.train()

    def train():
        data = loader()
        evaluate()  # before the first epoch, as some do to see that it works
        for _ in range(2):
            for n, (rows,) in enumerate(data):
                net(rows)
                if n == 1:
                    evaluate()  # in the middle of one
            evaluate()

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == epochs([1, 2])
    assert caplog.text.count("a forward is skipped: the model is in evaluation mode") == 2 * 5


def test_evaluation_between_callbacks_is_not_taken_for_the_last_batch(net, monitor):
    def train(model, epoch_callback, batch_callback):
        epoch_callback(1)
        batch_callback(0)
        model(ROWS)
        model.eval()
        model(torch.zeros(1, 2))

    MonitoredTrainer(monitor).wrap_training_function(train)(net)
    assert moments(monitor) == [(1, 0, 0)]


def test_a_function_that_only_evaluates_is_recorded_when_it_says_where_it_is(net, monitor):
    def look(model, epoch_callback, batch_callback):
        model.eval()
        epoch_callback(1)
        for n in range(2):
            batch_callback(n)
            model(ROWS)

    MonitoredTrainer(monitor).wrap_training_function(look)(net)
    assert moments(monitor) == [(1, 0, 0), (1, 1, 0)]


def test_a_loader_made_anew_each_epoch_is_the_same_loader(net, monitor):
    data = TensorDataset(ROWS)

    def train():
        for _ in range(3):
            for (rows,) in DataLoader(data, batch_size=4):
                net(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == epochs([1, 2, 3])


def test_a_loader_and_a_dataset_made_anew_each_epoch_are_the_same_loader(net, monitor):
    def train():
        for _ in range(3):
            data = loader()
            for (rows,) in data:
                net(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == epochs([1, 2, 3])


def test_a_second_loader_to_train_from_counts_on_in_the_same_epoch(net, monitor):
    def train():
        one, other = loader(), loader(torch.zeros(8, 2))
        for _ in range(2):
            for each in (one, other):
                for (rows,) in each:
                    net(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == epochs([1, 2], batches=5)


def test_batches_that_are_passed_over_keep_their_numbers_and_an_early_stop_ends_the_epoch(net, monitor):
    def train():
        data = loader()
        for epoch in range(2):
            for n, (rows,) in enumerate(data):
                if n == 1:
                    continue
                net(rows)
                if epoch == 0 and n == 0:
                    break

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == [(1, 0, 0), (2, 0, 0), (2, 2, 0)]


def test_two_forwards_of_one_batch_are_two_calls(net, monitor):
    def train():
        for (rows,) in loader():
            net(rows[:2])
            net(rows[2:])

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == [(1, n, call) for n in range(3) for call in range(2)]


def test_workers_change_nothing(net, monitor):
    def train():
        data = loader(shuffle=True, num_workers=2, persistent_workers=True)
        for _ in range(2):
            for (rows,) in data:
                net(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == epochs([1, 2])
    indices = monitor.sample_indices
    with torch.no_grad():
        for key, output in monitor.get_epoch_data()["0"]["data"].items():
            assert output.allclose(net(ROWS[indices[key]]))


def test_a_function_that_sets_the_moment_itself_is_believed(net, monitor):
    def train():
        monitor.set_epoch(9)
        for n, (rows,) in enumerate(loader()):
            monitor.set_batch_idx(10 + n)
            net(rows)

    MonitoredTrainer(monitor).wrap_training_function(train)()
    assert moments(monitor) == [(9, 10, 0), (9, 11, 0), (9, 12, 0)]


# The end ------------------------------------------------------------------------------------------


def test_an_exception_goes_on_and_the_epoch_so_far_is_saved(net, monitor, tmp_path):
    def train():
        for n, (rows,) in enumerate(loader()):
            net(rows)
            if n == 1:
                raise ArithmeticError("the loss is gone")

    with pytest.raises(ArithmeticError, match="the loss is gone"):
        MonitoredTrainer(monitor).wrap_training_function(train)()
    assert torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)["batch_idx"] == [0, 1]
    assert_no_hooks_left(net)
    assert DataLoader.__iter__ is CLEAN


def test_a_wrong_call_raises_what_it_always_raised(net, monitor):
    def train(model):
        raise AssertionError("not reached")

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        MonitoredTrainer(monitor).wrap_training_function(train)()
    assert_no_hooks_left(net)


def test_a_method_can_be_wrapped(net, monitor):
    class Trainer:
        def fit(self, model, epoch_callback=None):
            epoch_callback(1)
            model(ROWS)
            return self

    trainer = Trainer()
    assert MonitoredTrainer(monitor).wrap_training_function(trainer.fit)(net) is trainer
    assert moments(monitor) == [(1, 0, 0)]
